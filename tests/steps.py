"""Steps of a backend made by hand, for tests that look at logits."""

import numpy as np

from tinyvllm_cli.config import BLOCK_SIZE
from tinyvllm_cli.types import Batch


def prompt_step(ids: list[int]) -> Batch:
    """A step of one sequence in slot 0: its whole prompt, the last row sampled."""
    zero = np.zeros(1, dtype=np.int32)
    return Batch(
        query_start_loc=np.array([0, len(ids)], dtype=np.int32),
        slots=zero,
        block_tables=np.arange(1, 1 + -(-len(ids) // BLOCK_SIZE), dtype=np.int32)[None],
        num_computed=zero,
        token_ids=np.array(ids, dtype=np.int32),
        logits_indices=np.array([len(ids) - 1], dtype=np.int32),
        sample_slots=zero,
    )
