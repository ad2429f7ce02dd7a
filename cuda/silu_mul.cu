// silu_mul and add_bias: what follows a product, 8 numbers a thread.
//
//   silu_mul:  h[t, i] = elem(g / (1 + exp(-g)) * u), g and u = float32(gate_up[t]) + bias (SwiGLU, Shazeer 2020)
//   add_bias:  x[t, n] = x[t, n] + bias[n]
//
//   h        elem [T, I]
//   gate_up  elem [T, 2 I]          8 of gate, 8 of up, 8 of gate, ...
//   bias     f32  [2 I] or null     interleaved as gate_up; of add_bias: f32 [N]
//   x        f32  [T, N]            in place
//
// Launch: T * I / 8, or T * N / 8, threads in a grid of one dimension; block any size; no shared memory. I and N are
// multiples of 8.
// Must equal: gate_up_silu and _product_add in tinyvllm_cli/backends/cpu/ops.py, after their products.
#include "silu.cuh"

__device__ __forceinline__ void add8(float* v, const float* bias) {
    float b[ELEMS_PER_16B];
    load8(b, bias);
#pragma unroll
    for (int j = 0; j < ELEMS_PER_16B; j++) v[j] = __fadd_rn(v[j], b[j]);
}

extern "C" __global__ void silu_mul(elem* __restrict__ h, const elem* gate_up, const float* __restrict__ bias, int T,
                                    int I) {
    start_next_kernel();
    wait_for_kernel_before();
    const i64 group = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;  // of 8 columns of a row
    const int groups = I / ELEMS_PER_16B;                                       // of a row
    if (group >= static_cast<i64>(T) * groups) return;
    float gate[ELEMS_PER_16B], up[ELEMS_PER_16B];
    const elem* source = gate_up + group * 2 * ELEMS_PER_16B;
    load8(gate, source);
    load8(up, source + ELEMS_PER_16B);
    if (bias) {
        const float* of_group = bias + (group % groups) * 2 * ELEMS_PER_16B;
        add8(gate, of_group);
        add8(up, of_group + ELEMS_PER_16B);
    }
#pragma unroll
    for (int j = 0; j < ELEMS_PER_16B; j++) gate[j] = __fmul_rn(silu(gate[j]), up[j]);
    store8(h + group * ELEMS_PER_16B, gate);
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
