// rms_norm: the residual stream, normed and rounded for a product with a weight (Zhang & Sennrich 2019).
//
//   y[n, :] = elem(x[r, :] / sqrt(mean(x[r, :]^2) + eps) * weight), r = rows[n], or n where rows is null
//
//   y       elem [N, H]
//   x       f32  [rows of the step, H]
//   weight  f32  [H]
//   rows    i32  [N] or null     may repeat; each is a row of x
//
// Launch: grid N, block 256; no dynamic shared memory. H is a multiple of 8.
// The order of the sum depends on H and the block size alone: a row's bits are the same in any company.
// Must equal: rms_norm in tinyvllm_cli/backends/cpu/ops.py.
#include "common.cuh"

extern "C" __global__ void rms_norm(elem* __restrict__ y, const float* x, const float* weight,
                                    const int* __restrict__ rows, int N, int H, float eps) {
    start_next_kernel();
    const int n = blockIdx.x, first = threadIdx.x * ELEMS_PER_16B, step = blockDim.x * ELEMS_PER_16B;
    float v[ELEMS_PER_16B], w[ELEMS_PER_16B];
    if (first < H) load8(w, weight + first);  // comes while the kernel before still runs
    wait_for_kernel_before();
    if (n >= N) return;
    const float* source = x + static_cast<i64>(rows ? rows[n] : n) * H;
    elem* target = y + static_cast<i64>(n) * H;

    float squares = 0.0f;
    for (int i = first; i < H; i += step) {
        load8(v, source + i);
#pragma unroll
        for (int j = 0; j < ELEMS_PER_16B; j++) squares = __fmaf_rn(v[j], v[j], squares);
    }
    const float mean = __fdiv_rn(block_sum(squares), static_cast<float>(H));
    const float scale = __frsqrt_rn(__fadd_rn(mean, eps));

    for (int i = first; i < H; i += step) {  // x once more, from the L1 cache
        load8(v, source + i);
        if (i > first) load8(w, weight + i);
#pragma unroll
        for (int j = 0; j < ELEMS_PER_16B; j++) v[j] = __fmul_rn(__fmul_rn(v[j], scale), w[j]);
        store8(target + i, v);
    }
}
