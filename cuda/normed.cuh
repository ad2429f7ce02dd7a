// Products of few rows of the residual stream, normed on their way: what stands before the sums of skinny.cuh.
//
// Every block of 256 threads norms the rows again, in the order of sums of rms_norm (norm.cu): that takes less time
// than a kernel of its own, and the first part of the weight comes meanwhile.
#pragma once
#include "skinny.cuh"

namespace {

constexpr int NORM_WARPS = 8;  // of a block of rms_norm, whose sums these are; so many has a block here
constexpr int THREADS = NORM_WARPS * WARP;
constexpr int NORM_COLUMNS = THREADS * ELEMS_PER_16B;  // of a round of them
constexpr int ROUNDS = 2;                              // at most

// What a thread has of a row, as a thread of rms_norm.
struct Part {
    float v[ROUNDS][ELEMS_PER_16B];

    // visit(round, first column) for each v[round] that stands for columns.
    template <typename Visit>
    __device__ __forceinline__ void visit(int K, Visit visit) {
#pragma unroll
        for (int round = 0; round < ROUNDS; round++) {
            const int column = round * NORM_COLUMNS + threadIdx.x * ELEMS_PER_16B;
            if (column < K) visit(round, column);
        }
    }
    __device__ __forceinline__ void load(const float* row, int K) {
        visit(K, [&](int round, int column) { load8(v[round], row + column); });
    }
};

// Where the normed rows lie in shared memory: each has an odd number of 16 bytes, so that no bank is asked twice.
struct Normed {
    u32 address, row_bytes;
};

// The rows of x into shared memory, normed and rounded. Every thread calls it, with its part of `norm`.
__device__ __forceinline__ void norm_rows(const Normed& normed, const float* x, const Part& norm, int rows, int K,
                                          float eps) {
    for (int n = 0; n < rows; n++) {
        Part part;
        part.load(x + static_cast<i64>(n) * K, K);
        float squares = 0.0f;
        part.visit(K, [&](int round, int) {
#pragma unroll
            for (float v : part.v[round]) squares = __fmaf_rn(v, v, squares);
        });
        const float mean = __fdiv_rn(block_sum(squares), static_cast<float>(K));
        const float scale = __frsqrt_rn(__fadd_rn(mean, eps));
        part.visit(K, [&](int round, int column) {
            float y[ELEMS_PER_16B];
#pragma unroll
            for (int j = 0; j < ELEMS_PER_16B; j++)
                y[j] = __fmul_rn(__fmul_rn(part.v[round][j], scale), norm.v[round][j]);
            store_shared(normed.address + n * normed.row_bytes + column * sizeof(elem), pack8(y));
        });
    }
    // What the last pair of steps reads behind the last column.
    const int behind = (K + PAIR - 1) / PAIR * PAIR - K;
    if (threadIdx.x < rows)
        for (int i = 0; i < behind; i += ELEMS_PER_16B)
            store_shared(normed.address + threadIdx.x * normed.row_bytes + (K + i) * sizeof(elem),
                         make_uint4(0, 0, 0, 0));
}

// sums: of the first rows with the weight of this lane's warp, as visit_sums has them. source: the block's weight.
template <typename T, typename RowOf>
__device__ __forceinline__ void normed_sums(float (&sums)[1][4], const float* x, const float* norm,
                                            const Source<T, RowOf>& source, int rows, float eps) {
    extern __shared__ __align__(16) unsigned char shared[];
    constexpr int STAGES = T::STAGES, COLUMNS = T::COLUMNS;
    constexpr u32 STAGE_BYTES = T::ROWS * T::ROW_BYTES;
    const int K = source.K, num_stages = (K + COLUMNS - 1) / COLUMNS;
    const bool multiplies = threadIdx.x / WARP < T::MULTIPLIERS;
    const u32 ring = shared_address(shared);
    const Normed normed{ring + STAGES * STAGE_BYTES, (K + PAIR - 1) / PAIR * PAIR_BYTES + 16u};
    auto load = [&](int stage) {
        if (stage < num_stages) source.load(ring + stage % STAGES * STAGE_BYTES, stage * COLUMNS);
        commit_copies();
    };

    start_next_kernel();
    if (threadIdx.x / WARP == T::MULTIPLIERS)
        for (int stage = 0; stage < STAGES; stage++) load(stage);
    Part of_norm;
    of_norm.load(norm, K);  // comes while the kernel before still runs
    wait_for_kernel_before();
    norm_rows(normed, x, of_norm, rows, K, eps);
    const u32 tile = normed.address + tile_of_lane(0, rows, normed.row_bytes);
    for (int stage = 0; stage < num_stages; stage++) {
        if (stage == 0)
            wait_for_copies<STAGES - 1>();
        else
            wait_for_copies<STAGES - 2>();
        __syncthreads();  // this stage has come, and the one before is read
        if (multiplies) {
            const u32 tiles[1] = {tile + stage * COLUMNS * static_cast<u32>(sizeof(elem))};
            const int columns = min(COLUMNS, K - stage * COLUMNS);
            multiply_stage<T>(sums, ring + stage % STAGES * STAGE_BYTES + weight_of_lane<T>(), tiles,
                              (columns + PAIR - 1) / PAIR);
        } else if (threadIdx.x / WARP == T::MULTIPLIERS && stage > 0) {
            load(stage - 1 + STAGES);
        }
    }
}

// This block's rows of a weight. Those behind its last hold anything, as what comes of them is not written.
template <typename T>
__device__ __forceinline__ Source<T> rows_of_block(const elem* weight, int N, int K) {
    const int first = blockIdx.x * T::ROWS;
    return {weight + static_cast<size_t>(first) * K, min(T::ROWS, N - first), K};
}

}  // namespace
