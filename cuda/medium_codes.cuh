// Sums of e4m3 codes and the scales of both rows that they are multiplied with: what becomes of medium.cuh's in FP8.
#pragma once
#include "medium_results.cuh"

namespace {

// A row's each: of activations and of the weight.
struct Scales {
    const float *a, *weight;
};

// Those of a thread's sums: of each 8 columns of a wgmma two tokens, of its rows two.
template <typename T>
struct ThreadScales {
    float tokens[T::TOKENS / 4], rows[2];

    __device__ __forceinline__ void load(const Scales& scales, int num_rows, int N) {
        const int lane = threadIdx.x % WARP, first_token = blockIdx.y * T::TOKENS + lane % 4 * 2;
        const int row = blockIdx.x * T::ROWS + threadIdx.x / WARP * 16 + lane / 4;
#pragma unroll
        for (int i = 0; i < 2; i++) rows[i] = row + i * 8 < N ? scales.weight[row + i * 8] : 0;
#pragma unroll
        for (int i = 0; i < T::TOKENS / 4; i++) {
            const int token = first_token + i / 2 * 8 + i % 2;
            tokens[i] = token < num_rows ? scales.a[token] : 0;
        }
    }
    // The i-th sum, times both.
    __device__ __forceinline__ float scaled(int i, float sum) const {
        return __fmul_rn(__fmul_rn(sum, rows[i % 4 / 2]), tokens[i / 4 * 2 + i % 2]);
    }
};

template <typename T>
__device__ __forceinline__ void product_codes(const Operands& operands, const Scales& scales, elem* out, int rows,
                                              int N, int ld) {
    ThreadScales<T> of_thread;
    product<T>(
        operands, [&] { of_thread.load(scales, rows, N); },
        [&](float (&sums)[T::TOKENS / 2]) {
#pragma unroll
            for (int i = 0; i < T::TOKENS / 2; i++) sums[i] = of_thread.scaled(i, sums[i]);
            const int first = blockIdx.x * T::ROWS, first_token = blockIdx.y * T::TOKENS;
            Result<T, elem>{out, rows, N, ld, first_token, first}.take(rounded<T>(sums));
        });
}

}  // namespace
