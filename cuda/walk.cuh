// A warp's walk with 16 query rows through the tiles of a partial, one after another, with the others of its block:
// what prefill.cu and prefix.cu are made of.
#pragma once
#include "tile.cuh"

// Wide heads: two warps share 16 rows, each with all scores and half of the columns of V, so that accumulators fit into
// registers.
constexpr int COLUMN_GROUPS = HEAD_DIM > 128 ? 2 : 1;
constexpr int COLUMNS = HEAD_DIM / COLUMN_GROUPS;
static_assert(HEAD_DIM % (16 * COLUMN_GROUPS) == 0 && HEAD_DIM <= 256, "head sizes that the fragments cover");
// Tiles of K and of V in shared memory: two, so that the next one comes while this one is worked on, or one, so that
// more blocks fit on a multiprocessor and work while others wait.
constexpr int STAGES = HEAD_DIM <= 64 ? 2 : 1;

// Softmax of some keys for rows g and g + 8: the greatest score, the sum of weights, the weighted sum of V.
struct Partial {
    float m[2], l[2], o[COLUMNS / 8][4];

    __device__ __forceinline__ Partial() {
#pragma unroll
        for (int r = 0; r < 2; r++) m[r] = minus_infinity(), l[r] = 0.f;
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.f;
    }
};

// From scores to weights, in place; p's m, l and o follow the greatest score so far.
__device__ __forceinline__ void weigh_tile(Partial& p, Scores& s, float scale) {
    float shrinks[2];
    bool changes = false;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float m = greatest(p.m[r], s, r), sum = weigh(s, r, m, scale);
        shrinks[r] = shrink(p.m[r], m, scale);
        changes |= shrinks[r] != 1.f && p.m[r] != minus_infinity();
        p.m[r] = m;
        p.l[r] = __fmaf_rn(p.l[r], shrinks[r], sum);  // of this lane's keys
    }
    if (!__any_sync(ALL_LANES, changes)) return;  // times 1 changes nothing, nor does anything times 0
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) p.o[n][j] = __fmul_rn(p.o[n][j], shrinks[j / 2]);
}

// o += weights V, of the tile at v and this warp's columns.
template <typename Tile>
__device__ __forceinline__ void add_tile(Partial& p, Scores& s, u32 v, int column_group) {
    multiply_scales(s, v + TILE_ROWS_BYTES);
    u32 a[TILE_KEYS / 16][4];
#pragma unroll
    for (int k = 0; k < TILE_KEYS / 16; k++) round_weights(a[k], s, k);
    u32 columns = Tile::value_place(v, column_group);
#pragma unroll
    for (int k = 0; k < TILE_KEYS / 16; k++)
#pragma unroll
        for (int n = 0; n < COLUMNS / 16; n++)
            add_values<Tile>(p.o[2 * n], p.o[2 * n + 1], a[k], further(columns, 2 * n), k);
}

// K and V tile by tile through shared memory, in step with the warps that read them.
template <typename Tile, int STAGES>
struct Tiles {
    Tile tile;
    const Keys& keys;
    u32 shared;
    u32 block;  // from which this thread copies next

    // Of K; V lies behind it.
    __device__ u32 place(int key) const { return shared + key / TILE_KEYS % STAGES * 2 * TILE_BYTES; }
    __device__ __forceinline__ void load_k(int key) {
        if (key < keys.end) tile.copy(place(key), keys.k(block), key, keys.end);
        commit_copies();
    }
    __device__ __forceinline__ void load_v(int key) {
        if (key < keys.end) tile.copy(place(key) + TILE_BYTES, keys.v(block), key, keys.end);
        commit_copies();
    }
    __device__ __forceinline__ void start(int key) {
        block = tile.find(keys, key);
        load_k(key);
        if constexpr (STAGES == 2) load_v(key), block = tile.find(keys, key + TILE_KEYS);
    }
    // K of the tile is there for all; all are through with the tile before.
    __device__ __forceinline__ void before_scores(int key) {
        wait_for_copies<0>();
        tile.template arrived<false>(place(key), key, keys.end);
        if constexpr (STAGES == 2) tile.template arrived<true>(place(key) + TILE_BYTES, key, keys.end);
        Tile::sync();
        if constexpr (STAGES == 2) key += TILE_KEYS, load_k(key);
        load_v(key);
        block = tile.find(keys, key + TILE_KEYS);
    }
    // All have read K.
    __device__ __forceinline__ void after_scores(int key) {
        if constexpr (STAGES == 1) {
            Tile::sync();
            load_k(key + TILE_KEYS);
        }
    }
    // V of the tile is there for all.
    __device__ __forceinline__ void before_values(int key) {
        if constexpr (STAGES == 1) {
            wait_for_copies<1>();  // not for the next K
            tile.template arrived<true>(place(key) + TILE_BYTES, key, keys.end);
            Tile::sync();
        }
    }
};

// A partial, from key `first` on, of this warp's rows at q, at these positions; hides(key): whether some of them do not
// see all of the tile from this key on. A warp that has no rows only helps to copy.
template <typename Tile, int STAGES, typename Hides>
__device__ __forceinline__ void walk_partial(Partial& p, Tiles<Tile, STAGES>& tiles, u32 q, int first,
                                             const int (&position)[2], Hides hides, int column_group, float scale,
                                             bool has_rows) {
    for (int key = first; key < min(first + PARTIAL_KEYS, tiles.keys.end); key += TILE_KEYS) {
        Scores s;
        tiles.before_scores(key);
        u32 k = tiles.place(key);
        if (has_rows) score_tile<Tile>(s, q, k, k + TILE_ROWS_BYTES, key, position, hides(key));
        tiles.after_scores(key);
        if (has_rows) weigh_tile(p, s, scale);
        tiles.before_values(key);
        if (has_rows) add_tile<Tile>(p, s, tiles.place(key) + TILE_BYTES, column_group);
    }
}
