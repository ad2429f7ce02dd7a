// normed_product, normed_silu: rms_norm, a product and what follows it in one kernel, which has the bits of those apart
// (norm.cu, skinny.cu, silu_mul.cu).
//
//   normed_product:  out[n, :N] = elem(y[n] weight^T)
//   normed_silu:     out[n, i] = elem(g / (1 + exp(-g)) * u)
//
//   y[n, :] = elem(x[n, :] / sqrt(mean(x[n, :]^2) + eps) * norm); g, u = float32(elem(y[n] weight^T)) + bias
//
//   out     elem [rows, ld], ld >= N; normed_silu: elem [rows, N / 2]
//   x       f32  [rows, K]
//   norm    f32  [K]
//   weight  elem [N, K]            1 <= rows <= 8, K a multiple of 8; normed_silu: rows in turn 8 of gate, 8 of up
//   bias    f32  [N] or null       likewise
//
// Launch: ceil(N / ROWS) blocks of 256 threads, STAGES ROWS ROW_BYTES + rows (2 K rounded up to 64, + 16) bytes of
// dynamic shared memory, with the constants of Low, normed_silu of High (skinny.cuh). K <= 4096.
// NumPy: gate_up_silu and the product of qkv_rope_write in tinyvllm_cli/backends/cpu/ops.py.
#include "normed.cuh"
#include "silu.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    normed_product(elem* out, const float* x, const float* norm, const elem* weight, int rows, int N, int K, int ld,
                   float eps) {
    float sums[1][4] = {};
    normed_sums(sums, x, norm, rows_of_block<Low>(weight, N, K), rows, eps);
    const int warp = threadIdx.x / WARP;
    if (warp >= Low::MULTIPLIERS) return;
    visit_sums<1>(blockIdx.x * Low::ROWS + warp * WARP_ROWS, rows, N, [&](int, int i, int row, int column) {
        out[static_cast<size_t>(row) * ld + column] = from_float(sums[0][i]);
    });
}

// The 16 rows of a warp are 8 of gate and 8 of up: a lane has both of a number.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    normed_silu(elem* out, const float* x, const float* norm, const elem* weight, const float* bias, int rows, int N,
                int K, float eps) {
    float sums[1][4] = {};
    normed_sums(sums, x, norm, rows_of_block<High>(weight, N, K), rows, eps);
    const int warp = threadIdx.x / WARP, first = blockIdx.x * High::ROWS + warp * WARP_ROWS;
    if (warp >= High::MULTIPLIERS) return;
    visit_sums<1>(first, rows, N, [&](int, int i, int row, int column) {
        if (i >= 2) return;
        float gate = to_float(from_float(sums[0][i])), up = to_float(from_float(sums[0][i + 2]));
        if (bias) gate = __fadd_rn(gate, bias[column]), up = __fadd_rn(up, bias[column + 8]);
        out[static_cast<size_t>(row) * (N / 2) + first / 2 + threadIdx.x % WARP / 4] =
            from_float(__fmul_rn(silu(gate), up));
    });
}
