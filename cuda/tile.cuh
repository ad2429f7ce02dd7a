// The heart of attention: 16 query rows attend to a tile of 64 keys. Prefill and decode are made of this alone.
//
// Online softmax in base 2 (Milakov & Gimelshein 2018; Dao, FlashAttention-2, 2023) on mma.sync.m16n8k16, float32
// accumulators. A row's keys are walked in ascending tiles; a new partial (m, l, o) starts at every multiple of
// PARTIAL_KEYS and partials are merged in ascending order. What a row gets depends on that row, its position and its
// keys alone: not on its place among the 16, nor on whether one warp walks all tiles of all partials (prefill) or each
// tile has its warp and each partial its block (decode). For that,
//   - every rounding below is an intrinsic, which no compiler contracts or reorders;
//   - a maximum is the same in any order; sums l and o are chains over the tiles in ascending order, link by link as
//     `shrink` and `add_values` have them;
//   - a key behind the row's position scores -inf, so its weight is exactly 0 and max, sum and o keep their bits;
//   - merging with an empty partial (m = -inf, l = 0, o = 0), or into none yet, changes no bit of the other.
//
// A lane holds rows g and g + 8 of the 16 (g = lane / 4), in each 8 columns those at 2 t and 2 t + 1 (t = lane % 4):
// the layout of the mma's accumulators (PTX ISA, "Matrix fragments for mma.m16n8k16").
#pragma once
#include "keys.cuh"

constexpr int PARTIAL_KEYS = 256;  // of a partial

typedef float Scores[TILE_KEYS / 8][4];  // a lane's, of a tile: of 8 keys each

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// What the mma takes: elem, and fp16 over an FP8 cache.
__device__ __forceinline__ u32 pack_operands(float lo, float hi) {
#ifdef KV_FP8
    return pack_halves(lo, hi);
#else
    return pack(lo, hi);
#endif
}

__device__ __forceinline__ void multiply_add_operands(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#ifdef KV_FP8
    multiply_add_halves(c, a, b[0], b[1]);
#else
    multiply_add(c, a, b[0], b[1]);
#endif
}

// Scores, times the scales of K, or weights, times those of V: of a tile, whose scales lie at `scales`.
__device__ __forceinline__ void multiply_scales(Scores& s, u32 scales) {
#ifdef KV_FP8
#pragma unroll
    for (int n = 0; n < TILE_KEYS / 8; n++) {
        u32 pair = load_shared_word(computed_again(scales) + (n * 8 + threadIdx.x % 4 * 2) * SCALE_BYTES);
        float first = __uint_as_float(pair << 16), second = __uint_as_float(pair & 0xffff0000u);
#pragma unroll
        for (int j = 0; j < 4; j++) s[n][j] = __fmul_rn(s[n][j], j % 2 ? second : first);
    }
#endif
}

// Scores s = q K^T of 16 rows at q and the tile at k, of a Tile's kind; -inf behind a row's position. scales: of K.
template <typename Tile>
__device__ __forceinline__ void score_tile(Scores& s, u32 q, u32 k, u32 scales, int first_key, const int (&position)[2],
                                           bool hides) {
    int lane = threadIdx.x % WARP;
#pragma unroll
    for (int n = 0; n < TILE_KEYS / 8; n++) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.f;
    u32 q_row = q + place_of(lane % 16, lane / 16), k_row = Tile::key_place(k);
#pragma unroll
    for (int d = 0; d < HEAD_DIM / 16; d++) {
        u32 a[4];
        load_matrices(a, further(q_row, 2 * d));
#pragma unroll
        for (int n = 0; n < TILE_KEYS / 32; n++) {
            u32 b[4][2];
            Tile::load_keys(b, k_row, n, d);
#pragma unroll
            for (int i = 0; i < 4; i++) multiply_add_operands(s[4 * n + i], a, b[i]);
        }
    }
    multiply_scales(s, scales);
    if (!hides) return;
    int key = first_key + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < TILE_KEYS / 8; n++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (key + n * 8 + j % 2 > position[j / 2]) s[n][j] = minus_infinity();
}

// m = the greatest of it and the scores of row g (r = 0) or g + 8 (1), in all lanes that share the row.
__device__ __forceinline__ float greatest(float m, const Scores& s, int r) {
#pragma unroll
    for (int n = 0; n < TILE_KEYS / 8; n++) m = fmaxf(m, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
    m = fmaxf(m, __shfl_xor_sync(ALL_LANES, m, 1));
    return fmaxf(m, __shfl_xor_sync(ALL_LANES, m, 2));
}

// What m is where scores are compared with it: a row that sees no key of this partial yet has none.
__device__ __forceinline__ float finite(float m) {
    return m == minus_infinity() ? 0.f : m;
}

// What l and o of the tiles before shrink by, as the greatest score goes from `before` to m; exactly 1 where it stays.
__device__ __forceinline__ float shrink(float before, float m, float scale) {
    return exp2_fast(__fmul_rn(__fsub_rn(before, finite(m)), scale));
}

// Weights are greater by 2^WEIGHT_SHIFT, and their sums with them: so those that scales of V make small are no less
// exact in fp16, and those that they make great, as scales are at most 2^7, still have room.
#ifdef KV_FP8
constexpr float WEIGHT_SHIFT = 8.f;
#else
constexpr float WEIGHT_SHIFT = 0.f;
#endif

// From scores of a row to weights 2^(scale (s - m)), in place; returns the sum of this lane's.
__device__ __forceinline__ float weigh(Scores& s, int r, float m, float scale) {
    float offset = __fsub_rn(WEIGHT_SHIFT, __fmul_rn(finite(m), scale)), sum = 0.f;
#pragma unroll
    for (int n = 0; n < TILE_KEYS / 8; n++)
#pragma unroll
        for (int j = 2 * r; j < 2 * r + 2; j++) {
            s[n][j] = exp2_fast(__fmaf_rn(s[n][j], scale, offset));
            sum = __fadd_rn(sum, s[n][j]);
        }
    return sum;
}

// Weights of the keys from 16 k on, rounded, as the mma takes them.
__device__ __forceinline__ void round_weights(u32 (&a)[4], const Scores& s, int k) {
    a[0] = pack_operands(s[2 * k][0], s[2 * k][1]), a[1] = pack_operands(s[2 * k][2], s[2 * k][3]);
    a[2] = pack_operands(s[2 * k + 1][0], s[2 * k + 1][1]), a[3] = pack_operands(s[2 * k + 1][2], s[2 * k + 1][3]);
}

// Two times 8 columns of o += weights V, of the keys from 16 k on.
template <typename Tile>
__device__ __forceinline__ void add_values(float (&first)[4], float (&second)[4], const u32 (&weights)[4],
                                           u32 value_place, int k) {
    u32 b[2][2];
    Tile::load_values(b, value_place, k);
    multiply_add_operands(first, weights, b[0]);
    multiply_add_operands(second, weights, b[1]);
}

// l of a row, of all lanes that share it, once its partial is at its end.
__device__ __forceinline__ float sum_of_row(float l) {
    l = __fadd_rn(l, __shfl_xor_sync(ALL_LANES, l, 1));
    return __fadd_rn(l, __shfl_xor_sync(ALL_LANES, l, 2));
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

__device__ __forceinline__ float normalized(float o, float l) {
    return __fmul_rn(o, __frcp_rn(l));
}
