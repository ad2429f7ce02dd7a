// quantize_rows: rows of elements as e4m3 codes with a scale each (row_codes.cuh): weights, and what attention gives.
//
//   codes, scales  [n / turn * apart + n % turn] = those of x[n]
//
//   codes   e4m3 [rows, K]
//   scales  f32  [rows]
//   x       elem [N, K]
//
// turn, apart: so many rows in a row of codes, then the next ones `apart` rows after the first of these: gate and up
// lie in turns. turn = apart = 1: one after another.
// Launch: grid N; block a multiple of 32, at most 1024, with K <= 32 times it; no dynamic shared memory. K is a
// multiple of 8.
// Must equal: quantize_rows in tinyvllm_cli/backends/fp8_rows.py, bit for bit.
#include "row_codes.cuh"

extern "C" __global__ void __launch_bounds__(MOST_THREADS)
    quantize_rows(code* __restrict__ codes, float* __restrict__ scales, const elem* x, int N, int K, int turn,
                  int apart) {
    start_next_kernel();
    wait_for_kernel_before();
    const int n = blockIdx.x;
    if (n >= N) return;
    const i64 row = static_cast<i64>(n / turn) * apart + n % turn;
    RowPart part;
    each_group(K, [&](int g, int k) { load8(part[g], x + static_cast<i64>(n) * K + k); });
    write_row(codes + row * K, scales + row, part, K);
}
