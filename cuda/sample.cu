// sample_rows: from each row of raw logits to a token and its logprob, as a pure function of row, options, position.
//
//   y       = logits + edits, ids below num_ids
//   token   = -1                              if any of the V logits is not finite
//             -2                              if every id is masked
//             argmax(y)                       if temperature is 0 (greedy)
//             argmax(y / temperature + noise) else, over what top_k, top_p and min_p leave in this order
//   logprob = log_softmax(logits)[token] over all V; NaN where not asked for, or token < 0
//   token_table[slot, position] = token       where position < max_seq_len
//
//   token_ids         i32 [R]
//   logprobs          f32 [R]
//   token_table       i32 [max_slots, max_seq_len]
//   logits            f32 [R, stride], V columns of it; 16-byte aligned, stride a multiple of 4. Left as they were.
//   options           Options [R]
//   edits             Edit [.], each id of a row once. Overwritten.
//   sample_slots      i32 [R]
//   sample_positions  i32 [R] of the tokens to draw
//
// Launch: grid R, block 1024; no dynamic shared memory. 0 < num_ids <= V <= 2^21.
// A greedy row is read once. Edits, logprob and noise each read it once more, top_k and top_p at least four times.
// The lowest id wins among equals (-0 equals +0). Sums of floats have one order, so a row has one result.
// Must equal: sample in tinyvllm_cli/backends/cpu/sample.py, but where two ids tie within the error of exp and log.
#include "common.cuh"
#include "philox.cuh"
#include "select.cuh"

constexpr int NAN_LOGITS = -1, NOTHING_ALLOWED = -2;

struct Options {  // OPTIONS in tinyvllm_cli/backends/gpu/sample.py
    double top_p;
    u64 seed;
    float temperature;
    int top_k;  // 0: no limit
    float min_p;
    int logprobs;
    int first_edit, num_edits;
};
static_assert(sizeof(Options) == 40, "as NumPy has it");

struct Edit {
    int id;
    float value;  // to add: a bias, or -inf to mask the id
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

struct Scan {
    u64 best;        // candidate of the ids below num_ids
    float greatest;  // of all V
    bool finite;     // all V
};

__device__ Scan scan(const float* logits, int V, int num_ids) {
    u64 best = 0;
    float greatest = minus_infinity();
    int broken = 0;
    for_each_id<4>(logits, V, [&](int id, float x) {
        broken |= (__float_as_uint(x) & 0x7f800000u) == 0x7f800000u;
        greatest = fmaxf(greatest, x);
        if (id < num_ids) best = max(best, candidate(x, id));
    });
    broken = __syncthreads_or(broken);
    return {block_max(best), value_of(block_max(candidate(greatest, 0))), broken == 0};
}

// ---------------------------------------------------------------- steps of a draw

// The host sends no other ids; none may be read or written.
__device__ __forceinline__ bool in_row(int id, int num_ids) {
    return static_cast<u32>(id) < static_cast<u32>(num_ids);
}

// y in the place of logits, for the ids that have edits; the raw logits in the place of the edits.
__device__ __forceinline__ void apply_edits(float* logits, int num_ids, Edit* edits, int num_edits) {
    for (int i = threadIdx.x; i < num_edits; i += THREADS) {
        const int id = edits[i].id;
        if (!in_row(id, num_ids)) continue;
        const float raw = logits[id];
        logits[id] = __fadd_rn(raw, edits[i].value);
        edits[i].value = raw;
    }
    __syncthreads();
}

__device__ __forceinline__ void undo_edits(float* logits, int num_ids, const Edit* edits, int num_edits) {
    for (int i = threadIdx.x; i < num_edits; i += THREADS) {
        const int id = edits[i].id;
        if (in_row(id, num_ids)) logits[id] = edits[i].value;
    }
    __syncthreads();
}

// argmax of x / temperature + noise over the ids with ranks from `border` up and relative probabilities from min_p up.
__device__ __forceinline__ int draw(const Row& row, u64 border, float min_p, int position, u64 seed) {
    u64 best = 0;
    for (int id = 4 * threadIdx.x; id < row.num_ids; id += 4 * THREADS) {
        const float4 four = *reinterpret_cast<const float4*>(row.logits + id);
        const float x[4] = {four.x, four.y, four.z, four.w};
        u32 kept = 0;  // a bit each
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const bool keep = id + k < row.num_ids && (border == 0 || rank_of(row, x[k], id + k) >= border) &&
                              (min_p == 0.0f || relative_probability(row, x[k]) >= min_p);
            kept |= static_cast<u32>(keep) << k;
        }
        if (kept == 0) continue;
        const uint4 four_words = words_of(id / 4, position, seed);
        const u32 words[4] = {four_words.x, four_words.y, four_words.z, four_words.w};
#pragma unroll
        for (int k = 0; k < 4; k++) {
            if (!(kept >> k & 1)) continue;
            const float key = __fadd_rn(__fdiv_rn(x[k], row.temperature), gumbel(words[k]));
            best = max(best, candidate(key, id + k));
        }
    }
    return id_of(block_max(best));
}

// The token of a row that has its edits.
__device__ __forceinline__ int choose(const float* logits, int num_ids, u64 best, const Options& options,
                                      int position) {
    if (value_of(best) == minus_infinity()) return NOTHING_ALLOWED;
    if (options.temperature == 0.0f) return id_of(best);
    const Row row = {logits, num_ids, value_of(best), options.temperature};
    u64 border = 0;
    if (0 < options.top_k && options.top_k < num_ids) border = select(row, border, options.top_k, 0.0);
    if (options.top_p < 1.0) border = select(row, border, 0, options.top_p);
    return draw(row, border, options.min_p, position, options.seed);
}

__device__ __forceinline__ float log_probability(const float* logits, int V, float greatest, int token) {
    float sum = 0.0f;
    for_each_id<1>(logits, V, [&](int, float x) { sum = __fadd_rn(sum, expf(__fsub_rn(x, greatest))); });
    return __fsub_rn(__fsub_rn(logits[token], greatest), logf(block_sum(sum)));
}

extern "C" __global__ void __launch_bounds__(THREADS)
    sample_rows(int* __restrict__ token_ids, float* __restrict__ logprobs, int* __restrict__ token_table,
                float* all_logits, const Options* __restrict__ all_options, Edit* all_edits,
                const int* __restrict__ sample_slots, const int* __restrict__ sample_positions, int V, int stride,
                int num_ids, int max_seq_len) {
    start_next_kernel();
    wait_for_kernel_before();
    const int r = blockIdx.x, position = sample_positions[r];
    float* logits = all_logits + static_cast<i64>(r) * stride;
    const Options& options = all_options[r];
    Edit* edits = all_edits + options.first_edit;
    const bool edited = options.num_edits > 0;
    int token = NAN_LOGITS;
    float logprob = __uint_as_float(0x7fc00000u);

    const Scan raw = scan(logits, V, num_ids);
    if (raw.finite) {
        u64 best = raw.best;
        if (edited) {
            apply_edits(logits, num_ids, edits, options.num_edits);
            best = scan(logits, V, num_ids).best;
        }
        token = choose(logits, num_ids, best, options, position);
        if (edited) undo_edits(logits, num_ids, edits, options.num_edits);
        if (options.logprobs && token >= 0) logprob = log_probability(logits, V, raw.greatest, token);
    }
    if (threadIdx.x > 0) return;
    token_ids[r] = token;
    logprobs[r] = logprob;
    if (0 <= position && position < max_seq_len) {
        token_table[static_cast<i64>(sample_slots[r]) * max_seq_len + position] = token;
    }
}
