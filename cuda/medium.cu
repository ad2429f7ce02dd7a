// Products of 17 to 256 rows on Hopper.
//
//   medium_elem:  out[n, :N] = elem(a[n] weight^T)
//   medium_add:   out[n, :N] += a[n] weight^T
//
// medium.cuh says how, and why the bits are those of skinny.cu and of cublasLt.
//
//   weights  map of elem [N, K] in tiles of ROWS rows, read while the kernel before still runs
//   a        map of elem [capacity, K] in tiles of TOKENS rows; what follows the first `rows` is anything
//   out      elem [rows, ld], of medium_add float32; ld >= N; nothing but its [rows, N] is touched
//   N, K and ld are multiples of 8; maps are of slabs of 64 columns, swizzled by 128 bytes
//
// Launch: at least ceil(N / ROWS) x ceil(rows / TOKENS) blocks of THREADS threads, in clusters of sizes of 1 or 2;
// stages (STAGE_BYTES + 24) bytes of dynamic shared memory, of 2 stages at least. Rows, slabs and tokens of a tile
// stand in the table in tinyvllm_cli/backends/gpu/medium.py; the number in a name is that of groups.
// On other cards they do nothing, and are not launched.
// NumPy: out[:, :N] = a @ weight.T, or +=, summed in float32 and rounded once.
#include "medium_results.cuh"

extern "C" __global__ void __launch_bounds__(192, 1)
    medium_elem_1(const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap a, elem* out, int rows,
                  int N, int K, int ld, int tokens, int stages) {
    const Operands operands{weights, a, K, stages};
    switch (tokens) {
        case 32:
            return product_elem<Tile<1, 32, 2>>(operands, out, rows, N, ld);
        case 48:
            return product_elem<Tile<1, 48, 2>>(operands, out, rows, N, ld);
        case 64:
            return product_elem<Tile<1, 64, 2>>(operands, out, rows, N, ld);
        case 72:
            return product_elem<Tile<1, 72, 2>>(operands, out, rows, N, ld);
        case 80:
            return product_elem<Tile<1, 80, 2>>(operands, out, rows, N, ld);
        case 88:
            return product_elem<Tile<1, 88, 2>>(operands, out, rows, N, ld);
        case 96:
            return product_elem<Tile<1, 96, 2>>(operands, out, rows, N, ld);
        case 104:
            return product_elem<Tile<1, 104, 2>>(operands, out, rows, N, ld);
        case 112:
            return product_elem<Tile<1, 112, 2>>(operands, out, rows, N, ld);
        case 128:
            return product_elem<Tile<1, 128, 2>>(operands, out, rows, N, ld);
    }
}
