// Products of up to 256 rows on Hopper, of e4m3 codes with a scale for each row.
//
//   s[n, c] = (a[n] weight[c]) weight_scales[c] a_scales[n]
//   medium_codes_1, medium_codes_2:  out[n, :N] = elem(s[n])
//   medium_codes_add:                out[n, :N] += s[n]
//
// medium.cuh says how. The bits are those of cublasLt with fast accumulation: one chain of wgmma over K (docs/fp8.md).
//
//   weights        map of e4m3 [N, K] in tiles of ROWS rows, read while the kernel before still runs, as weight_scales
//   a              map of e4m3 [capacity, K] in tiles of TOKENS rows; what follows the first `rows` is anything
//   a_scales       f32 [rows]
//   weight_scales  f32 [N]
//   out            elem [rows, ld], of medium_codes_add float32; ld >= N; nothing but its [rows, N] is touched
//   N and ld are multiples of 8, K of 16; maps are of slabs of 128 columns, swizzled by 128 bytes
//
// Launch: as medium.cu. On other cards they do nothing, and are not launched.
// NumPy: out[:, :N] = (a @ weight.T) * weight_scales * a_scales[:, None], or +=, summed in float32 and rounded once.
#include "medium_codes.cuh"

extern "C" __global__ void __launch_bounds__(192, 1)
    medium_codes_1(const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap a, elem* out,
                   int rows, int N, int K, int ld, int tokens, int stages, const float* a_scales,
                   const float* weight_scales) {
    const Operands operands{weights, a, K, stages};
    const Scales scales{a_scales, weight_scales};
    switch (tokens) {
        case 16:
            return product_codes<Tile<1, 16, 2, Codes>>(operands, scales, out, rows, N, ld);
        case 32:
            return product_codes<Tile<1, 32, 2, Codes>>(operands, scales, out, rows, N, ld);
        case 48:
            return product_codes<Tile<1, 48, 2, Codes>>(operands, scales, out, rows, N, ld);
        case 64:
            return product_codes<Tile<1, 64, 2, Codes>>(operands, scales, out, rows, N, ld);
        case 80:
            return product_codes<Tile<1, 80, 2, Codes>>(operands, scales, out, rows, N, ld);
        case 96:
            return product_codes<Tile<1, 96, 2, Codes>>(operands, scales, out, rows, N, ld);
        case 112:
            return product_codes<Tile<1, 112, 2, Codes>>(operands, scales, out, rows, N, ld);
        case 128:
            return product_codes<Tile<1, 128, 2, Codes>>(operands, scales, out, rows, N, ld);
    }
}
