// medium_codes_2: as medium_codes_1, for weights of many rows: medium_codes.cu has the contract.
#include "medium_codes.cuh"

extern "C" __global__ void __launch_bounds__(320, 1)
    medium_codes_2(const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap a, elem* out,
                   int rows, int N, int K, int ld, int tokens, int stages, const float* a_scales,
                   const float* weight_scales) {
    const Operands operands{weights, a, K, stages};
    const Scales scales{a_scales, weight_scales};
    switch (tokens) {
        case 16:
            return product_codes<Tile<2, 16, 1, Codes>>(operands, scales, out, rows, N, ld);
        case 32:
            return product_codes<Tile<2, 32, 1, Codes>>(operands, scales, out, rows, N, ld);
        case 48:
            return product_codes<Tile<2, 48, 1, Codes>>(operands, scales, out, rows, N, ld);
        case 64:
            return product_codes<Tile<2, 64, 1, Codes>>(operands, scales, out, rows, N, ld);
        case 72:
            return product_codes<Tile<2, 72, 1, Codes>>(operands, scales, out, rows, N, ld);
        case 80:
            return product_codes<Tile<2, 80, 1, Codes>>(operands, scales, out, rows, N, ld);
        case 96:
            return product_codes<Tile<2, 96, 1, Codes>>(operands, scales, out, rows, N, ld);
        case 112:
            return product_codes<Tile<2, 112, 1, Codes>>(operands, scales, out, rows, N, ld);
        case 128:
            return product_codes<Tile<2, 128, 1, Codes>>(operands, scales, out, rows, N, ld);
        case 144:
            return product_codes<Tile<2, 144, 1, Codes>>(operands, scales, out, rows, N, ld);
    }
}
