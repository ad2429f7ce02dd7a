"""Store the logits that transformers' processors make of those of processor_cases.py.

They go to tests/data/reference/processors.json; null stands for -inf. Run with the project's `reference` extra
installed: python tests/reference/make_processors.py
"""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from transformers.generation import logits_process as processors

TESTS = Path(__file__).parent.parent
sys.path.insert(0, str(TESTS))

from processor_cases import CASES, HISTORY, LATE, PROMPT_LEN, Case, case_logits  # noqa: E402


def processors_of(case: Case) -> Iterator[processors.LogitsProcessor]:
    """In our order (docs/sampling.md): those of `generate` come in another one, which depends on the version."""
    options = case.options
    if options.repetition_penalty != 1:
        yield processors.RepetitionPenaltyLogitsProcessor(options.repetition_penalty)
    if options.logit_bias:
        yield processors.SequenceBiasLogitsProcessor([[[token], bias] for token, bias in options.logit_bias])
    if case.allowed is not None:
        yield processors.PrefixConstrainedLogitsProcessor(lambda batch, ids: list(case.allowed or ()), num_beams=1)
    if options.stop_ids:
        new_tokens = options.min_position - PROMPT_LEN
        yield processors.MinNewTokensLengthLogitsProcessor(PROMPT_LEN, new_tokens, list(options.stop_ids))
    yield processors.TemperatureLogitsWarper(options.temperature)
    if options.top_k:
        yield processors.TopKLogitsWarper(options.top_k)
    if options.top_p < 1:
        yield processors.TopPLogitsWarper(options.top_p)
    if options.min_p:
        yield processors.MinPLogitsWarper(options.min_p)


def main() -> None:
    assert len(HISTORY) < LATE
    stored: dict[str, list[float | None]] = {}
    for number, (name, case) in enumerate(CASES.items()):
        scores = torch.tensor(case_logits(number))[None]
        for process in processors_of(case):
            scores = process(torch.tensor([HISTORY]), scores)
        stored[name] = [None if value == -math.inf else value for value in scores[0].tolist()]
    versions = [f"torch {torch.__version__}", f"transformers {transformers.__version__}"]
    path = TESTS / "data" / "reference" / "processors.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"versions": versions, "logits": stored}, indent=1).replace("\n   ", " ") + "\n")


if __name__ == "__main__":
    main()
