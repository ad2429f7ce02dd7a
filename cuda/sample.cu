// sample_rows: from each row of raw logits to a token and its logprob, as a pure function of row, options, history,
// mask and position. In this order:
//
//   y       = logits, ids below num_ids
//   y       = penalized(y)                    of the ids among token_table[slot, 0 .. position - 1] (edits.cuh)
//   y       = y + edits; -inf where the mask does not allow the id
//   token   = -1                              if any of the V logits is not finite
//             -2                              if every id is masked
//             argmax(y)                       if temperature is 0 (greedy)
//             argmax(y / temperature + noise) else, over what top_k, top_p and min_p leave in this order
//   logprob = log_softmax(logits)[token] over all V; NaN where not asked for, or token < 0
//   token_table[slot, position] = token       where position < max_seq_len
//
// A row with a target t draws nothing: token = argmax(logits) below num_ids, logprob = log_softmax(logits)[t], and the
// token table stays. Of every row whose options ask, the num_top likeliest ids below num_ids, by raw logit, with their
// logprobs; -1 and NaN where there are no so many ids, or a logit is not finite.
//
//   token_ids         i32 [R]
//   logprobs          f32 [R]
//   top_ids           i32 [R, MAX_TOP], the first num_top of a row; top_logprobs f32, as this
//   token_table       i32 [max_slots, max_seq_len]
//   logits            f32 [R, stride], V columns of it; 16-byte aligned, stride a multiple of 4. Left as they were.
//   scans             Scan [R, SCAN_PARTS], what scan_rows has found of each row; null: each block does so itself
//   options           Options [R]
//   edits             Edit [.], each id of a row once. Overwritten.
//   masks             u32 [., ceil(V / 32)], as of AllIds (select.cuh)
//   raw               f32 [R, max_seq_len], scratch
//   sample_slots      i32 [R]
//   sample_positions  i32 [R] of the tokens to draw
//   ticket            i32, 0 before and after
//
// Launch: sample_rows: grid R, block 1024; no dynamic shared memory; or several such launches, of rows first_row on,
// which together are the R rows. 0 < num_ids <= V <= 2^21. The last block writes the tokens of all rows into the table:
// rows of one sequence may be drawn together, each behind what was there before. A greedy row is read once. Penalties
// and edits, logprobs and noise each read it once more; num_top, and a top_k whose ids fit into a list, twice, and then
// nothing does that is drawn from the list; else top_k and top_p each read it at least twice. The lowest id wins among
// equals (-0 equals +0). Sums of floats have one order, so a row has one result. Must equal: sample in
// tinyvllm_cli/backends/cpu/sample.py, but where two ids tie within the error of exp and log.
#include "common.cuh"
#include "draw.cuh"
#include "edits.cuh"

constexpr int NAN_LOGITS = -1;
constexpr int SCAN_PARTS = 32;  // of a row: SCAN_PARTS in tinyvllm_cli/backends/gpu/sample.py
constexpr int MAX_TOP = 20;     // MAX_TOP_LOGPROBS in tinyvllm_cli/types.py

struct Options {  // OPTIONS in tinyvllm_cli/backends/gpu/sample.py
    Filters filters;
    Penalties penalties;
    int first_edit, num_edits;
    int mask_row;  // -1: none
    int target;    // -1: none
    int logprobs;  // whether that of the token is wanted
    int num_top;
};
static_assert(sizeof(Options) == 72, "as NumPy has it");

// ---------------------------------------------------------------- a first look

struct Scan {
    u64 best;        // candidate of the ids below num_ids, those that are not allowed at -inf
    float greatest;  // of all V
    bool finite;     // all V
};

// What a thread has seen of a row.
struct Seen {
    u64 best = 0;
    float greatest = minus_infinity();
    int broken = 0;

    __device__ __forceinline__ void look_at(int id, float x, bool allowed, int num_ids) {
        broken |= (__float_as_uint(x) & 0x7f800000u) == 0x7f800000u;
        greatest = fmaxf(greatest, x);
        if (id < num_ids) best = max(best, candidate(allowed ? x : minus_infinity(), id));
    }
    __device__ __forceinline__ void look_at(const Scan& part) {
        broken |= !part.finite;
        greatest = fmaxf(greatest, part.greatest);
        best = max(best, part.best);
    }
    // All that the block has seen. Every thread calls it.
    __device__ __forceinline__ Scan together() const {
        const int any_broken = __syncthreads_or(broken);
        return {block_max(best), value_of(block_max(candidate(greatest, 0))), any_broken == 0};
    }
};

