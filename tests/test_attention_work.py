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
    places=st.integers(6, 40),
)
def test_every_row_and_every_partial_is_somebodys_once(sequences, group, head_dim, places):
    num_rows, lengths = (np.array(column, np.int32) for column in zip(*sequences, strict=True))
    starts = np.concatenate([[0], np.cumsum(num_rows)]).astype(np.int32)
    work = plan_attention(starts, lengths, group=group, head_dim=head_dim, places=places + 1, upload=HostUpload())
    rows: Counter[int] = Counter()
    for sequence, first, count in () if work.prefill is None else work.prefill.tolist():
        assert starts[sequence] <= first < first + count <= starts[sequence + 1]
        assert count * group <= prefill_rows(head_dim)
        rows.update(range(first, first + count))
    for launch in work.decodes:
        merges = {} if launch.merges is None else {s: (first, count) for s, first, count in launch.merges.tolist()}
        used = [place for _, _, place in launch.items.tolist() if place >= 0]
        assert len(used) == len(set(used)) and max(used, default=0) < places + 1
        for s in dict.fromkeys(launch.items[:, 0].tolist()):
            partials = [(which, place) for sequence, which, place in launch.items.tolist() if sequence == s]
            count = -(-lengths[s] // PARTIAL_KEYS)
            assert [which for which, _ in partials] == list(range(count))
            if count > 1:
                first, merged = merges.pop(s)
                assert (merged, [place for _, place in partials]) == (count, list(range(first, first + count)))
            else:
                assert partials[0][1] == -1
            assert (starts[s + 1] - starts[s]) * group <= MMA_ROWS
            rows.update(range(starts[s], starts[s + 1]))
        assert not merges
    assert rows == Counter(range(starts[-1]))


@pytest.mark.parametrize("name", ["TILE_KEYS", "PARTIAL_KEYS", "MMA_ROWS", "PREFILL_WARPS"])
def test_numbers_of_the_launch_are_those_of_the_kernels(name):
    text = "".join(path.read_text() for path in CUDA.glob("*.cu*"))
    assert re.findall(rf"\b{name} = (\d+)\b", text) == [str(getattr(attention, name))]


def test_shared_memory_stays_within_what_every_card_has():
    for head_dim in filter(attention.supports_head_dim, range(1, 400)):
        assert max(attention.shared_bytes(head_dim)) <= 99 * 1024
    assert [d for d in range(8, 300, 8) if attention.supports_head_dim(d)] == [*range(16, 129, 16), 160, 192, 224, 256]
