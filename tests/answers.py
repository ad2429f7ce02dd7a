"""Completions of every kind that a run can make, for tests of what is written."""

from typing import Any, get_args

from hypothesis import strategies as st

from tinyvllm_cli.errors import FailureType
from tinyvllm_cli.types import Api, Choice, Completion, Failure, Stats, TokenLogprob, Usage

seconds = st.floats(0, 1e9)
stats = st.builds(
    Stats,
    queue_s=seconds,
    ttft_s=st.none() | seconds,
    decode_s=st.none() | seconds,
    e2e_s=seconds,
    tokens_per_s=seconds,
    cached_tokens=st.integers(0, 99),
)
# Texts, characters in two parts and what is no UTF-8.
spellings = st.sampled_from([b"", b" a", b"a", "é".encode(), b"\xc3", b"\xa9", b"\xff", b"</s>"])


def token_logprobs(top: int) -> st.SearchStrategy[TokenLogprob]:
    more = st.lists(token_logprobs(0), min_size=top, max_size=top).map(tuple) if top else st.just(())
    return st.builds(TokenLogprob, id=st.integers(0, 9), token=spellings, logprob=st.floats(-99, 0), top=more)


choices = st.builds(
    Choice,
    index=st.integers(0, 3),
    text=st.text(),
    token_ids=st.just((1,)),
    finish_reason=st.sampled_from(["stop", "length"]),
    stop_reason=st.none() | st.text(min_size=1) | st.integers(0, 9),
    reasoning=st.none() | st.text(),
    logprobs=st.none() | st.integers(0, 2).flatmap(lambda top: st.lists(token_logprobs(top), max_size=3).map(tuple)),
)
failures = st.builds(
    Failure,
    type=st.sampled_from(get_args(FailureType)),
    message=st.text(),
    field=st.none() | st.text(),
    detail=st.none() | st.text(),
)


def completions(api: st.SearchStrategy[Api | None]) -> st.SearchStrategy[Completion]:
    """Answers to requests that came so, and failures of them."""
    shared: dict[str, st.SearchStrategy[Any]] = {
        "request_id": st.integers(0, 2**40),
        "custom_id": st.text() | st.integers(),
        "line": st.integers(1, 2**40),
        "metadata_json": st.sampled_from([None, b"null", b'{"a": 1.50}']),
        "api": api,
        "fingerprint": st.none() | st.from_regex("[0-9a-f]{16}", fullmatch=True),
    }
    answered = st.builds(
        Completion,
        choices=st.lists(choices, max_size=3).map(tuple),
        usage=st.builds(Usage, st.integers(1, 9999), st.integers(0, 9999)),
        stats=stats,
        truncated_tokens=st.sampled_from([0, 7]),
        **shared,
    )
    return answered | st.builds(Completion, error=failures, **shared)
