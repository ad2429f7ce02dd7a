// normed_qkv: rms_norm, the product with q, k and v, and rope_write in one kernel, which has the bits of those apart
// (norm.cu, skinny.cu, rope_write.cu). Without head norms, and with K and V held as elem.
//
//   y       = elem(x[n] / sqrt(mean(x[n]^2) + eps) * norm)
//   head    = float32(elem(y weight^T))[head] + bias[head]
//   (a, b)  = (a cos - b sin, b cos + a sin)                     q and k; a, b: its halves
//   q[n, head], or K or V at the row's position, = elem(head)
//
//   q, cache, bias, cos, sin, positions, slots, block_tables     as of rope_write
//   x       f32  [rows, K]
//   norm    f32  [K]
//   weight  elem [(Hq + 2 Hkv) HEAD_DIM, K]                      1 <= rows <= 8, K a multiple of 8, at most 4096
//
// Launch: ceil((Hq + 2 Hkv) HEAD_DIM / ROWS) blocks of 256 threads, shared memory as of normed_product (normed.cu), by
// the constants of Low (skinny.cuh). HEAD_DIM is a multiple of 16.
// Must equal: qkv_rope_write in tinyvllm_cli/backends/cpu/ops.py.
#include "kv.cuh"
#include "normed.cuh"

namespace {

constexpr int HALF = HEAD_DIM / 2;
constexpr int WARPS_PER_HEAD = HEAD_DIM / WARP_ROWS;

// The 16 rows of a warp are 8 of the first half of a head and the 8 that turn with them: a lane has both numbers.
struct HalfByHalf {
    int first;  // of the block

    __device__ __forceinline__ int operator()(int row) const {
        const int warp = (first + row) / WARP_ROWS, of_warp = (first + row) % WARP_ROWS;
        return warp / WARPS_PER_HEAD * HEAD_DIM + warp % WARPS_PER_HEAD * 8 + of_warp % 8 + of_warp / 8 * HALF;
    }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    normed_qkv(elem* __restrict__ q, char* __restrict__ cache, const float* x, const float* norm, const elem* weight,
               const float* __restrict__ bias, const float* cos, const float* sin, const int* positions,
               const int* __restrict__ slots, const int* block_tables, int rows, int Hq, int Hkv, int B, int layer,
               int num_layers, int K, float eps) {
    const int N = (Hq + 2 * Hkv) * HEAD_DIM, first = blockIdx.x * Low::ROWS;
    const Source<Low, HalfByHalf> source{weight, min(Low::ROWS, N - first), K, {first}};
    float sums[1][4] = {};
    normed_sums(sums, x, norm, source, rows, eps);
    const int warp = threadIdx.x / WARP, tile = first / WARP_ROWS + warp;
    if (warp >= Low::MULTIPLIERS) return;
    const int head = tile / WARPS_PER_HEAD, d = tile % WARPS_PER_HEAD * 8 + threadIdx.x % WARP / 4;
    const bool is_q = head < Hq, is_v = head >= Hq + Hkv;
    visit_sums<1>(first + warp * WARP_ROWS, rows, N, [&](int, int i, int row, int) {
        if (i >= 2) return;
        float a = to_float(from_float(sums[0][i])), b = to_float(from_float(sums[0][i + 2]));
        if (bias) {
            a = __fadd_rn(a, bias[head * HEAD_DIM + d]);
            b = __fadd_rn(b, bias[head * HEAD_DIM + HALF + d]);
        }
        const int position = positions[row];
        if (!is_v) {
            const i64 angle = static_cast<i64>(position) * HALF + d;
            const float c = cos[angle], s = sin[angle], unturned = a;
            a = __fmaf_rn(a, c, __fmul_rn(-b, s));
            b = __fmaf_rn(b, c, __fmul_rn(unturned, s));
        }
        elem* target = q + (static_cast<i64>(row) * Hq + head) * HEAD_DIM;
        if (!is_q) {
            const i64 block = block_tables[static_cast<i64>(slots[row]) * B + position / BLOCK_SIZE];
            const i64 plane = ((block * num_layers + layer) * 2 + is_v) * Hkv + (head - Hq) % Hkv;
            target = reinterpret_cast<elem*>(cache + plane * PLANE_BYTES) + position % BLOCK_SIZE * HEAD_DIM;
        }
        target[d] = from_float(a);
        target[HALF + d] = from_float(b);
    });
}
