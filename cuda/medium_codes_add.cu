// medium_codes_add: products of e4m3 codes, added: medium_codes.cu has the contract.
#include "medium_codes.cuh"

namespace {

template <typename T>
__device__ __forceinline__ void product_codes_add(const Operands& operands, const Scales& scales, float* out, int rows,
                                                  int N, int ld) {
    const int first = blockIdx.x * T::ROWS, first_token = blockIdx.y * T::TOKENS;
    const Result<T, float> result{out, rows, N, ld, first_token, first};
    ThreadScales<T> of_thread;
    float old[T::TOKENS / 2] = {};
    auto load = [&] {
        of_thread.load(scales, rows, N);
        visit_result(result, [&](int i, float* place) { old[i] = *place; });
    };
    product<T>(operands, load, [&](const float (&sums)[T::TOKENS / 2]) {
        visit_result(result, [&](int i, float* place) { *place = __fadd_rn(old[i], of_thread.scaled(i, sums[i])); });
    });
}

}  // namespace

extern "C" __global__ void __launch_bounds__(192, 1)
    medium_codes_add(const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap a, float* out,
                     int rows, int N, int K, int ld, int tokens, int stages, const float* a_scales,
                     const float* weight_scales) {
    const Operands operands{weights, a, K, stages};
    const Scales scales{a_scales, weight_scales};
    switch (tokens) {
        case 16:
            return product_codes_add<Tile<1, 16, 2, Codes>>(operands, scales, out, rows, N, ld);
        case 32:
            return product_codes_add<Tile<1, 32, 2, Codes>>(operands, scales, out, rows, N, ld);
        case 48:
            return product_codes_add<Tile<1, 48, 2, Codes>>(operands, scales, out, rows, N, ld);
        case 64:
            return product_codes_add<Tile<1, 64, 2, Codes>>(operands, scales, out, rows, N, ld);
        case 72:
            return product_codes_add<Tile<1, 72, 2, Codes>>(operands, scales, out, rows, N, ld);
        case 80:
            return product_codes_add<Tile<1, 80, 2, Codes>>(operands, scales, out, rows, N, ld);
        case 96:
            return product_codes_add<Tile<1, 96, 2, Codes>>(operands, scales, out, rows, N, ld);
        case 112:
            return product_codes_add<Tile<1, 112, 2, Codes>>(operands, scales, out, rows, N, ld);
        case 128:
            return product_codes_add<Tile<1, 128, 2, Codes>>(operands, scales, out, rows, N, ld);
    }
}
