// A partial of a sequence, attended to by a block of four warps: what decode.cu and ahead.cu are made of.
//
// What the warp of prefill.cu does with one tile of a partial after another, the warps of a block here do with all its
// tiles at once. Each has the scores of one tile; they tell each other the greatest ones, so that each knows those of the
// tiles before its own; they leave their weights where all find them; then each has some of V's columns, and walks all
// tiles in order. So a chain of sums has the links of the sequential one.
#pragma once
#include "tile.cuh"

namespace {

constexpr int DECODE_WARPS = 4;  // a tile of a partial each
static_assert(DECODE_WARPS == PARTIAL_KEYS / TILE_KEYS, "a warp to each tile");
#ifdef KV_FP8
typedef CodeTile<DECODE_WARPS> Tile;
#else
typedef WideTile<DECODE_WARPS> Tile;
#endif
constexpr int VALUE_GROUPS = (HEAD_DIM / 16 + DECODE_WARPS - 1) / DECODE_WARPS;  // of 16 columns, of a warp at most
constexpr int THREADS = DECODE_WARPS * WARP;
constexpr int PARTIAL_ROW = HEAD_DIM + 2;  // floats

// What warps tell each other, at the start of shared memory; tiles lie behind it.
struct Exchange {
    union {
        char queries[MMA_ROWS * ROW_BYTES];                 // until all scores are there
        uint4 weights[DECODE_WARPS][TILE_KEYS / 16][WARP];  // of each tile, as the mma takes them
    };
    float greatest[DECODE_WARPS][MMA_ROWS];  // scores of a tile
    float2 sums[DECODE_WARPS][WARP];         // of a tile's weights, rows g and g + 8 of each lane
#ifdef KV_FP8
    char scales[2][DECODE_WARPS][TILE_SCALES_BYTES];  // of K, of V
#endif
    __device__ __forceinline__ u32 scales_at(bool of_values, int tile) const {
#ifdef KV_FP8
        return shared_address(scales[of_values][tile]);
#else
        return 0;
#endif
    }
};
static_assert(sizeof(Exchange) % 128 == 0, "tiles start at a multiple of 128 bytes");

// What a lane has of the 16 rows: m and l of rows g and g + 8, o of this warp's columns.
struct Attended {
    float m[2], l[2], o[VALUE_GROUPS][2][4];
};

// K and V of a partial, tile by tile into shared memory.
struct Tiles {
    Tile tile;
    int first, count;
    u32 own_id, ids[DECODE_WARPS];  // KV blocks of the tiles; each lane finds one of them
    static constexpr int FINDERS = WARP / DECODE_WARPS;

    __device__ __forceinline__ Tiles(const Keys& keys, int first)
        : first(first), count(min((keys.end - first + TILE_KEYS - 1) / TILE_KEYS, DECODE_WARPS)) {
        own_id = tile.find(keys, first + (int)(tile.member / FINDERS * TILE_KEYS));
#pragma unroll
        for (int n = 0; n < DECODE_WARPS; n++) ids[n] = __shfl_sync(ALL_LANES, own_id, n * FINDERS);
    }
#ifdef KV_FP8
    // Scales of K and V of all tiles, a piece for each lane; they join the next copies.
    __device__ __forceinline__ void load_scales(const Exchange& shared, const Keys& keys) const {
        constexpr u32 PIECES = SCALES_BYTES / 16;
        u32 n = tile.member / FINDERS, piece = tile.member % FINDERS;
        bool of_values = piece / PIECES;
        if (piece >= 2 * PIECES || (int)n >= count) return;
        const char* plane = keys.k(own_id) + (of_values ? keys.to_values : 0);
        tile.copy_scales(shared.scales_at(of_values, n), plane, first + (int)n * TILE_KEYS, keys.end, piece % PIECES);
    }
    // Of V; those of keys that no row sees are multiplied with nothing.
    __device__ __forceinline__ void clear_scales(const Exchange& shared, const Keys& keys) const {
        tile.clear_scales(shared.scales_at(true, count - 1), first + (count - 1) * TILE_KEYS, keys.end);
    }
#else
    __device__ __forceinline__ void load_scales(const Exchange&, const Keys&) const {}
    __device__ __forceinline__ void clear_scales(const Exchange&, const Keys&) const {}
#endif
};

// The scores of this warp's tile, whose K lies at `k`, and for all warps the greatest of each row.
__device__ __forceinline__ void score_own(Scores& s, Exchange& shared, u32 k, const Rows& rows, const Tiles& tiles) {
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, key = tiles.first + warp * TILE_KEYS;
    int position[2] = {rows.position_of(lane / 4), rows.position_of(lane / 4 + 8)};
    score_tile<Tile>(s, shared_address(shared.queries), k, shared.scales_at(false, warp), key, position,
                     key + TILE_KEYS > rows.position + 1);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float m = greatest(minus_infinity(), s, r);
        if (lane % 4 == 0) shared.greatest[warp][lane / 4 + 8 * r] = m;
    }
}

// Leave this warp's weights, and their sums, where all find them.
__device__ __forceinline__ void share_weights(Exchange& shared, Scores& s, const float (&m)[2], float scale) {
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    float low = weigh(s, 0, m[0], scale), high = weigh(s, 1, m[1], scale);
    shared.sums[warp][lane] = make_float2(low, high);
    multiply_scales(s, shared.scales_at(true, warp));
#pragma unroll
    for (int k = 0; k < TILE_KEYS / 16; k++) {
        u32 a[4];
        round_weights(a, s, k);
        shared.weights[warp][k][lane] = make_uint4(a[0], a[1], a[2], a[3]);
    }
}

