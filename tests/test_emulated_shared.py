"""Prefixes that decoding sequences share, over the emulated kernels: no answer changes."""

from functools import partial
from pathlib import Path

import pytest
from gpu_subject import gpu_backend
from shared_laws import answers_are_those_of_an_engine_that_shares_nothing
from tiny import make_tiny_model

from tinyvllm_cli.model.checkpoint import open_checkpoint

pytestmark = [pytest.mark.emulated, pytest.mark.usefixtures("cuda")]


def test_answers_are_those_of_an_engine_that_shares_nothing(tmp_path: Path):
    checkpoint = open_checkpoint(
        make_tiny_model(tmp_path, num_hidden_layers=1, head_dim=64, max_position_embeddings=640)
    )
    options = {"num_blocks": 400, "slots": 6, "max_batch_tokens": 600}
    answers_are_those_of_an_engine_that_shares_nothing(partial(gpu_backend, checkpoint, **options))
