// The largest logits of a row, exactly: top-k by count, the nucleus of top-p by mass. The whole block works on one row.
//
// Radix selection: ids get unique integer ranks, and the rank of the last id to keep is found digit by digit, each by a
// histogram of the ids that agree in the digits before. Counts and masses are integers, so no order of sums shows.
// Every thread calls every function, with 1024 threads a block.
// Must equal: filtered_ids in tinyvllm_cli/backends/cpu/filters.py, up to the rounding of its masses.
#pragma once
#include "common.cuh"

constexpr int THREADS = 1024;
constexpr int DIGIT_BITS = 11, BINS = 1 << DIGIT_BITS;
constexpr int FIRST_SHIFT = 64 - DIGIT_BITS;
constexpr int ID_BITS = 21;  // of a rank, the lowest; 32 bits of logit and a digit of distance stand above
constexpr int MAX_LISTED = 2048;

struct Scale {
    float best;         // no logit is greater; finite
    float temperature;  // above 0, finite
};

// ---------------------------------------------------------------- order

// Integers in the order of the floats, -0 and +0 as one; exact, whatever the compiler does to denormals.
__device__ __forceinline__ u32 to_ordered(float x) {
    const u32 bits = __float_as_uint(x);
    if (bits == 0x80000000u) return bits;  // -0: as +0
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float from_ordered(u32 ordered) {
    return __uint_as_float(ordered & 0x80000000u ? ordered ^ 0x80000000u : ~ordered);
}

// Greater for a greater logit, then for a lower id; unique. The bits of the logit would do: the distance from the best
// goes before them, in 64ths, because a float's upper bits are the same few for most logits of a row, and atomics on
// few bins wait for each other. It never contradicts them, as rounding keeps an order.
__device__ __forceinline__ u64 rank_of(const Scale& scale, float x, int id) {
    const float distance = __fmul_rn(__fsub_rn(scale.best, x), 64.0f);  // infinite for a masked id
    const u64 digit = BINS - 1 - static_cast<int>(fminf(distance, BINS - 1));
    return (digit << 32 | to_ordered(x)) << ID_BITS | ((1 << ID_BITS) - 1 - id);
}

__device__ __forceinline__ float logit_of(u64 rank) {
    return from_ordered(static_cast<u32>(rank >> ID_BITS));
}

__device__ __forceinline__ int id_of_rank(u64 rank) {
    return (1 << ID_BITS) - 1 - static_cast<int>(rank % (1 << ID_BITS));
}

// ---------------------------------------------------------------- mass

// Probability over that of the best id, in [0, 1].
__device__ __forceinline__ float relative_probability(const Scale& scale, float x) {
    return expf(__fdiv_rn(__fsub_rn(x, scale.best), scale.temperature));
}

// The same in units of 2^-40: 2^21 of them sum to at most 2^61.
__device__ __forceinline__ u64 mass_of(const Scale& scale, float x) {
    return __float2ull_rn(__fmul_rn(relative_probability(scale, x), 0x1p40f));
}

// ---------------------------------------------------------------- the whole block over a row

// A bit for each of four ids, from a multiple of 4 on.
__device__ __forceinline__ u32 allowed_of(const u32* mask, int id) {
    return mask == nullptr ? 15u : mask[id / 32] >> id % 32;
}

// visit(id, x, allowed) for each of this thread's ids of first..n-1. Reads from a multiple of 4 up to one. mask: as of
// AllIds, of at least n ids. IN_FLIGHT: loads at a time.
template <int IN_FLIGHT, typename Visit>
__device__ __forceinline__ void for_each_id(const float* logits, const u32* mask, int first, int n, Visit visit) {
#pragma unroll IN_FLIGHT
    for (int id = first + 4 * threadIdx.x; id < n; id += 4 * THREADS) {
        const float4 four = *reinterpret_cast<const float4*>(logits + id);
        const float x[4] = {four.x, four.y, four.z, four.w};
        const u32 allowed = allowed_of(mask, id);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            if (id + k < n) visit(id + k, x[k], (allowed >> k & 1) != 0);
        }
    }
}

// The ids of a row, or some of them in a list: for_each() calls visit(id, x) for each of this thread's.
struct AllIds {
    const float* logits;  // 16-byte aligned
    const u32* mask;  // bit id % 32 of word id / 32: whether the id is allowed, else it is as if at -inf; null: all are
    int num_ids;      // at most 2^21

    template <typename Visit>
    __device__ __forceinline__ void for_each(Visit visit) const {
        for_each_id<1>(logits, mask, 0, num_ids,
                       [&](int id, float x, bool allowed) { visit(id, allowed ? x : minus_infinity()); });
    }
};

struct ListedIds {  // in shared memory
    int count;
    int id[MAX_LISTED];
    float x[MAX_LISTED];

    template <typename Visit>
    __device__ __forceinline__ void for_each(Visit visit) const {
#pragma unroll 1
        for (int i = threadIdx.x; i < count; i += THREADS) visit(id[i], x[i]);
    }
};

__device__ __forceinline__ u64 warp_prefix_sum(u64 x) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int offset = 1; offset < WARP; offset *= 2) {
        const u64 before = __shfl_up_sync(ALL_LANES, x, offset);
        if (lane >= offset) x += before;
    }
    return x;
}

struct PrefixSum {
    u64 sum;  // of the threads up to this one
    u64 total;
};

