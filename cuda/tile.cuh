// The heart of attention: 16 query rows attend to a tile of 64 keys. Prefill and decode are made of this alone.
//
// Online softmax in base 2 (Milakov & Gimelshein 2018; Dao, FlashAttention-2, 2023) on mma.sync.m16n8k16, float32
// accumulators. A row's keys are walked in ascending tiles; a new partial (m, l, o) starts at every multiple of
// PARTIAL_KEYS and partials are merged in ascending order. What a row gets depends on that row, its position and its
// keys alone: not on its place among the 16, nor on whether one kernel walks all partials (prefill) or one block each
// (decode). For that,
//   - every rounding below is an intrinsic, which no compiler contracts or reorders;
//   - a key behind the row's position scores -inf, so its weight is exactly 0 and max, sum and o keep their bits;
//   - merging with an empty partial (m = -inf, l = 0, o = 0), or into none yet, changes no bit of the other.
//
// A lane holds rows g and g + 8 of the 16 (g = lane / 4), in each 8 columns those at 2 t and 2 t + 1 (t = lane % 4):
// the layout of the mma's accumulators (PTX ISA, "Matrix fragments for mma.m16n8k16").
#pragma once
#include "common.cuh"

constexpr int TILE_KEYS = 64;      // of a tile
constexpr int PARTIAL_KEYS = 256;  // of a partial
constexpr int MMA_ROWS = 16;
// Wide heads: two warps share 16 rows, each with all scores and half of the columns of V, so that accumulators fit into
// registers.
constexpr int COLUMN_GROUPS = HEAD_DIM > 128 ? 2 : 1;
constexpr int COLUMNS = HEAD_DIM / COLUMN_GROUPS;
constexpr int ROW_BYTES = HEAD_DIM * 2 + 16;  // of a row in shared memory: an odd number of 16 bytes, no bank conflicts
constexpr int TILE_BYTES = TILE_KEYS * ROW_BYTES;
constexpr int ROW_CHUNKS = HEAD_DIM / 8;  // 16-byte pieces of a row
static_assert(HEAD_DIM % (16 * COLUMN_GROUPS) == 0 && HEAD_DIM <= 256, "head sizes that the fragments cover");

// Softmax of some keys for rows g and g + 8: the greatest score, the sum of weights, the weighted sum of V.
struct Partial {
    float m[2], l[2], o[COLUMNS / 8][4];
};

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ void clear(Partial& p) {
#pragma unroll
    for (int r = 0; r < 2; r++) p.m[r] = minus_infinity(), p.l[r] = 0.f;
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) p.o[n][j] = 0.f;
}

__device__ __forceinline__ u32 shared_address(const void* p) {
    return (u32)__cvta_generic_to_shared(p);
}

// 16 bytes into shared memory in the background; zeros where `valid` is false (nothing is read then).
__device__ __forceinline__ void copy_async(u32 target, const void* source, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(valid ? 16 : 0));
}

__device__ __forceinline__ void commit_copies() {
    asm volatile("cp.async.commit_group;");
}

template <int PENDING>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

#ifdef ELEM_BF16
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#else
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#endif

