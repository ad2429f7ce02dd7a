// rms_norm, rms_norm_codes: the residual stream, normed, then rounded for a product (Zhang & Sennrich 2019).
//
//   rms_norm:        y[n, :] = elem(x[r, :] / sqrt(mean(x[r, :]^2) + eps) * weight), r = rows[n], or n without rows
//   rms_norm_codes:  codes[n, :], scales[n] = those of the same in float32 (row_codes.cuh), r = n
//
//   y       elem [N, H]
//   codes   e4m3 [N, H]
//   scales  f32  [N]
//   x       f32  [rows of the step, H]
//   weight  f32  [H]
//   rows    i32  [N] or null     may repeat; each is a row of x
//
// Launch: grid N; block 256, of rms_norm_codes a multiple of 32, at most 1024, with H <= 32 times it; no dynamic shared
// memory. H is a multiple of 8.
// The order of the sum depends on H and the block size alone: a row's bits are the same in any company.
// Must equal: rms_norm in tinyvllm_cli/backends/cpu/ops.py; quantize_rows in tinyvllm_cli/backends/fp8_rows.py.
#include "row_codes.cuh"

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

extern "C" __global__ void __launch_bounds__(MOST_THREADS)
    rms_norm_codes(code* __restrict__ codes, float* __restrict__ scales, const float* x, const float* weight, int N,
                   int H, float eps) {
    start_next_kernel();
    const int n = blockIdx.x, first = threadIdx.x * ELEMS_PER_16B;
    float w[ELEMS_PER_16B];
    if (first < H) load8(w, weight + first);  // comes while the kernel before still runs
    wait_for_kernel_before();
    if (n >= N) return;

    RowPart part;
    float squares = 0.0f;
    each_group(H, [&](int g, int k) {
        load8(part[g], x + static_cast<i64>(n) * H + k);
#pragma unroll
        for (int j = 0; j < ELEMS_PER_16B; j++) squares = __fmaf_rn(part[g][j], part[g][j], squares);
    });
    const float mean = __fdiv_rn(block_sum(squares), static_cast<float>(H));
    const float scale = __frsqrt_rn(__fadd_rn(mean, eps));
    each_group(H, [&](int g, int k) {
        if (g > 0) load8(w, weight + k);
#pragma unroll
        for (int j = 0; j < ELEMS_PER_16B; j++) part[g][j] = __fmul_rn(__fmul_rn(part[g][j], scale), w[j]);
    });
    write_row(codes + static_cast<i64>(n) * H, scales + n, part, H);
}
