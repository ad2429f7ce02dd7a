// medium_add: products of 17 to 256 rows on Hopper, added: medium.cu has the contract.
#include "medium_results.cuh"

namespace {

template <typename T>
__device__ __forceinline__ void product_add(const Operands& operands, float* out, int rows, int N, int ld) {
    const int first_token = blockIdx.y * T::TOKENS, first = blockIdx.x * T::ROWS;
    const Result<T, float> result{out, rows, N, ld, first_token, first};
    float old[T::TOKENS / 2] = {};
    auto load = [&] { visit_result(result, [&](int i, float* place) { old[i] = *place; }); };
    product<T>(operands, load, [&](const float (&sums)[T::TOKENS / 2]) {
        visit_result(result, [&](int i, float* place) { *place = __fadd_rn(old[i], sums[i]); });
    });
}

}  // namespace

extern "C" __global__ void __launch_bounds__(192, 1)
    medium_add(const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap a, float* out, int rows,
               int N, int K, int ld, int tokens, int stages) {
    const Operands operands{weights, a, K, stages};
    switch (tokens) {
        case 32:
            return product_add<Tile<1, 32, 2>>(operands, out, rows, N, ld);
        case 40:
            return product_add<Tile<1, 40, 2>>(operands, out, rows, N, ld);
        case 48:
            return product_add<Tile<1, 48, 2>>(operands, out, rows, N, ld);
        case 56:
            return product_add<Tile<1, 56, 2>>(operands, out, rows, N, ld);
        case 64:
            return product_add<Tile<1, 64, 2>>(operands, out, rows, N, ld);
        case 72:
            return product_add<Tile<1, 72, 2>>(operands, out, rows, N, ld);
        case 80:
            return product_add<Tile<1, 80, 2>>(operands, out, rows, N, ld);
        case 88:
            return product_add<Tile<1, 88, 2>>(operands, out, rows, N, ld);
        case 96:
            return product_add<Tile<1, 96, 2>>(operands, out, rows, N, ld);
        case 104:
            return product_add<Tile<1, 104, 2>>(operands, out, rows, N, ld);
        case 112:
            return product_add<Tile<1, 112, 2>>(operands, out, rows, N, ld);
        case 128:
            return product_add<Tile<1, 128, 2>>(operands, out, rows, N, ld);
    }
}
