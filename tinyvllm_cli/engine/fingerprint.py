"""What a run is resumed by: a short digest of all that determines the answer to a request."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

from tinyvllm_cli.engine.sampling import canonical_json, canonical_request, request_seed
from tinyvllm_cli.types import Request

DIGITS = 16  # hexadecimal: 64 bits


@dataclass(frozen=True, slots=True)
class Answerer:
    """What answers, as far as the answers depend on it: not the backend, slots, memory or threads.

    A context that memory limits is no part of it: it would tie a run to its machine.
    """

    model: str  # digest (model/digest.py)
    dtype: str
    kv_dtype: str
    system: str | None  # of the command
    date: str | None  # frozen; None where the chat template does not ask for it
    seed: int  # of the run
    context: int | None = None  # --max-model-len, which may cut an answer; None: the model's, or what fits


class Fingerprints:
    """SHA-256, shortened, over the answerer and the canonical request with its answer fields and seed in force.

    The line's place, its metadata and how its id is written are no part of it.
    """

    def __init__(self, answerer: Answerer) -> None:
        self._run_seed = answerer.seed
        shared = {name: value for name, value in asdict(answerer).items() if name not in {"seed", "context"}}
        if answerer.context is not None:
            shared["context"] = answerer.context
        self._start = hashlib.sha256(canonical_json(shared))

    def of(self, request: Request) -> str:
        digest = self._start.copy()
        digest.update(canonical_json(self._content(request)))
        return digest.hexdigest()[:DIGITS]

    def _content(self, request: Request) -> dict[str, Any]:
        content = canonical_request(request) | {"seed": request_seed(request, self._run_seed)}
        # What is at its default is left out, so that a field that joins later changes no fingerprint without it.
        if request.params.n > 1:
            content["n"] = request.params.n
        if request.params.logprobs is not None:
            content["logprobs"] = request.params.logprobs
        if request.truncate_left:
            content["truncate"] = "left"
        if request.api is not None:
            content["api"] = request.api
        return content


class ScoreFingerprints(Fingerprints):
    """The same of requests that are scored: of these nothing is drawn, and no other field tells."""

    def __init__(self, answerer: Answerer, *, tokens: bool) -> None:
        """tokens: whether the output has the logprob of each."""
        super().__init__(answerer)
        self._tokens = tokens

    def _content(self, request: Request) -> dict[str, Any]:
        return {"score": request.prompt, "continuations": request.continuations, "tokens": self._tokens}