__device__ __forceinline__ PrefixSum block_prefix_sum(u64 x) {
    __shared__ u64 of_warp[THREADS / WARP];  // as many as a warp has lanes
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    x = warp_prefix_sum(x);
    __syncthreads();  // those of a call before are read
    if (lane == WARP - 1) of_warp[warp] = x;
    __syncthreads();
    const u64 sums = warp_prefix_sum(of_warp[lane]);
    const u64 before = __shfl_sync(ALL_LANES, sums, max(warp - 1, 0));
    return {warp > 0 ? before + x : x, __shfl_sync(ALL_LANES, sums, WARP - 1)};
}

// ---------------------------------------------------------------- selection

struct Histogram {  // 64-bit sums in halves: shared memory adds 32 bits at a time
    u32 low[BINS], high[BINS];
};

struct Bin {
    u32 digit;
    u64 weight;
    u64 wanted;  // of it
};

__device__ __forceinline__ void add(Histogram& histogram, u32 digit, u64 weight) {
    const u32 low = static_cast<u32>(weight), before = atomicAdd(&histogram.low[digit], low);
    const u32 high = static_cast<u32>(weight >> 32) + (before + low < before ? 1u : 0u);  // the carry
    if (high) atomicAdd(&histogram.high[digit], high);
}

__device__ __forceinline__ Histogram& shared_histogram() {
    __shared__ Histogram histogram;
    return histogram;
}

// By the digit at `shift`, the ids with ranks from `lowest` up that agree with `border` in its known bits: their number
// or their mass.
template <typename Ids>
__device__ __forceinline__ void fill(Histogram& histogram, const Ids& ids, const Scale& scale, u64 lowest, u64 border,
                                     u64 known, int shift, bool by_mass) {
    for (int i = threadIdx.x; i < BINS; i += THREADS) histogram.low[i] = histogram.high[i] = 0;
    __syncthreads();
    ids.for_each([&](int id, float x) {
        const u64 rank = rank_of(scale, x, id);
        if (rank < lowest || ((rank ^ border) & known) != 0) return;
        add(histogram, static_cast<u32>(rank >> shift) % BINS, by_mass ? mass_of(scale, x) : 1);
    });
    __syncthreads();
}

// From the last bin down, the first at which the sum reaches `wanted` or, where that is 0, the share `fraction`.
__device__ __forceinline__ Bin find_bin(const Histogram& histogram, u64 wanted, double fraction) {
    __shared__ Bin found;
    const u32 upper = BINS - 1 - 2 * threadIdx.x, lower = upper - 1;
    const u64 upper_weight = static_cast<u64>(histogram.high[upper]) << 32 | histogram.low[upper];
    const u64 lower_weight = static_cast<u64>(histogram.high[lower]) << 32 | histogram.low[lower];
    const PrefixSum prefix = block_prefix_sum(upper_weight + lower_weight);
    if (wanted == 0) {
        const u64 share = static_cast<u64>(ceil(fraction * static_cast<double>(prefix.total)));
        wanted = min(max(share, static_cast<u64>(1)), prefix.total);
    }
    const u64 middle = prefix.sum - lower_weight, start = middle - upper_weight;
    if (start < wanted && wanted <= middle) found = {upper, upper_weight, wanted - start};
    if (middle < wanted && wanted <= prefix.sum) found = {lower, lower_weight, wanted - middle};
    __syncthreads();
    return found;
}

// The rank of the last id to keep of those with ranks from `lowest` up: from the best down, the first at which there
// are `count` or, where that is 0, the share `fraction` of their mass.
template <typename Ids>
__device__ __forceinline__ u64 select(const Ids& ids, const Scale& scale, u64 lowest, int count, double fraction) {
    Histogram& histogram = shared_histogram();
    u64 border = 0, known = 0, wanted = count;
    bool by_mass = count == 0;
    for (int shift = FIRST_SHIFT;; shift = max(shift - DIGIT_BITS, 0)) {
        fill(histogram, ids, scale, lowest, border, known, shift, by_mass);
        Bin bin = find_bin(histogram, wanted, fraction);
        border |= static_cast<u64>(bin.digit) << shift;
        known = ~static_cast<u64>(0) << shift;
        if (by_mass && shift <= ID_BITS) {  // equal logits are left: their mass becomes a number
            const u64 mass = mass_of(scale, logit_of(border));
            bin.wanted = (bin.wanted + mass - 1) / mass;
            bin.weight /= mass;
            by_mass = false;
        }
        wanted = bin.wanted;
        const bool all_of_it = !by_mass && wanted == bin.weight;
        if (all_of_it || shift == 0) return max(border, lowest);
    }
}

// The `count` largest, and whatever has the first digit of the last of them, go into the list, in no order: what is
// found among them then needs no more passes over the row. False where there are too many.
__device__ __forceinline__ bool list_largest(ListedIds& list, const AllIds& ids, const Scale& scale, int count) {
    if (count > MAX_LISTED) return false;
    Histogram& histogram = shared_histogram();
    fill(histogram, ids, scale, 0, 0, 0, FIRST_SHIFT, false);
    const Bin bin = find_bin(histogram, count, 0.0);
    if (count - bin.wanted + bin.weight > MAX_LISTED) return false;
    if (threadIdx.x == 0) list.count = 0;
    __syncthreads();
    ids.for_each([&](int id, float x) {
        if (rank_of(scale, x, id) >> FIRST_SHIFT < bin.digit) return;
        const int i = atomicAdd(&list.count, 1);
        list.id[i] = id;
        list.x[i] = x;
    });
    __syncthreads();
    return true;
}
