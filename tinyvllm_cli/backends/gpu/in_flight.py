"""A step that was enqueued, as the engine sees it: its mask goes in, its tokens come out."""

from __future__ import annotations

from collections.abc import Callable

from tinyvllm_cli.types import U32, StepOutput


class InFlight:
    """All of a step was enqueued, or, where it waits for its mask, all but its draws."""

    def __init__(self, draw: Callable[[U32], None], read: Callable[[], StepOutput], *, waits: bool) -> None:
        """draw: enqueues the draws of a step that waits. read: waits for the GPU."""
        self._draw = draw
        self._read = read
        self._output: StepOutput | None = None
        self.waits = waits

    def mask(self, bits: U32) -> None:
        """As in backends/base.py; `bits` may be changed again at once. DeviceError where the GPU failed."""
        if not self.waits:
            raise ValueError("the step has its tokens: a mask comes once, and to a step with mask_rows")
        self._draw(bits)
        self.waits = False

    def result(self) -> StepOutput:
        """Wait for the step; what was read once stays. DeviceError where the GPU failed."""
        if self.waits:
            raise ValueError("the step waits for its mask: call mask() before result()")
        if self._output is None:
            self._output = self._read()
        return self._output