// c[16, 8] += a[16, 16] b[16, 8]
__device__ __forceinline__ void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm(MMA " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Rows of K (which = 0) or V (1) of keys first .. first + 63 into shared memory, by all THREADS of the block; zeros
// from `end` on, for what lies there may be NaN. heads points at [block][layer][k|v][kv_head] of block 0.
template <int THREADS>
__device__ __forceinline__ void load_tile(u32 target, const elem* heads, size_t block_stride, const int* block_table,
                                          int first, int end) {
    constexpr int COPIES = TILE_KEYS * ROW_CHUNKS / THREADS;
    constexpr int UNROLL = COPIES > 8 ? 4 : COPIES;  // the addresses of more take too many registers
#pragma unroll UNROLL
    for (int n = 0; n < COPIES; n++) {
        int i = n * THREADS + threadIdx.x, row = i / ROW_CHUNKS, chunk = i % ROW_CHUNKS, key = first + row;
        bool valid = key < end;
        const elem* source = heads;
        if (valid)
            source += (size_t)block_table[key / BLOCK_SIZE] * block_stride + (key % BLOCK_SIZE) * HEAD_DIM + chunk * 8;
        copy_async(target + row * ROW_BYTES + chunk * 16, source, valid);
    }
}

// 16 rows of q as the mma takes them: narrow heads stay in registers, wide ones are read from shared memory each time.
struct Queries {
    static constexpr bool HELD = HEAD_DIM <= 64;
    u32 address;  // this lane's
    u32 held[HELD ? HEAD_DIM / 16 : 1][4];

    __device__ __forceinline__ explicit Queries(u32 q) {
        int lane = threadIdx.x % WARP;
        address = q + (lane % 16) * ROW_BYTES + (lane / 16) * 16;
    }
    __device__ __forceinline__ void load() {
        if constexpr (HELD) {
#pragma unroll
            for (int d = 0; d < HEAD_DIM / 16; d++) load_matrices(held[d], address + d * 32);
        }
    }
    __device__ __forceinline__ void get(u32 (&a)[4], int d) const {
        if constexpr (HELD) {
#pragma unroll
            for (int i = 0; i < 4; i++) a[i] = held[d][i];
        } else {
            load_matrices(a, address + d * 32);
        }
    }
};

// Scores s[n] = q K^T of 8 keys each; -inf behind a row's position.
__device__ __forceinline__ void score_tile(float (&s)[TILE_KEYS / 8][4], const Queries& q, u32 k, int first_key,
                                           const int (&position)[2], bool hides) {
    int lane = threadIdx.x % WARP;
#pragma unroll
    for (int n = 0; n < TILE_KEYS / 8; n++) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.f;
    u32 k_row = k + (lane % 8 + lane / 16 * 8) * ROW_BYTES + (lane / 8 % 2) * 16;
#pragma unroll
    for (int d = 0; d < HEAD_DIM / 16; d++) {
        u32 a[4];
        q.get(a, d);
#pragma unroll
        for (int n = 0; n < TILE_KEYS / 16; n++) {
            u32 b[4];
            load_matrices(b, k_row + n * 16 * ROW_BYTES + d * 32);
            multiply_add(s[2 * n], a, b[0], b[1]);
            multiply_add(s[2 * n + 1], a, b[2], b[3]);
        }
    }
    if (!hides) return;
    int key = first_key + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < TILE_KEYS / 8; n++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (key + n * 8 + j % 2 > position[j / 2]) s[n][j] = minus_infinity();
}

// From scores to weights 2^(scale (s - m)), in place; p's m, l and o follow the greatest score so far.
__device__ __forceinline__ void weigh(Partial& p, float (&s)[TILE_KEYS / 8][4], float scale) {
    float shrink[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float m = p.m[r];
#pragma unroll
        for (int n = 0; n < TILE_KEYS / 8; n++) m = fmaxf(m, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
        m = fmaxf(m, __shfl_xor_sync(ALL_LANES, m, 1));
        m = fmaxf(m, __shfl_xor_sync(ALL_LANES, m, 2));
        float base = m == minus_infinity() ? 0.f : m;  // a row that sees no key of this partial yet
        float offset = -__fmul_rn(base, scale), sum = 0.f;
#pragma unroll
        for (int n = 0; n < TILE_KEYS / 8; n++)
#pragma unroll
            for (int j = 2 * r; j < 2 * r + 2; j++) {
                s[n][j] = exp2_fast(__fmaf_rn(s[n][j], scale, offset));
                sum = __fadd_rn(sum, s[n][j]);
            }
        shrink[r] = exp2_fast(__fmul_rn(__fsub_rn(p.m[r], base), scale));  // exactly 1 where m stays
        p.m[r] = m;
        p.l[r] = __fmaf_rn(p.l[r], shrink[r], sum);  // of this lane's keys; finish_partial adds the lanes of a row
    }
    if (!__any_sync(ALL_LANES, shrink[0] != 1.f || shrink[1] != 1.f)) return;  // times 1 changes nothing
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) p.o[n][j] = __fmul_rn(p.o[n][j], shrink[j / 2]);
}

// o += weights V, the weights rounded to elem; v points at this warp's columns.
__device__ __forceinline__ void add_values(Partial& p, const float (&s)[TILE_KEYS / 8][4], u32 v) {
    int lane = threadIdx.x % WARP;
    u32 v_row = v + (lane % 16) * ROW_BYTES + (lane / 16) * 16;
#pragma unroll
    for (int k = 0; k < TILE_KEYS / 16; k++) {
        u32 a[4] = {pack(s[2 * k][0], s[2 * k][1]), pack(s[2 * k][2], s[2 * k][3]),
                    pack(s[2 * k + 1][0], s[2 * k + 1][1]), pack(s[2 * k + 1][2], s[2 * k + 1][3])};
#pragma unroll
        for (int n = 0; n < COLUMNS / 16; n++) {
            u32 b[4];
            load_matrices_transposed(b, v_row + k * 16 * ROW_BYTES + n * 32);
            multiply_add(p.o[2 * n], a, b[0], b[1]);
            multiply_add(p.o[2 * n + 1], a, b[2], b[3]);
        }
    }
}

__device__ __forceinline__ void finish_partial(Partial& p) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        p.l[r] = __fadd_rn(p.l[r], __shfl_xor_sync(ALL_LANES, p.l[r], 1));
        p.l[r] = __fadd_rn(p.l[r], __shfl_xor_sync(ALL_LANES, p.l[r], 2));
    }
}

// What two softmaxes over other keys weigh in one over all of them.
struct MergeWeights {
    float m, old_weight, new_weight;
};

__device__ __forceinline__ MergeWeights merge_weights(float old_m, float new_m, float scale) {
    float m = fmaxf(old_m, new_m);
    return {m, exp2_fast(__fmul_rn(__fsub_rn(old_m, m), scale)), exp2_fast(__fmul_rn(__fsub_rn(new_m, m), scale))};
}

__device__ __forceinline__ float merged(float old_value, float new_value, const MergeWeights& w) {
    return __fmaf_rn(old_value, w.old_weight, __fmul_rn(new_value, w.new_weight));
}

// total = total and then the finished partial p.
__device__ __forceinline__ void merge(Partial& total, const Partial& p, float scale) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        MergeWeights w = merge_weights(total.m[r], p.m[r], scale);
        total.m[r] = w.m;
        total.l[r] = merged(total.l[r], p.l[r], w);
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
            for (int j = 2 * r; j < 2 * r + 2; j++) total.o[n][j] = merged(total.o[n][j], p.o[n][j], w);
    }
}

__device__ __forceinline__ float normalized(float o, float l) {
    return __fmul_rn(o, __frcp_rn(l));
}
