// A token from a row of logits: the greatest, or a draw over what top_k, top_p and min_p leave. The whole block works
// on one row.
//
// Every thread calls every function, with 1024 threads a block.
// Must equal: sample_row in tinyvllm_cli/backends/cpu/sample.py behind processed_logits, but where two ids tie within
// the error of exp and log.
#pragma once
#include "philox.cuh"
#include "select.cuh"

constexpr int NOTHING_ALLOWED = -2;

struct Filters {
    double top_p;
    u64 seed;
    float temperature;  // 0: greedy
    int top_k;          // 0: no limit
    float min_p;
    int padding;
};

// ---------------------------------------------------------------- the best of a row

// The greatest is the greatest x and of equals the lowest id.
__device__ __forceinline__ u64 candidate(float x, int id) {
    return static_cast<u64>(to_ordered(x)) << 32 | ~static_cast<u32>(id);
}
__device__ __forceinline__ int id_of(u64 candidate) {
    return static_cast<int>(~static_cast<u32>(candidate));
}
__device__ __forceinline__ float value_of(u64 candidate) {
    return from_ordered(static_cast<u32>(candidate >> 32));
}

__device__ __forceinline__ u64 warp_max(u64 x) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) x = max(x, __shfl_xor_sync(ALL_LANES, x, offset));
    return x;
}

// Of all threads, in each of them.
__device__ __forceinline__ u64 block_max(u64 x) {
    __shared__ u64 of_warp[THREADS / WARP];  // as many as a warp has lanes
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    x = warp_max(x);
    __syncthreads();  // those of a call before are read
    if (lane == 0) of_warp[warp] = x;
    __syncthreads();
    return warp_max(of_warp[lane]);
}

// ---------------------------------------------------------------- steps of a draw

struct Kept {
    u64 border;   // ids with ranks from here up
    float min_p;  // and at least this relative probability

    __device__ __forceinline__ bool has(const Scale& scale, float x, int id) const {
        return (border == 0 || rank_of(scale, x, id) >= border) &&
               (min_p == 0.0f || relative_probability(scale, x) >= min_p);
    }
};

__device__ __forceinline__ u64 noisy(const Scale& scale, float x, int id, u32 word) {
    return candidate(__fadd_rn(__fdiv_rn(x, scale.temperature), gumbel(word)), id);
}

// argmax of x / temperature + noise over the ids that are kept.
__device__ __forceinline__ int draw(const AllIds& ids, const Scale& scale, const Kept& kept, int position, u64 seed) {
    u64 best = 0;
    for (int id = 4 * threadIdx.x; id < ids.num_ids; id += 4 * THREADS) {
        const float4 four = *reinterpret_cast<const float4*>(ids.logits + id);
        const float x[4] = {four.x, four.y, four.z, four.w};
        u32 drawn = allowed_of(ids.mask, id) & 15;  // a bit each
#pragma unroll
        for (int k = 0; k < 4; k++) {
            if (id + k >= ids.num_ids || !kept.has(scale, x[k], id + k)) drawn &= ~(1u << k);
        }
        if (drawn == 0) continue;
        const uint4 four_words = words_of(id / 4, position, seed);
        const u32 words[4] = {four_words.x, four_words.y, four_words.z, four_words.w};
#pragma unroll
        for (int k = 0; k < 4; k++) {
            if (drawn >> k & 1) best = max(best, noisy(scale, x[k], id + k, words[k]));
        }
    }
    return id_of(block_max(best));
}

__device__ __forceinline__ int draw(const ListedIds& ids, const Scale& scale, const Kept& kept, int position,
                                    u64 seed) {
    u64 best = 0;
    ids.for_each([&](int id, float x) {
        if (!kept.has(scale, x, id)) return;
        const uint4 words = words_of(id / 4, position, seed);
        const u32 word = id % 4 == 0 ? words.x : id % 4 == 1 ? words.y : id % 4 == 2 ? words.z : words.w;
        best = max(best, noisy(scale, x, id, word));
    });
    return id_of(block_max(best));
}

template <typename Ids>
__device__ __forceinline__ int filter_and_draw(const Ids& ids, const Scale& scale, int top_k, const Filters& of,
                                               int position) {
    Kept kept = {0, of.min_p};
    if (top_k > 0) kept.border = select(ids, scale, 0, top_k, 0.0);
    if (of.top_p < 1.0) kept.border = select(ids, scale, kept.border, 0, of.top_p);
    return draw(ids, scale, kept, position, of.seed);
}

// The token of a row that has its penalties and edits.
__device__ __forceinline__ int choose(ListedIds& list, const AllIds& ids, u64 best, const Filters& of, int position) {
    if (value_of(best) == minus_infinity()) return NOTHING_ALLOWED;
    if (of.temperature == 0.0f) return id_of(best);
    const Scale scale = {value_of(best), of.temperature};
    const int top_k = of.top_k < ids.num_ids ? of.top_k : 0;
    if (top_k > 0 && list_largest(list, ids, scale, top_k)) {
        return filter_and_draw(list, scale, top_k, of, position);
    }
    return filter_and_draw(ids, scale, top_k, of, position);
}
