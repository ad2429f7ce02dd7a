// To e4m3, the FP8 of 4 bits of exponent and 3 of mantissa (Micikevicius et al., FP8 Formats for Deep Learning, 2022).
#pragma once
#include "common.cuh"

// e4m3 of a magnitude up to 448, to nearest, ties to even, with the sign of x; some number for NaN. Below 2^-6 codes
// are multiples of 2^-9, which are the last digits of a float32 of about 2^14.
__device__ __forceinline__ u32 code_of(float x) {
    u32 sign = __float_as_uint(x) >> 24 & 0x80, bits = __float_as_uint(x) & 0x7fffffff;
    u32 small = __float_as_uint(__fadd_rn(__uint_as_float(bits), 0x1p14f));
    u32 rounded = (bits + 0x7ffff + (bits >> 20 & 1)) >> 20;
    return sign | ((bits < __float_as_uint(0x1p-6f) ? small : rounded - (120 << 3)) & 0x7f);
}

__device__ __forceinline__ u32 converted_pair(float lo, float hi) {
    unsigned short codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(hi), "f"(lo));  // the first is the upper half
    return codes;
}

// Two codes as they lie in memory: lo in the low byte, first. By the card's own instruction where it has one.
__device__ __forceinline__ u32 codes_of(float lo, float hi) {
#if __CUDA_ARCH__ >= 890
    return converted_pair(lo, hi);
#else
    return code_of(lo) | code_of(hi) << 8;
#endif
}