// The parts of a row together.
__device__ __forceinline__ Scan scanned(const Scan* parts) {
    Seen seen;
    if (threadIdx.x < SCAN_PARTS) seen.look_at(parts[threadIdx.x]);
    return seen.together();
}

__device__ Scan scan(const float* logits, const u32* mask, int V, int num_ids) {
    Seen seen;
    for_each_id<4>(logits, mask, 0, V, [&](int id, float x, bool allowed) { seen.look_at(id, x, allowed, num_ids); });
    return seen.together();
}

__device__ __forceinline__ const u32* mask_of(const Options& options, const u32* masks, int V) {
    const bool masked = options.mask_row >= 0 && options.target < 0;
    return masked ? masks + static_cast<i64>(options.mask_row) * ((V + 31) / 32) : nullptr;
}

// Of few rows, by many blocks each: grid [SCAN_PARTS, R].
extern "C" __global__ void __launch_bounds__(THREADS)
    scan_rows(Scan* scans, const float* all_logits, const Options* all_options, const u32* masks, int V, int stride,
              int num_ids) {
    start_next_kernel();
    wait_for_kernel_before();
    const int r = blockIdx.y, part = (V + 4 * SCAN_PARTS - 1) / (4 * SCAN_PARTS) * 4, first = blockIdx.x * part;
    const float* logits = all_logits + static_cast<i64>(r) * stride;
    const u32* mask = mask_of(all_options[r], masks, V);
    Seen seen;
    for_each_id<4>(logits, mask, first, min(first + part, V),
                   [&](int id, float x, bool allowed) { seen.look_at(id, x, allowed, num_ids); });
    const Scan scan = seen.together();
    if (threadIdx.x == 0) scans[r * SCAN_PARTS + blockIdx.x] = scan;
}

// ---------------------------------------------------------------- logprobs

__device__ __forceinline__ float not_a_number() {
    return __uint_as_float(0x7fc00000u);
}

// log(sum(exp(x - greatest))) over all V.
__device__ __forceinline__ float log_of_sum(const float* logits, int V, float greatest) {
    float sum = 0.0f;
    for_each_id<1>(logits, nullptr, 0, V,
                   [&](int, float x, bool) { sum = __fadd_rn(sum, expf(__fsub_rn(x, greatest))); });
    return logf(block_sum(sum));
}

__device__ __forceinline__ float log_probability(float x, float greatest, float log_sum) {
    return __fsub_rn(__fsub_rn(x, greatest), log_sum);
}

// The `count` likeliest ids, in order, and their logprobs; count <= MAX_TOP, count <= num_ids.
template <typename Ids>
__device__ __forceinline__ void order_likeliest(int* top_ids, float* top_logprobs, const Ids& ids, const float* logits,
                                                float greatest, float log_sum, int count) {
    __shared__ u64 ranks[MAX_TOP];
    __shared__ int num_found;
    const Scale scale = {greatest, 1.0f};
    const u64 border = select(ids, scale, 0, count, 0.0);
    if (threadIdx.x == 0) num_found = 0;
    __syncthreads();
    ids.for_each([&](int id, float x) {
        const u64 rank = rank_of(scale, x, id);
        if (rank >= border) ranks[atomicAdd(&num_found, 1)] = rank;
    });
    __syncthreads();
    if (threadIdx.x >= count) return;
    const u64 rank = ranks[threadIdx.x];
    int place = 0;
    for (int i = 0; i < count; i++) place += ranks[i] > rank;
    top_ids[place] = id_of_rank(rank);
    top_logprobs[place] = log_probability(logits[id_of_rank(rank)], greatest, log_sum);
}

__device__ __forceinline__ void find_likeliest(int* top_ids, float* top_logprobs, ListedIds& list, const float* logits,
                                               int num_ids, float greatest, float log_sum, int count) {
    const AllIds ids = {logits, nullptr, num_ids};
    if (list_largest(list, ids, {greatest, 1.0f}, count)) {
        order_likeliest(top_ids, top_logprobs, list, logits, greatest, log_sum, count);
    } else {
        order_likeliest(top_ids, top_logprobs, ids, logits, greatest, log_sum, count);
    }
}

