"""Philox4x32-10, random words as a pure function of counter and key: no state, no order of calls.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U32 = npt.NDArray[np.uint32]

# Philox4x32's constants, and what halves a 64-bit product
M0, M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
KEY_STEP0, KEY_STEP1 = 0x9E3779B9, 0xBB67AE85  # fractions of the golden ratio and of sqrt(3)
HALF, LOW_HALF = np.uint64(32), np.uint64(0xFFFFFFFF)


def philox4x32_10(counter: U32, key: U32) -> U32:
    """Philox4x32 with 10 rounds: counter u32[N, 4], key u32[2] -> u32[N, 4]."""
    # 64-bit lanes throughout: products need them, and no lane ever changes its type.
    c0, c1, c2, c3 = (counter[:, word].astype(np.uint64) for word in range(4))
    k0, k1 = int(key[0]), int(key[1])
    for _ in range(10):
        product0, product1 = c0 * M0, c2 * M1
        c0 = (product1 >> HALF) ^ c1 ^ np.uint64(k0)
        c1 = product1 & LOW_HALF
        c2 = (product0 >> HALF) ^ c3 ^ np.uint64(k1)
        c3 = product0 & LOW_HALF
        k0, k1 = (k0 + KEY_STEP0) % 2**32, (k1 + KEY_STEP1) % 2**32
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)
