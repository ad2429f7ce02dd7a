"""Prefixes that decoding sequences share, on a GPU: no answer changes."""

from functools import partial
from pathlib import Path

import pytest
from gpu_subject import gpu_backend
from shared_laws import answers_are_those_of_an_engine_that_shares_nothing
from tiny import make_tiny_model

from tinyvllm_cli.config import DtypeName, KVDtypeName
from tinyvllm_cli.model.checkpoint import open_checkpoint

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("head_dim", "dtype", "kv_dtype"), [(64, "bfloat16", "auto"), (64, "float16", "fp8"), (128, "bfloat16", "auto")]
)
def test_answers_are_those_of_an_engine_that_shares_nothing(
    head_dim: int, dtype: DtypeName, kv_dtype: KVDtypeName, tmp_path: Path
):
    checkpoint = open_checkpoint(make_tiny_model(tmp_path, dtype=dtype, head_dim=head_dim, max_position_embeddings=640))
    options = {"dtype": dtype, "num_blocks": 400, "slots": 6, "max_batch_tokens": 600, "kv_dtype": kv_dtype}
    answers_are_those_of_an_engine_that_shares_nothing(partial(gpu_backend, checkpoint, **options))