// ---------------------------------------------------------------- a row

// What is known of a row, in shared memory: registers are too few to keep it.
struct Sampled {
    Options options;
    float* logits;
    const u32* mask;
    Edit* edits;
    History history;
    int position;
};

// best: of the raw logits, as scan() finds it.
__device__ __forceinline__ int drawn_token(const Sampled& row, ListedIds& list, int V, int num_ids, u64 best) {
    const bool penalized = has_penalties(row.options.penalties), edited = row.options.num_edits > 0;
    if (penalized) apply_penalties(row.logits, num_ids, row.options.penalties, row.history);
    if (edited) apply_edits(row.logits, num_ids, row.edits, row.options.num_edits);
    if (penalized || edited) best = scan(row.logits, row.mask, V, num_ids).best;
    const int token = choose(list, {row.logits, row.mask, num_ids}, best, row.options.filters, row.position);
    if (edited) undo_edits(row.logits, num_ids, row.edits, row.options.num_edits);
    if (penalized) undo_penalties(row.logits, row.options.penalties, row.history);
    return token;
}

// Those of rows with a target are no tokens of their sequences.
__device__ __forceinline__ void write_tokens(int* token_table, const int* token_ids, const Options* options,
                                             const int* slots, const int* positions, int num_rows, int max_seq_len) {
    for (int r = threadIdx.x; r < num_rows; r += THREADS) {
        if (options[r].target >= 0 || positions[r] < 0 || positions[r] >= max_seq_len) continue;
        token_table[static_cast<i64>(slots[r]) * max_seq_len + positions[r]] = token_ids[r];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    sample_rows(int* token_ids, float* logprobs, int* top_ids, float* top_logprobs, int* token_table, int* ticket,
                float* all_logits, const Scan* scans, const Options* all_options, Edit* all_edits, const u32* masks,
                float* all_raw, const int* sample_slots, const int* sample_positions, int first_row, int num_rows,
                int V, int stride, int num_ids, int max_seq_len) {
    __shared__ Sampled row;
    __shared__ ListedIds list;
    start_next_kernel();
    wait_for_kernel_before();
    const int r = first_row + blockIdx.x;
    if (threadIdx.x == 0) {
        row.options = all_options[r];
        row.logits = all_logits + static_cast<i64>(r) * stride;
        row.mask = mask_of(row.options, masks, V);
        row.edits = all_edits + row.options.first_edit;
        row.position = sample_positions[r];
        row.history = {token_table + static_cast<i64>(sample_slots[r]) * max_seq_len, min(row.position, max_seq_len),
                       all_raw + static_cast<i64>(r) * max_seq_len};
    }
    __syncthreads();
    int token = NAN_LOGITS, num_top = 0;
    float logprob = not_a_number();

    const Scan raw = scans ? scanned(scans + r * SCAN_PARTS) : scan(row.logits, row.mask, V, num_ids);
    if (raw.finite) {
        const bool draws = row.options.target < 0;
        token = draws ? drawn_token(row, list, V, num_ids, raw.best) : id_of(raw.best);
        const int scored = draws ? token : row.options.target;
        const bool asked = scored >= 0 && (row.options.logprobs || !draws);
        num_top = min(row.options.num_top, num_ids);
        if (asked || num_top > 0) {
            const float log_sum = log_of_sum(row.logits, V, raw.greatest);
            if (asked) logprob = log_probability(row.logits[scored], raw.greatest, log_sum);
            if (num_top > 0) {
                find_likeliest(top_ids + r * MAX_TOP, top_logprobs + r * MAX_TOP, list, row.logits, num_ids,
                               raw.greatest, log_sum, num_top);
            }
        }
    }
    if (num_top <= threadIdx.x && threadIdx.x < row.options.num_top) {
        top_ids[r * MAX_TOP + threadIdx.x] = -1;
        top_logprobs[r * MAX_TOP + threadIdx.x] = not_a_number();
    }
    if (threadIdx.x == 0) {
        token_ids[r] = token;
        logprobs[r] = logprob;
    }
    if (last_to_come(ticket, num_rows)) {
        write_tokens(token_table, token_ids, all_options, sample_slots, sample_positions, num_rows, max_seq_len);
    }
}
