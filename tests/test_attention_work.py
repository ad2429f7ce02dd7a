"""The work of the attention kernels, laid out on the host: every row and every partial of it is somebody's, once."""

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyvllm_cli.backends.gpu import attention
from tinyvllm_cli.backends.gpu.attention import MMA_ROWS, PARTIAL_KEYS, plan_attention, prefill_rows
from tinyvllm_cli.backends.gpu.kernels import KV_OPTIONS

CUDA = Path(__file__).parent.parent / "cuda"


class HostUpload:
    def put(self, array):
        assert array.dtype == np.int32 and array.flags.c_contiguous
        return array


sequences = st.lists(
    st.tuples(st.integers(0, 200), st.integers(0, 3000)).map(lambda pair: (pair[0], sum(pair))), min_size=1, max_size=12
)


@given(
    sequences=sequences,
    group=st.sampled_from([1, 2, 3, 4, 7, 8, 16]),
    head_dim=st.sampled_from([64, 256]),
    places=st.integers(-(-3200 // PARTIAL_KEYS), 40),  # those of the longest sequence at least
)
def test_every_row_and_every_partial_is_somebodys_once(sequences, group, head_dim, places):
    num_rows, lengths = (np.array(column, np.int32) for column in zip(*sequences, strict=True))
    starts = np.concatenate([[0], np.cumsum(num_rows)]).astype(np.int32)
    slots = 100 + np.arange(len(lengths), dtype=np.int32)[::-1]
    sizes = {"group": group, "head_dim": head_dim, "places": places}
    work = plan_attention(starts, lengths, slots, upload=HostUpload(), **sizes)
    rows: Counter[int] = Counter()
    for sequence, first, count, slot in () if work.prefill is None else work.prefill.tolist():
        assert slot == slots[sequence]
        assert starts[sequence] <= first < first + count <= starts[sequence + 1]
        assert count * group <= prefill_rows(head_dim)
        rows.update(range(first, first + count))
    for launch in work.decodes:
        items = launch.tolist()
        used = [place for _, _, place, _ in items if place >= 0]
        assert len(used) == len(set(used)) and max(used, default=0) < places
        for s in dict.fromkeys(sequence for sequence, *_ in items):
            partials = [(which, place, slot) for sequence, which, place, slot in items if sequence == s]
            count, first = -(-lengths[s] // PARTIAL_KEYS), partials[0][1]
            assert (first == -1) == (count == 1)
            assert partials == [(i, -1 if count == 1 else first + i, slots[s]) for i in range(count)]
            assert (starts[s + 1] - starts[s]) * group <= MMA_ROWS
            rows.update(range(starts[s], starts[s + 1]))
    assert rows == Counter(range(starts[-1]))


def test_work_follows_arrays_that_change_in_place():
    """What is kept of the steps before is found by the values of the arrays, which are the caller's to use again."""
    starts, lengths, slots = (
        np.arange(start, start + count, dtype=np.int32) for start, count in ((0, 5), (9, 4), (5, 4))
    )

    def items() -> list[list[int]]:
        work = plan_attention(starts, lengths, slots, group=1, head_dim=64, places=40, upload=HostUpload(), padded=True)
        return work.decodes[0].tolist()

    before = items()
    lengths += 1
    assert items() == before, "no sequence has got another partial"
    lengths[3] = PARTIAL_KEYS + 1
    slots[0] = 77
    after = items()
    assert len(after) == 8 and [item[3] for item in after] == [77, 6, 7, 8, 8, -1, -1, -1]


@pytest.mark.parametrize("name", ["TILE_KEYS", "PARTIAL_KEYS", "MMA_ROWS", "PREFILL_WARPS", "DECODE_WARPS"])
def test_numbers_of_the_launch_are_those_of_the_kernels(name):
    text = "".join(path.read_text() for path in CUDA.glob("*.cu*"))
    assert re.findall(rf"\b{name} = (\d+)\b", text) == [str(getattr(attention, name))]


@pytest.mark.parametrize("kv_dtype", KV_OPTIONS)
def test_shared_memory_stays_within_what_every_card_has(kv_dtype):
    for head_dim in filter(attention.supports_head_dim, range(1, 400)):
        most = max(attention.prefill_shared(head_dim, kv_dtype), attention.decode_shared(head_dim, kv_dtype))
        assert most <= 99 * 1024, head_dim
    assert [d for d in range(8, 300, 8) if attention.supports_head_dim(d)] == [*range(16, 129, 16), 160, 192, 224, 256]
