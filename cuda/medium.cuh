// Products of more rows than skinny.cuh has: tiles of weight and activations that come by TMA, multiplied by wgmma, K
// in order.
//
// The bits are those of skinny.cuh and of cublasLt's algorithms without split K: one float32 accumulator for each
// number of the result, from zero, over K in ascending steps of 32 bytes. Rows of the weight are the 64 rows of a wgmma, one
// or more of which a block has, and rows of activations (tokens) its columns. What binds is not only the weight's way
// from memory but that of both from the L2 cache into each multiprocessor; so blocks of a cluster that share a tile of
// one get it by one copy: those of its x have the same tokens, those of its y the same rows of the weight.
#pragma once
#include "wgmma.cuh"

namespace {

constexpr int SLAB_BYTES = 128, STEPS = 4;  // of a row of a tile: as much as a swizzle has
constexpr int GROUP = 4, GROUP_ROWS = 64;  // warps that multiply together, and the rows of the weight that they have

// GROUPS: that multiply. TOKENS: of a block. SLABS: of a stage of the ring. KIND: of both operands.
template <int GROUPS_, int TOKENS_, int SLABS_, typename KIND_ = Elems>
struct Tile {
    using KIND = KIND_;
    static constexpr int GROUPS = GROUPS_, TOKENS = TOKENS_, SLABS = SLABS_, STAGE_COLUMNS = SLABS * KIND::SLAB;
    static constexpr int ROWS = GROUPS * GROUP_ROWS, MULTIPLIERS = GROUPS * GROUP, THREADS = (MULTIPLIERS + 2) * WARP;
    static constexpr u32 WEIGHT_SLAB = ROWS * SLAB_BYTES, TOKENS_SLAB = TOKENS * SLAB_BYTES;
    static constexpr u32 STAGE_BYTES = SLABS * (WEIGHT_SLAB + TOKENS_SLAB);
    static_assert(TOKENS_SLAB % 1024 == 0, "a swizzle repeats after 1024 bytes");
};

// A ring of stages in shared memory, each of slabs of the weight and then slabs of activations, and behind them its
// barriers: where a stage's bytes have come, and where the blocks of a cluster have read what one of them copies to
// all. What two blocks share is copied by them in turn, stage by stage: if the number of stages is odd, a slot is one's
// and the other's from round to round.
template <typename T>
struct Ring {
    u32 start;
    int stages;

    __device__ __forceinline__ u32 weight(int slot) const { return start + slot * T::STAGE_BYTES; }
    __device__ __forceinline__ u32 tokens(int slot) const { return weight(slot) + T::SLABS * T::WEIGHT_SLAB; }
    __device__ __forceinline__ u32 came(int slot) const { return weight(stages) + slot * 8; }
    __device__ __forceinline__ u32 weight_read(int slot) const { return came(stages) + slot * 8; }
    __device__ __forceinline__ u32 tokens_read(int slot) const { return weight_read(stages) + slot * 8; }
};

// A stage's place in the ring, and how often its slot was filled before.
struct Place {
    int slot = 0;
    u32 round = 0;

    __device__ __forceinline__ void advance(int count, int stages) {
        slot += count;
        if (slot >= stages) slot -= stages, round++;
    }
};

// What one block copies of the weight or of the activations: every `sharers`-th stage, from `first` on, to `blocks`.
struct Share {
    int first, sharers;
    unsigned short blocks;
};

// One thread of the block calls it. target, read: the place of a slot and the barrier at which it is free again.
template <typename T, typename Target, typename Read>
__device__ __forceinline__ void copy_tiles(const Ring<T>& ring, const TensorMap& map, const Share& share, int row,
                                           int num_stages, u32 slab_bytes, Target target, Read read) {
    Place place;
    place.advance(share.first, ring.stages);
    const u32 in_turn = ring.stages & share.sharers - 1;  // 1: a slot is this block's every second round
#pragma unroll 1
    for (int stage = share.first; stage < num_stages; stage += share.sharers) {
        if (stage >= ring.stages) wait_at(read(place.slot), place.round - 1 >> in_turn & 1);
#pragma unroll
        for (int slab = 0; slab < T::SLABS; slab++) {
            const u32 to = target(place.slot) + slab * slab_bytes;
            const int column = stage * T::STAGE_COLUMNS + slab * T::KIND::SLAB;
            if (share.sharers > 1)
                copy_tile(to, map, column, row, ring.came(place.slot), share.blocks);
            else
                copy_tile(to, map, column, row, ring.came(place.slot));
        }
        place.advance(share.sharers, ring.stages);
    }
}

// What is done to sums stays before, or behind: a compiler does not know that products still write them.
template <int COUNT>
__device__ __forceinline__ void hold(float (&sums)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(sums[i]));
}

