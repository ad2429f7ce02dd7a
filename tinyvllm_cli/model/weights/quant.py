"""De-quantize the block formats of GGML; layouts and formulas as in ggml-quants.c and ggml-common.h of llama.cpp.

A block is a few half-precision scales beside a fixed number of small integers; rows are whole blocks. Low bits come
packed in nibbles: byte j of a group holds the low nibble of element j and the high one of element j + half.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tinyvllm_cli.model.weights.source import U8
from tinyvllm_cli.types import F32

CHUNK = 1 << 18  # elements de-quantized at a time: the temporaries stay in the cache
SUPER = 256  # elements of a K block


@dataclass(frozen=True, slots=True)
class BlockFormat:
    elements: int  # of a block
    nbytes: int
    decode: Callable[[U8], F32]  # u8[blocks, nbytes] -> f32[blocks, elements]


def dequantize(type: str, data: U8, shape: tuple[int, ...]) -> F32:
    """The float32 tensor of `shape` whose blocks are the bytes of `data` (u8[n]), in row-major order."""
    form = FORMATS[type]
    blocks = data.reshape(-1, form.nbytes)
    out = np.empty((len(blocks), form.elements), np.float32)
    step = CHUNK // form.elements
    with np.errstate(invalid="ignore", over="ignore"):  # a scale that is inf or NaN shows in the logits
        for start in range(0, len(blocks), step):
            out[start : start + step] = form.decode(blocks[start : start + step])
    return out.reshape(shape)


def _half(blocks: U8, at: int) -> F32:
    """The half-precision number at a byte of every block: f32[blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: U8) -> U8:
    """u8[..., n] -> u8[..., 2 n]: the low nibbles, then the high ones."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1)


def _fifth_bits(blocks: U8, at: int) -> U8:
    """Bit 4 of the 32 elements of Q5_0 and Q5_1, which lies in a u32 apart: u8[blocks, 32]."""
    bits: U8 = np.unpackbits(blocks[:, at : at + 4], axis=-1, bitorder="little")
    return bits << np.uint8(4)


def _q8_0(b: U8) -> F32:
    """w = d q: d f16, q i8[32]."""
    return _half(b, 0) * b[:, 2:].view(np.int8)


def _q4_0(b: U8) -> F32:
    """w = d (q - 8): d f16, q u4[32]."""
    return _half(b, 0) * (_nibbles(b[:, 2:]).view(np.int8) - np.int8(8))


def _q4_1(b: U8) -> F32:
    """w = d q + m: d f16, m f16, q u4[32]."""
    return _half(b, 0) * _nibbles(b[:, 4:]) + _half(b, 2)


def _q5_0(b: U8) -> F32:
    """w = d (q - 16): d f16, fifth bits u32, q u4[32]."""
    q = _nibbles(b[:, 6:]) | _fifth_bits(b, 2)
    return _half(b, 0) * (q.view(np.int8) - np.int8(16))


def _q5_1(b: U8) -> F32:
    """w = d q + m: d f16, m f16, fifth bits u32, q u4[32]."""
    return _half(b, 0) * (_nibbles(b[:, 8:]) | _fifth_bits(b, 4)) + _half(b, 2)


def _k_scales(b: U8) -> tuple[F32, F32]:
    """Scale and minimum of the 8 groups of a Q4_K or Q5_K block, f32[blocks, 8, 1] each.

    d f16, dmin f16, then 12 bytes of 6-bit numbers: bytes 0-3 hold the first four scales and 4-7 the first four
    minima in their low 6 bits; bytes 8-11 the low nibbles of the last four (scale low, minimum high), whose top two
    bits are the top two of bytes 0-3 and 4-7.
    """
    s, m, low = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scale = np.concatenate((s & 63, (low & 15) | (s >> 6) << 4), axis=1)
    minimum = np.concatenate((m & 63, (low >> 4) | (m >> 6) << 4), axis=1)
    return (_half(b, 0) * scale)[:, :, None], (_half(b, 2) * minimum)[:, :, None]


def _q4_k(b: U8) -> F32:
    """w = d s q - dmin m for 8 groups of 32: 16 bytes of scales, q u4[256]."""
    scale, minimum = _k_scales(b)
    q = _nibbles(b[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return (scale * q - minimum).reshape(-1, SUPER)


def _q5_k(b: U8) -> F32:
    """As Q4_K with a fifth bit: 16 bytes of scales, 32 bytes whose bit g is that of group g, q u4[256]."""
    scale, minimum = _k_scales(b)
    group = np.arange(8, dtype=np.uint8)[:, None]
    fifth = (b[:, 16:48, None].swapaxes(1, 2) >> group & 1) << 4
    q = _nibbles(b[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32) | fifth
    return (scale * q - minimum).reshape(-1, SUPER)


def _q6_k(b: U8) -> F32:
    """w = d s (q - 32) for 16 groups of 16: 128 bytes of low nibbles, 64 of high bit pairs, s i8[16], d f16.

    Each half of a block is 128 elements in four runs of 32: byte j of its 64 low bytes serves runs j // 32 and
    j // 32 + 2; byte j of its 32 high bytes serves element j of all four runs.
    """
    low = _nibbles(b[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shift = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = (b[:, 128:192].reshape(-1, 2, 1, 32) >> shift & 3) << 4
    q = (low | high).view(np.int8) - np.int8(32)
    scale = _half(b, 208) * b[:, 192:208].view(np.int8)
    return (scale[:, :, None] * q.reshape(-1, 16, 16)).reshape(-1, SUPER)


FORMATS = {
    "Q4_0": BlockFormat(32, 18, _q4_0),
    "Q4_1": BlockFormat(32, 20, _q4_1),
    "Q5_0": BlockFormat(32, 22, _q5_0),
    "Q5_1": BlockFormat(32, 24, _q5_1),
    "Q8_0": BlockFormat(32, 34, _q8_0),
    "Q4_K": BlockFormat(SUPER, 144, _q4_k),
    "Q5_K": BlockFormat(SUPER, 176, _q5_k),
    "Q6_K": BlockFormat(SUPER, 210, _q6_k),
}
