// Products of at most 16 rows: tiles of a weight on their way through shared memory into tensor cores, K in order.
//
// The bits are those of cublasLt's algorithms without split K, by which more rows are multiplied: for each number of
// the result one float32 accumulator goes from zero through mma.sync.m16n8k16 over K in ascending steps of 16. A step
// takes about 33 cycles on Hopper and waits for the one before, so nothing else may stand in its way: MULTIPLIERS warps
// of a block do nothing but multiply, others load, as far ahead as shared memory holds. Rows of the weight are the 16
// rows of the mma, activations its 8 columns (for those that are not there the last one stands in, and what comes of it
// is not written).
#pragma once
#include "mma.cuh"

namespace {

constexpr int PAIR = 32;  // columns of two steps
constexpr int PAIR_BYTES = PAIR * sizeof(elem);
constexpr int WARP_ROWS = 16, TILE = 8;  // of the weight, and of activations

// How a block of threads works: so many warps multiply, so many columns of K are a stage of the ring, which has so
// many.
template <int WARPS, int WIDTH, int DEPTH>
struct Tiling {
    static constexpr int MULTIPLIERS = WARPS, COLUMNS = WIDTH, STAGES = DEPTH, ROWS = WARPS * WARP_ROWS;
    static constexpr int ROW_BYTES = COLUMNS * sizeof(elem) + 16;  // an odd number of 16 bytes: no bank conflicts
};
// Deep for weights whose rows are too few for all multiprocessors, so that what each has must be far ahead: one block
// on each. Low leaves room for a block of the kernel before. High for weights of many rows: fewer blocks, so less time
// in which they begin and end.
using Deep = Tiling<2, 512, 6>;
using Low = Tiling<2, 512, 3>;
using High = Tiling<4, 256, 3>;

struct InOrder {
    __device__ __forceinline__ int operator()(int row) const { return row; }
};

// What one warp loads: rows of a matrix with K columns, which of them row_of says.
template <typename T, typename RowOf = InOrder>
struct Source {
    const elem* data;
    int rows, K;
    RowOf row_of = {};

    // Columns from `first` on, a stage of them; zeros behind the last.
    __device__ __forceinline__ void load(u32 target, int first) const {
        const int column = first + threadIdx.x % WARP * ELEMS_PER_16B;
        target += threadIdx.x % WARP * 16;
#pragma unroll 4
        for (int row = 0; row < rows; row++, target += T::ROW_BYTES) {
            const elem* source = data + static_cast<size_t>(row_of(row)) * K + column;
#pragma unroll
            for (int i = 0; i < T::COLUMNS; i += WARP * ELEMS_PER_16B)
                copy_async(target + i * sizeof(elem), source + i, column + i < K);
        }
    }
};

// A lane's part of the operands of two steps. TILES: of activations.
template <int TILES>
struct Pair {
    u32 weight[2][4], a[TILES][4];

    __device__ __forceinline__ void load(u32 weight_address, const u32 (&a_addresses)[TILES], u32 offset) {
        load_matrices(weight[0], weight_address + offset);
        load_matrices(weight[1], weight_address + offset + PAIR_BYTES / 2);
#pragma unroll
        for (int i = 0; i < TILES; i++) load_matrices(a[i], a_addresses[i] + offset);
    }
    __device__ __forceinline__ void multiply(float (&sums)[TILES][4]) const {
#pragma unroll
        for (int step = 0; step < 2; step++)
#pragma unroll
            for (int i = 0; i < TILES; i++) multiply_add(sums[i], weight[step], a[i][2 * step], a[i][2 * step + 1]);
    }
};

// sums += the first `pairs` pairs of a stage.
template <typename T, int TILES>
__device__ __forceinline__ void multiply_stage(float (&sums)[TILES][4], u32 weight, const u32 (&a)[TILES], int pairs) {
    constexpr int ALL = T::COLUMNS / PAIR;
    if (pairs == ALL) {
        Pair<TILES> pair, next;
        pair.load(weight, a, 0);
#pragma unroll
        for (int i = 1; i <= ALL; i++) {
            if (i < ALL) next.load(weight, a, i * PAIR_BYTES);  // while the pair before is multiplied
            pair.multiply(sums);
            pair = next;
        }
    } else {
        for (int i = 0; i < pairs; i++) {
            Pair<TILES> pair;
            pair.load(weight, a, i * PAIR_BYTES);
            pair.multiply(sums);
        }
    }
}

// Where a lane's operands lie in a stage: the weight of its warp, and a tile of activations.
template <typename T>
__device__ __forceinline__ u32 weight_of_lane() {
    const int lane = threadIdx.x % WARP;
    return (threadIdx.x / WARP * WARP_ROWS + lane % WARP_ROWS) * T::ROW_BYTES + lane / WARP_ROWS * 16;
}
__device__ __forceinline__ u32 tile_of_lane(int tile, int rows, u32 row_bytes) {
    const int lane = threadIdx.x % WARP;
    return min(tile * TILE + lane % TILE, rows - 1) * row_bytes + lane / TILE * 16;
}

// visit(tile, i, row, column) for each of a lane's sums that stands for a number of the result; first: of its warp.
template <int TILES, typename Visit>
__device__ __forceinline__ void visit_sums(int first, int rows, int N, Visit visit) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = tile * TILE + lane % 4 * 2 + i % 2, column = first + lane / 4 + i / 2 * 8;
            if (row < rows && column < N) visit(tile, i, row, column);
        }
}

}  // namespace
