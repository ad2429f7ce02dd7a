"""What a run says of how far it is."""

from dataclasses import replace

import pytest

from tinyvllm_cli.io.summary import Progress

HALF = Progress(done=10, failed=0, total=20, prompt_tokens=0, completion_tokens=1000, made_tokens=1000, elapsed_s=10.0)


def test_the_time_left_is_that_of_the_tokens_left():
    assert HALF.seconds_left == pytest.approx(10.0)
    # Nearly done answers that have not ended count: 500 of the 1,000 tokens that are left were made already.
    assert replace(HALF, made_tokens=1500).seconds_left == pytest.approx(500 / 150)


def test_nothing_is_guessed_where_nothing_is_known():
    assert replace(HALF, done=0, completion_tokens=0).seconds_left is None
    assert replace(HALF, total=None).seconds_left is None
    assert replace(HALF, made_tokens=2500).seconds_left is None  # the finished answers were the short ones
    assert replace(HALF, done=20).seconds_left == 0