// sums[TOKENS / 2] of the thread's group, of the whole of K.
template <typename T>
__device__ __forceinline__ void multiply_tiles(float (&sums)[T::TOKENS / 2], const Ring<T>& ring, int num_stages,
                                               uint2 size, uint2 mine) {
    const int lane = threadIdx.x % WARP;
    const int group = __shfl_sync(ALL_LANES, threadIdx.x / (GROUP * WARP), 0);  // known to be the same in all lanes
    Place place, before;
    hold(sums);
#pragma unroll 1
    for (int stage = 0; stage < num_stages; stage++) {
        wait_at(ring.came(place.slot), place.round & 1);
        // For the slot's next stage, before anyone may copy it.
        if (threadIdx.x == 0 && stage + ring.stages < num_stages)
            arrive_expecting(ring.came(place.slot), T::STAGE_BYTES);
        begin_products();
        const u64 a = descriptor(ring.weight(place.slot) + group * GROUP_ROWS * SLAB_BYTES);
        const u64 b = descriptor(ring.tokens(place.slot));
#pragma unroll
        for (int slab = 0; slab < T::SLABS; slab++)
#pragma unroll
            for (int step = 0; step < STEPS; step++)
                multiply_add<typename T::KIND, T::TOKENS>(sums, a + slab * (T::WEIGHT_SLAB >> 4) + step * NEXT_STEP,
                                                          b + slab * (T::TOKENS_SLAB >> 4) + step * NEXT_STEP);
        commit_products();
        wait_for_products<1>();  // the stage before is multiplied
        const int next = stage - 1 + ring.stages;  // of its slot
        if (stage > 0 && next < num_stages) {
            if (lane == 0) arrive_at(ring.weight_read(before.slot), mine.x + (next & (size.y - 1)) * size.x);
            if (lane == 1) arrive_at(ring.tokens_read(before.slot), (next & (size.x - 1)) + mine.y * size.x);
        }
        before = place;
        place.advance(1, ring.stages);
    }
    wait_for_products<0>();
    hold(sums);
}

// What is multiplied: maps of weight and activations, tiles of T.
struct Operands {
    const TensorMap &weight, &a;
    int K, stages;
};

// The block's tile of out^T = weight a^T: begin() once what kernels before have written may be read, finish(sums) at
// the end, both by all threads of the groups that multiply. On other cards nothing.
template <typename T, typename Begin, typename Finish>
__device__ __forceinline__ void product(const Operands& operands, Begin begin, Finish finish) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char shared[];
    const int stages = operands.stages, first_row = blockIdx.x * T::ROWS, first_token = blockIdx.y * T::TOKENS;
    const Ring<T> ring{shared_address(shared), stages};
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int num_stages = (operands.K + T::STAGE_COLUMNS - 1) / T::STAGE_COLUMNS;
    const uint2 size = cluster_size(), mine = place_in_cluster();
    start_next_kernel();
    if (threadIdx.x == 0) {
#pragma unroll 1
        for (int slot = 0; slot < stages; slot++) {
            init_barrier(ring.came(slot), 1);
            init_barrier(ring.weight_read(slot), T::MULTIPLIERS * size.y);
            init_barrier(ring.tokens_read(slot), T::MULTIPLIERS * size.x);
        }
        publish_barriers();
#pragma unroll 1
        for (int slot = 0; slot < min(stages, num_stages); slot++) arrive_expecting(ring.came(slot), T::STAGE_BYTES);
    }
    __syncthreads();
    cluster_barrier();

    if (warp == T::MULTIPLIERS) {
        if (lane == 0) {
            u32 column = 0;  // of the cluster: the blocks with the same x
            for (u32 y = 0; y < size.y; y++) column |= 1u << y * size.x;
            const Share share{static_cast<int>(mine.y), static_cast<int>(size.y),
                              static_cast<unsigned short>(column << mine.x)};
            copy_tiles(
                ring, operands.weight, share, first_row, num_stages, T::WEIGHT_SLAB,
                [&](int slot) { return ring.weight(slot); }, [&](int slot) { return ring.weight_read(slot); });
        }
        wait_for_kernel_before();
    } else if (warp > T::MULTIPLIERS) {
        if (lane == 0) prefetch_map(operands.a);
        wait_for_kernel_before();
        if (lane == 0) {
            const u32 row = (1u << size.x) - 1;  // of the cluster: the blocks with the same y
            const Share share{static_cast<int>(mine.x), static_cast<int>(size.x),
                              static_cast<unsigned short>(row << mine.y * size.x)};
            copy_tiles(
                ring, operands.a, share, first_token, num_stages, T::TOKENS_SLAB,
                [&](int slot) { return ring.tokens(slot); }, [&](int slot) { return ring.tokens_read(slot); });
        }
    } else {
        wait_for_kernel_before();
        begin();
        float sums[T::TOKENS / 2] = {};
        multiply_tiles<T>(sums, ring, num_stages, size, mine);
        finish(sums);
    }
#endif
}

}  // namespace
