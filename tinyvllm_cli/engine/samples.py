"""The samples of one prompt that run before it is computed: one of them computes it, for all."""

from __future__ import annotations

from tinyvllm_cli.types import Sequence


class Samples:
    """By request, its sequences that run and have drawn nothing, in the order of admission.

    The first computes the prompt. The others wait in their slots and hold no block; they draw their first tokens from
    the row from which it draws its own. One that gets its slot later is the first of those that come with it.
    """

    def __init__(self) -> None:
        self._of: dict[int, list[Sequence]] = {}

    @property
    def waiting(self) -> list[Sequence]:
        """All that wait for another one's prompt."""
        return [sequence for family in self._of.values() for sequence in family[1:]] if self._of else []

    def join(self, sequence: Sequence) -> bool:
        """A sequence runs; whether it waits for another one's prompt."""
        if sequence.request.params.n == 1 or sequence.num_sampled:
            return False
        family = self._of.setdefault(sequence.request.request_id, [])
        family.append(sequence)
        return len(family) > 1

    def waits(self, sequence: Sequence) -> bool:
        """Whether another one is computing the prompt of a sequence, which runs or is the next to."""
        family = self._of.get(sequence.request.request_id)
        return family is not None and not sequence.num_sampled and family[0] is not sequence

    def behind(self, sequence: Sequence) -> list[Sequence]:
        """Those for which a sequence computes the prompt too."""
        family = self._of.get(sequence.request.request_id)
        return family[1:] if family is not None and family[0] is sequence else []

    def drew(self, sequence: Sequence) -> list[Sequence]:
        """A sequence has computed all it knew, and drawn: those that have drawn with it."""
        family = self._of.get(sequence.request.request_id)
        if family is None or family[0] is not sequence:
            return []
        del self._of[sequence.request.request_id]
        return family[1:]

    def leave(self, sequence: Sequence) -> None:
        """A sequence runs no more. The first one leaves after those that wait for it."""
        family = self._of.get(sequence.request.request_id)
        if family is None or sequence not in family:
            return
        assert family[0] is not sequence or len(family) == 1, "others wait for it"
        family.remove(sequence)
        if not family:
            del self._of[sequence.request.request_id]
