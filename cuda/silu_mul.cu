// silu_mul, silu_mul_codes and add_bias: what follows a product.
//
//   silu_mul:        h[t, i] = elem(g / (1 + exp(-g)) * u), g and u = float32(gate_up[t]) + bias (SwiGLU, Shazeer 2020)
//   silu_mul_codes:  codes[t, :], scales[t] = those of the same in float32 (row_codes.cuh)
//   add_bias:        x[t, n] = x[t, n] + bias[n]
//
//   h        elem [T, I]
//   codes    e4m3 [T, I]
//   scales   f32  [T]
//   gate_up  elem [T, 2 I]          8 of gate, 8 of up, 8 of gate, ...
//   bias     f32  [2 I] or null     interleaved as gate_up; of add_bias: f32 [N]
//   x        f32  [T, N]            in place
//
// Launch: T * I / 8, or T * N / 8, threads in a grid of one dimension; block any size; no shared memory. Of
// silu_mul_codes: grid T; block a multiple of 32, at most 1024, with I <= 32 times it. I and N are multiples of 8.
// Must equal: gate_up_silu and _product_add in tinyvllm_cli/backends/cpu/ops.py, after their products; quantize_rows in
// tinyvllm_cli/backends/fp8_rows.py.
#include "row_codes.cuh"
#include "silu.cuh"

__device__ __forceinline__ void add8(float* v, const float* bias) {
    float b[ELEMS_PER_16B];
    load8(b, bias);
#pragma unroll
    for (int j = 0; j < ELEMS_PER_16B; j++) v[j] = __fadd_rn(v[j], b[j]);
}

// h[0..7] of 8 of gate and 8 of up at `source`, with their biases, if there are any.
__device__ __forceinline__ void silu_mul8(float* h, const elem* source, const float* bias) {
    float up[ELEMS_PER_16B];
    load8(h, source);
    load8(up, source + ELEMS_PER_16B);
    if (bias) {
        add8(h, bias);
        add8(up, bias + ELEMS_PER_16B);
    }
#pragma unroll
    for (int j = 0; j < ELEMS_PER_16B; j++) h[j] = __fmul_rn(silu(h[j]), up[j]);
}

extern "C" __global__ void silu_mul(elem* __restrict__ h, const elem* gate_up, const float* __restrict__ bias, int T,
                                    int I) {
    start_next_kernel();
    wait_for_kernel_before();
    const i64 group = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;  // of 8 columns of a row
    const int groups = I / ELEMS_PER_16B;                                       // of a row
    if (group >= static_cast<i64>(T) * groups) return;
    float v[ELEMS_PER_16B];
    silu_mul8(v, gate_up + group * 2 * ELEMS_PER_16B, bias ? bias + (group % groups) * 2 * ELEMS_PER_16B : nullptr);
    store8(h + group * ELEMS_PER_16B, v);
}

extern "C" __global__ void __launch_bounds__(MOST_THREADS)
    silu_mul_codes(code* __restrict__ codes, float* __restrict__ scales, const elem* gate_up,
                   const float* __restrict__ bias, int T, int I) {
    start_next_kernel();
    wait_for_kernel_before();
    const int t = blockIdx.x;
    if (t >= T) return;
    RowPart part;
    const elem* row = gate_up + static_cast<i64>(t) * 2 * I;
    each_group(I, [&](int g, int k) { silu_mul8(part[g], row + 2 * k, bias ? bias + 2 * k : nullptr); });
    write_row(codes + static_cast<i64>(t) * I, scales + t, part, I);
}

extern "C" __global__ void add_bias(float* __restrict__ x, const float* __restrict__ bias, int T, int N) {
    start_next_kernel();
    wait_for_kernel_before();
    const i64 group = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int groups = N / ELEMS_PER_16B;
    if (group >= static_cast<i64>(T) * groups) return;
    float v[ELEMS_PER_16B];
    float* place = x + group * ELEMS_PER_16B;
    load8(v, place);
    add8(v, bias + (group % groups) * ELEMS_PER_16B);
    store8(place, v);
}