// l and o go on by one tile, whose V lies at v.
__device__ __forceinline__ void add_tile(Attended& p, const Exchange& shared, int tile, u32 v,
                                         const float (&shrinks)[2]) {
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    float2 sums = shared.sums[tile][lane];
    p.l[0] = __fmaf_rn(p.l[0], shrinks[0], sums.x);
    p.l[1] = __fmaf_rn(p.l[1], shrinks[1], sums.y);
#pragma unroll
    for (int i = 0; i < VALUE_GROUPS; i++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int j = 0; j < 4; j++) p.o[i][half][j] = __fmul_rn(p.o[i][half][j], shrinks[j / 2]);
#pragma unroll
    for (int k = 0; k < TILE_KEYS / 16; k++) {
        uint4 weights = shared.weights[tile][k][lane];
        u32 a[4] = {weights.x, weights.y, weights.z, weights.w};
#pragma unroll
        for (int i = 0; i < VALUE_GROUPS; i++) {
            int group = warp + i * DECODE_WARPS;
            if (group * 16 < HEAD_DIM) add_values<Tile>(p.o[i][0], p.o[i][1], a, Tile::value_place(v, group), k);
        }
    }
}

// What l and o shrink by at each tile, row g and g + 8.
typedef float Shrinks[DECODE_WARPS][2];

// From scores to weights, left where all find them, and how l and o go on.
__device__ __forceinline__ void weigh_partial(Attended& p, Shrinks& shrinks, Scores& s, Exchange& shared,
                                              const Tiles& tiles, float scale) {
    int warp = threadIdx.x / WARP, row = threadIdx.x % WARP / 4;
    float own_m[2];
    p = {{minus_infinity(), minus_infinity()}};
#pragma unroll
    for (int tile = 0; tile < DECODE_WARPS; tile++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float before = p.m[r];
            if (tile < tiles.count) p.m[r] = fmaxf(before, shared.greatest[tile][row + 8 * r]);
            shrinks[tile][r] = shrink(before, p.m[r], scale);
            if (tile == warp) own_m[r] = p.m[r];
        }
    if (warp < tiles.count) share_weights(shared, s, own_m, scale);
}

// put(r, column, x, y) for all pairs of neighbours in o of rows g (r = 0) and g + 8 (1), where they are.
template <typename Put>
__device__ __forceinline__ void for_pairs(const Attended& p, const Rows& rows, Put put) {
    constexpr bool ONE_MMA = Tile::NEIGHBOURS_IN_ONE;
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (lane / 4 + 8 * r >= rows.count) continue;
#pragma unroll
        for (int i = 0; i < VALUE_GROUPS; i++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const auto& o = p.o[i];
                int column =
                    (warp + i * DECODE_WARPS) * 16 + (ONE_MMA ? half * 8 + lane % 4 * 2 : lane % 4 * 4 + half * 2);
                float x = ONE_MMA ? o[half][2 * r] : o[0][2 * r + half];
                float y = ONE_MMA ? o[half][2 * r + 1] : o[1][2 * r + half];
                if (column < HEAD_DIM) put(r, column, x, y);
            }
    }
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

// One partial of a sequence under one KV head: what a block has to do, and where it leaves that.
struct Item {
    int sequence, which, place, slot, before;
    int head, length, first_row, num_rows;

    __device__ __forceinline__ Item(const int* work, const int* starts, const int* lengths) {
        const int* item = work + blockIdx.x * 5;
        sequence = item[0], which = item[1], place = item[2], slot = item[3], before = item[4], head = blockIdx.y;
        if (sequence < 0) return;
        length = lengths[sequence], first_row = starts[sequence], num_rows = starts[sequence + 1] - first_row;
    }
};

__device__ __forceinline__ void write_rows(const Attended& p, const Rows& rows) {
    int row = threadIdx.x % WARP / 4;
    elem* target[2] = {rows.out + rows.offset(row), rows.out + rows.offset(row + 8)};
    for_pairs(p, rows, [&](int r, int column, float x, float y) {
        *(u32*)(target[r] + column) = pack(normalized(x, p.l[r]), normalized(y, p.l[r]));
    });
}

// Partials of a head, each `next` floats from the one before.
struct Places {
    float* of_head;
    size_t next;

    __device__ __forceinline__ Places(float* partials, int head, int num_kv_heads)
        : of_head(partials + (size_t)head * MMA_ROWS * PARTIAL_ROW),
          next((size_t)num_kv_heads * MMA_ROWS * PARTIAL_ROW) {}
    __device__ __forceinline__ void write(const Attended& p, const Rows& rows, int place) const {
        float* target = of_head + place * next + threadIdx.x % WARP / 4 * PARTIAL_ROW;
        for_pairs(p, rows, [&](int r, int column, float x, float y) {
            float* row = target + r * 8 * PARTIAL_ROW;
            *(float2*)(row + column) = make_float2(x, y);
            if (column == 0) row[HEAD_DIM] = p.m[r], row[HEAD_DIM + 1] = p.l[r];
        });
    }
};

// The last block of the item's sequence and head to come here merges all of its partials.
__device__ __forceinline__ void merge_at_last(const Places& places, const Item& item, const Rows& rows, int* tickets,
                                              int num_kv_heads, float scale) {
    int count = (item.length + PARTIAL_KEYS - 1) / PARTIAL_KEYS, first = item.place - item.which;
    if (last_to_come(tickets + first * num_kv_heads + item.head, count - item.before))
        merge_partials(rows, places.of_head + first * places.next, places.next, count, scale);
}

}  // namespace
