"""Row invariance on the GPU, for equal bits: what a row gives depends on its own sequence, and on nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import bit_laws
import pytest
from bit_laws import OTHERS, assert_none
from gpu_bits import ASCENDING, BORDERS, LENGTH, NAN, SHUFFLED, Model, broken
from tiny import make_tiny_model

from tinyvllm_cli.model.checkpoint import open_checkpoint

pytestmark = pytest.mark.gpu

MODELS: dict[str, dict[str, Any]] = {
    "4 heads a KV head of 64, bf16": {
        "dtype": "bfloat16",
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "head_dim": 64,
    },
    "q and k norms, heads of 128, fp16": {
        "architecture": "Qwen3ForCausalLM",
        "dtype": "float16",
        "hidden_size": 384,
        "intermediate_size": 768,
        "head_dim": 128,
    },
    "9 heads over 3, bf16": {
        "dtype": "bfloat16",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
}
NUM_ROWS = (1, 2, 3, 5, 8, 17, 33, 64, 65, 129, 256, 300)


@pytest.fixture(scope="module", params=MODELS)
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    checkpoint = open_checkpoint(make_tiny_model(tmp_path_factory.mktemp("model"), **MODELS[request.param]))
    model = Model(checkpoint)
    yield model
    model.backend.close()
    checkpoint.tensors.close()


@pytest.fixture
def model(shared: Model) -> Model:
    """References made, then nothing of IDS left in the pool."""
    assert shared.alone and shared.crowd
    shared.fill(NAN)
    return shared


@pytest.mark.parametrize("length", [700, LENGTH])
@pytest.mark.parametrize("chunk", [1, 7, 16, 33, LENGTH])
def test_chunks_have_the_bits_of_the_whole(model: Model, length: int, chunk: int):
    assert_none(bit_laws.chunks(model, length, chunk))


@pytest.mark.parametrize("length", [border for border in BORDERS if border])
def test_a_decoded_row_has_the_bits_of_a_prefilled_one(model: Model, length: int):
    assert_none(bit_laws.decoded(model, length))


@pytest.mark.parametrize("start", [13, 62, 254, 255, 509, 510, 511, 512, 1021, 1023])
def test_drafts_have_the_bits_of_decoded_rows(model: Model, start: int):
    """16 rows of queries, and more, whatever the ratio of heads."""
    assert_none(bit_laws.drafts(model, start, (2, 4, 5, 8, 9)))


@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_a_row_among_others_has_the_bits_it_has_alone(model: Model, num_rows: int):
    assert_none(bit_laws.among_others(model, num_rows, (0, 100, 233)))


@pytest.mark.parametrize(
    ("start", "end"), [(520, 521), (510, 514), (500, 533), (0, 540)], ids=["decode", "draft", "chunk", "prompt"]
)
def test_neighbours_of_every_kind_change_nothing(model: Model, start: int, end: int):
    others = [*model.crowd[:20], *OTHERS, *model.crowd[60:65]]
    assert_none(bit_laws.neighbours(model, start, end, others, (0, 20, 22, len(others))))


@pytest.mark.parametrize(
    "blocks", [ASCENDING[::-1], SHUFFLED, range(3, 3 + 4 * len(ASCENDING), 4)], ids=["reversed", "shuffled", "apart"]
)
def test_slots_and_order_of_blocks_change_nothing(model: Model, blocks: tuple[int, ...]):
    assert_none(bit_laws.other_blocks(model, blocks, (15, 511, 512, 1024)))


def test_a_preempted_sequence_has_its_bits_again(model: Model):
    assert_none(bit_laws.preempted(model, decoded=30))


@pytest.mark.parametrize("byte", [0x00, 0x7F, 0xC2, NAN], ids=hex)
def test_what_the_pool_held_changes_nothing(model: Model, byte: int):
    """0x7f7f and 0xc2c2 are great numbers of either sign."""
    assert_none(bit_laws.pool_of(model, byte, decoded=19))


def test_another_run_gives_the_same_bytes(model: Model):
    other = Model(model.checkpoint)
    try:
        lines = model.against_alone("another backend", other.alone)
        for part, found, wanted in zip(model.crowd, other.crowd_alone, model.crowd_alone, strict=True):
            if not broken(part.slot):
                lines += model.between(f"another backend, position {part.computed}", found, wanted)
    finally:
        other.backend.close()
    assert_none(lines)
