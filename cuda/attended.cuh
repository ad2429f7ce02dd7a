// What the warps of a block of decode.cu have of its rows once a partial is at its end, and the merge of partials.
#pragma once
#include "tile.cuh"

constexpr int DECODE_WARPS = 4;  // a tile of a partial each
static_assert(DECODE_WARPS == PARTIAL_KEYS / TILE_KEYS, "a warp to each tile");
#ifdef KV_FP8
typedef CodeTile<DECODE_WARPS> Tile;
#else
typedef WideTile<DECODE_WARPS> Tile;
#endif
// Tiles of K or V that are in shared memory at once.
constexpr int TILES_AT_ONCE = Tile::BYTES > (16 << 10) ? 2 : DECODE_WARPS, ROUNDS = DECODE_WARPS / TILES_AT_ONCE;
constexpr int VALUE_GROUPS = (HEAD_DIM / 16 + DECODE_WARPS - 1) / DECODE_WARPS;  // of 16 columns, of a warp at most
constexpr int THREADS = DECODE_WARPS * WARP;
// Least on a multiprocessor, for ptxas: left alone it takes other numbers of registers, too many or so few that it
// spills.
#if __CUDA_ARCH__ >= 1000  // needs more registers for the same
constexpr int DECODE_BLOCKS = 4;
#else
constexpr int DECODE_BLOCKS = Tile::BYTES <= 4096 ? 8 : Tile::BYTES <= 8192 ? 5 : 4;
#endif
constexpr int MERGES_AT_ONCE = DECODE_BLOCKS > 5 ? 1 : 2;  // partials whose loads are on their way together
constexpr int PARTIAL_ROW = HEAD_DIM + 2;                  // floats

// What a lane has of the 16 rows: m and l of rows g and g + 8, o of this warp's columns.
struct Attended {
    float m[2], l[2], o[VALUE_GROUPS][2][4];
};

// put(r, column, x, y) for all pairs of neighbours in o of rows g (r = 0) and g + 8 (1), where they are, of the i-th
// group of columns.
template <typename Put>
__device__ __forceinline__ void for_pairs(float (&o)[2][4], int i, const Rows& rows, Put put) {
    constexpr bool ONE_MMA = Tile::NEIGHBOURS_IN_ONE;
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (lane / 4 + 8 * r >= rows.count) continue;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int column = (warp + i * DECODE_WARPS) * 16 + (ONE_MMA ? half * 8 + lane % 4 * 2 : lane % 4 * 4 + half * 2);
            float& x = ONE_MMA ? o[half][2 * r] : o[0][2 * r + half];
            float& y = ONE_MMA ? o[half][2 * r + 1] : o[1][2 * r + half];
            if (column < HEAD_DIM) put(r, column, x, y);
        }
    }
}

template <typename Put>
__device__ __forceinline__ void for_pairs(Attended& p, const Rows& rows, Put put) {
#pragma unroll
    for (int i = 0; i < VALUE_GROUPS; i++) for_pairs(p.o[i], i, rows, put);
}

// Partials of a sequence in ascending order; `partials` points at its first, the others are `next` floats apart.
__device__ __forceinline__ void merge_partials(const Rows& rows, const float* partials, size_t next, int count,
                                               float scale) {
    for (int i = threadIdx.x; i < rows.count * HEAD_DIM; i += THREADS) {
        int row = i / HEAD_DIM, column = i % HEAD_DIM;
        const float* p = partials + row * PARTIAL_ROW;
        float m = minus_infinity(), l = 0.f, o = 0.f;
#pragma unroll 4
        for (int n = 0; n < count; n++, p += next) {
            MergeWeights w = merge_weights(m, __ldcg(p + HEAD_DIM), scale);
            m = w.m;
            l = merged(l, __ldcg(p + HEAD_DIM + 1), w);
            o = merged(o, __ldcg(p + column), w);
        }
        rows.out[rows.offset(row) + column] = from_float(normalized(o, l));
    }
}

// The same where p, which is still in registers, is the last one: `before` others are those of prefix.cu.
__device__ __forceinline__ void merge_last(Attended& p, const Rows& rows, const float* partials, size_t next,
                                           int before, float scale) {
    int row = threadIdx.x % WARP / 4;
#pragma unroll
    for (int i = 0; i < VALUE_GROUPS; i++) {
        float m[2] = {minus_infinity(), minus_infinity()}, l[2] = {0.f, 0.f}, o[2][4] = {};
        MergeWeights w[2];
        const float* other = partials + row * PARTIAL_ROW;
        auto merge = [&](int r, float other_m, float other_l) {
            w[r] = merge_weights(m[r], other_m, scale);
            m[r] = w[r].m, l[r] = merged(l[r], other_l, w[r]);
        };
#pragma unroll MERGES_AT_ONCE
        for (int n = 0; n < before; n++, other += next) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                if (row + 8 * r >= rows.count) continue;
                float2 ends = __ldcg((const float2*)(other + r * 8 * PARTIAL_ROW + HEAD_DIM));
                merge(r, ends.x, ends.y);
            }
            for_pairs(o, i, rows, [&](int r, int column, float& x, float& y) {
                float2 pair = __ldcg((const float2*)(other + r * 8 * PARTIAL_ROW + column));
                x = merged(x, pair.x, w[r]), y = merged(y, pair.y, w[r]);
            });
        }
#pragma unroll
        for (int r = 0; r < 2; r++) merge(r, p.m[r], p.l[r]);
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int j = 0; j < 4; j++) p.o[i][half][j] = merged(o[half][j], p.o[i][half][j], w[j / 2]);
        for_pairs(p.o[i], i, rows, [&](int r, int column, float x, float y) {
            *(u32*)(rows.out + rows.offset(row + 8 * r) + column) = pack(normalized(x, l[r]), normalized(y, l[r]));
        });
    }
}
