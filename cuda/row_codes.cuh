// A row of numbers, held by a block of threads, as e4m3 codes with one scale: what products in FP8 read.
//
//   scale  = max |x| / 448                    1 where max |x| is less than 2^-100
//   codes  = e4m3(x * (448 / max |x|))        to nearest, ties to even
//
// Where x has a NaN or an infinity the scale is NaN or infinite, which shows in the logits.
// A thread holds GROUPS times 8 numbers: rows have at most 8 GROUPS blockDim.x, a multiple of 8.
// Must equal: quantize_rows in tinyvllm_cli/backends/fp8_rows.py.
#pragma once
#include "e4m3.cuh"

typedef unsigned char code;

constexpr int GROUPS = 4;
constexpr int MOST_THREADS = 1024;

typedef float RowPart[GROUPS][ELEMS_PER_16B];

// function(g, k) for the groups that a thread has of a row: numbers k .. k + 7. Unrolled: RowPart lives in registers.
template <typename Function>
__device__ __forceinline__ void each_group(int K, Function function) {
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        const int k = (g * blockDim.x + threadIdx.x) * ELEMS_PER_16B;
        if (k < K) function(g, k);
    }
}

// Of all threads of a block, in each of them. Every thread calls it, as block_sum; once in a kernel.
__device__ __forceinline__ u32 block_max(u32 x) {
    __shared__ u32 of_warp[WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) x = max(x, __shfl_xor_sync(ALL_LANES, x, offset));
    if (lane == 0) of_warp[warp] = x;
    __syncthreads();
    x = lane < warps ? of_warp[lane] : 0;
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) x = max(x, __shfl_xor_sync(ALL_LANES, x, offset));
    return x;
}

// Every thread of the block calls it, with its part of the row.
__device__ __forceinline__ void write_row(code* codes, float* scale, const RowPart& part, int K) {
    u32 greatest = 0;  // as bits, of which those of NaN are greater than of any number
    each_group(K, [&](int g, int k) {
#pragma unroll
        for (int j = 0; j < ELEMS_PER_16B; j++) greatest = max(greatest, __float_as_uint(part[g][j]) & 0x7fffffff);
    });
    greatest = block_max(greatest);
    const bool zero = greatest < __float_as_uint(0x1p-100f);
    const float most = __uint_as_float(greatest), factor = zero ? 1.0f : __fdiv_rn(448.0f, most);
    if (threadIdx.x == 0) *scale = zero ? 1.0f : __fdiv_rn(most, 448.0f);
    each_group(K, [&](int g, int k) {
        u32 words[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float* v = part[g] + 4 * i;
            words[i] = codes_of(__fmul_rn(v[0], factor), __fmul_rn(v[1], factor)) |
                       codes_of(__fmul_rn(v[2], factor), __fmul_rn(v[3], factor)) << 16;
        }
        *reinterpret_cast<u64*>(codes + k) = static_cast<u64>(words[1]) << 32 | words[0];
    });
}
