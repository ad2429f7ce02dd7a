// medium_elem_2: as medium_elem_1, for weights of many rows: medium.cu has the contract.
#include "medium_results.cuh"

extern "C" __global__ void __launch_bounds__(320, 1)
    medium_elem_2(const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap a, elem* out, int rows,
                  int N, int K, int ld, int tokens, int stages) {
    const Operands operands{weights, a, K, stages};
    switch (tokens) {
        case 32:
            return product_elem<Tile<2, 32, 1>>(operands, out, rows, N, ld);
        case 48:
            return product_elem<Tile<2, 48, 1>>(operands, out, rows, N, ld);
        case 64:
            return product_elem<Tile<2, 64, 1>>(operands, out, rows, N, ld);
        case 72:
            return product_elem<Tile<2, 72, 1>>(operands, out, rows, N, ld);
        case 80:
            return product_elem<Tile<2, 80, 1>>(operands, out, rows, N, ld);
        case 88:
            return product_elem<Tile<2, 88, 1>>(operands, out, rows, N, ld);
        case 96:
            return product_elem<Tile<2, 96, 1>>(operands, out, rows, N, ld);
        case 112:
            return product_elem<Tile<2, 112, 1>>(operands, out, rows, N, ld);
        case 128:
            return product_elem<Tile<2, 128, 1>>(operands, out, rows, N, ld);
        case 144:
            return product_elem<Tile<2, 144, 1>>(operands, out, rows, N, ld);
        case 192:
            return product_elem<Tile<2, 192, 1>>(operands, out, rows, N, ld);
        case 256:
            return product_elem<Tile<2, 256, 1>>(operands, out, rows, N, ld);
    }
}
