// SiLU, of which a product needs the same bits wherever it ends.
#pragma once
#include "common.cuh"

// The quick exp is off by up to 2 + 1.173 |g| ulp (CUDA C++ Programming Guide, "Intrinsic Functions"): by 2^-16 of the
// result where exp(-g) counts most, at g = -87, far under a rounding to elem. The exact exp and quotient would take
// longer than the memory does. Past that the divisor exceeds 2^126, where the quick quotient is 0: the result is less
// than 2^-119.
__device__ __forceinline__ float silu(float g) {
    return __fdividef(g, __fadd_rn(1.0f, __expf(-g)));
}
