// Attention of a few rows of a sequence over its paged K and V: decoding, drafts.
//
// The formula, rows, out, q, cache, tables and group are those of prefill.cu; so are the bits of every row: what the
// warp of prefill.cu does with one tile of a partial after another, the warps of a block here do with all its tiles at
// once. Each has the scores of one tile; they tell each other the greatest ones, so that each knows those of the tiles
// before its own; they leave their weights where all find them; then each has some of V's columns, and walks all tiles
// in order. So K and V are on their way in one piece, and a chain of sums has the links of the sequential one.
//
//   partials  f32 [places, num_kv_heads, 16, HEAD_DIM + 2] o, m, l of each row that there is
//   tickets   i32 [places, num_kv_heads] all 0, before and after
//   work      i32 [items, 5] sequence (-1: nothing to do), which of its partials, place where it is left (-1: it is the
//             only one, and the row is done), slot, how many partials of the sequence, its first ones, prefix.cu has
//             left before; partials of a sequence have places one after another
//   starts    i32 [S + 1] first row of T of each sequence
//   lengths   i32 [S]
//   prefixes  whether prefix.cu comes right before
//   tails     whether tail.cu comes right behind, and has the last partial of each sequence
//
// attend_ahead is the same for so few sequences that their blocks leave much of the card idle, without prefixes and
// tails: K and V of the steps before are on their way while the kernel before still runs, each in a place of its own,
// and behind its end only what this step has added, and q, is waited for.
//
// Grid (items, num_kv_heads), DECODE_WARPS warps. Without tails the last block of a sequence and head to come to its end
// merges all partials in ascending order: which block that is shows in no bit. With tails partials are left to that.
#include "tile.cuh"

namespace {

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
    // K (offset 0) or V of a round's tiles.
    __device__ __forceinline__ void load(u32 target, const Keys& keys, u32 offset, int round) const {
#pragma unroll
        for (int i = 0; i < TILES_AT_ONCE; i++) {
            int n = round * TILES_AT_ONCE + i;
            if (n >= count) break;
            tile.copy(target + i * Tile::BYTES, keys.k(ids[n]) + offset, first + n * TILE_KEYS, keys.end);
        }
        commit_copies();
    }
    // The same of all tiles at once: rows of keys before `from`, or, OLD false, the others.
    template <bool OLD>
    __device__ __forceinline__ void load_part(u32 target, const Keys& keys, u32 offset, int from) const {
#pragma unroll
        for (int n = 0; n < DECODE_WARPS; n++) {
            if (n >= count) break;
            int key = first + n * TILE_KEYS;
            u32 place = target + n * Tile::BYTES;
            const char* plane = keys.k(ids[n]) + offset;
            if constexpr (OLD)
                tile.copy_if(place, plane, key, keys.end, tile.before(key, from));
            else if (key + TILE_KEYS > from)
                tile.copy_if(place, plane, key, keys.end, tile.behind(key, from));
        }
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

// Likewise of all warps, K coming to `place`, which has been read at the return.
__device__ __forceinline__ void score_partial(Scores& s, Exchange& shared, u32 place, const Rows& rows,
                                              const Keys& keys, const Tiles& tiles) {
    int warp = threadIdx.x / WARP;
    load_queries<MMA_ROWS>(shared_address(shared.queries), rows);  // joins the first copies
    tiles.load_scales(shared, keys);
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
        tiles.load(place, keys, 0, round);
        wait_for_copies<0>();
        tiles.clear_scales(shared, keys);
        __syncthreads();
        if (warp / TILES_AT_ONCE == round && warp < tiles.count)
            score_own(s, shared, place + warp % TILES_AT_ONCE * Tile::BYTES, rows, tiles);
        __syncthreads();
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

__device__ __forceinline__ Attended attend_partial(Exchange& shared, const Rows& rows, const Keys& keys, int first,
                                                   float scale) {
    u32 place = shared_address(&shared) + sizeof(Exchange);  // of K and then of V: so more blocks have room
    Tiles tiles(keys, first);
    Scores s;
    score_partial(s, shared, place, rows, keys, tiles);
    tiles.load(place, keys, keys.to_values, 0);
    Attended p;
    Shrinks shrinks;
    weigh_partial(p, shrinks, s, shared, tiles, scale);
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
        if (round > 0) {
            __syncthreads();  // before the place of V is filled again
            tiles.load(place, keys, keys.to_values, round);
        }
        wait_for_copies<0>();
        __syncthreads();
#pragma unroll
        for (int i = 0; i < TILES_AT_ONCE; i++) {
            int tile = round * TILES_AT_ONCE + i;
            if (tile < tiles.count) add_tile(p, shared, tile, place + i * Tile::BYTES, shrinks[tile]);
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) p.l[r] = sum_of_row(p.l[r]);
    return p;
}

// The same with K and V ahead of the end of the kernel before; it is waited for in here.
__device__ __forceinline__ Attended attend_ahead_of(Exchange& shared, const Rows& rows, const Keys& keys, int first,
                                                    float scale) {
    u32 k = shared_address(&shared) + sizeof(Exchange), v = k + DECODE_WARPS * Tile::BYTES;
    int warp = threadIdx.x / WARP, from = rows.position;  // keys of this step
    Tiles tiles(keys, first);
    tiles.load_part<true>(k, keys, 0, from);
    tiles.load_part<true>(v, keys, keys.to_values, from);
    wait_for_kernel_before();
    load_queries<MMA_ROWS>(shared_address(shared.queries), rows);
    tiles.load_scales(shared, keys);
    tiles.load_part<false>(k, keys, 0, from);
    tiles.load_part<false>(v, keys, keys.to_values, from);
    commit_copies();
    wait_for_copies<0>();
    tiles.clear_scales(shared, keys);
    __syncthreads();
    Scores s;
    if (warp < tiles.count) score_own(s, shared, k + warp * Tile::BYTES, rows, tiles);
    __syncthreads();
    Attended p;
    Shrinks shrinks;
    weigh_partial(p, shrinks, s, shared, tiles, scale);
    __syncthreads();
#pragma unroll
    for (int tile = 0; tile < DECODE_WARPS; tile++)
        if (tile < tiles.count) add_tile(p, shared, tile, v + tile * Tile::BYTES, shrinks[tile]);
#pragma unroll
    for (int r = 0; r < 2; r++) p.l[r] = sum_of_row(p.l[r]);
    return p;
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

// When the kernels beside this one run. tail.cu may read what those before this one have left, so it starts once they
// are waited for, here or, as it comes first, in prefix.cu; then what that leaves is waited for at the end alone.
struct Turn {
    bool ahead, last;  // starts the next at once; waits at the end

    __device__ __forceinline__ Turn(int prefixes, int tails) : ahead(!tails || prefixes), last(tails && prefixes) {}
    __device__ __forceinline__ void begin() const {
        if (ahead) start_next_kernel();
    }
    __device__ __forceinline__ void before_reading() const {
        if (!last) wait_for_kernel_before();
        if (!ahead) start_next_kernel();
    }
    __device__ __forceinline__ void end() const {
        if (last) wait_for_kernel_before();
    }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, DECODE_BLOCKS)
    attend_decode(elem* out, float* partials, int* tickets, const elem* q, const char* cache, const int* work,
                  const int* starts, const int* lengths, int prefixes, int tails, const int* tables, int group,
                  int inverse, int num_kv_heads, int table_width, int layer, int num_layers, float scale) {
    extern __shared__ __align__(128) char memory[];
    const Turn turn(prefixes, tails);
    turn.begin();
    const Item item(work, starts, lengths);
    if (item.sequence < 0) return turn.before_reading(), turn.end();
    Rows rows = make_rows(out, q, item.first_row, item.num_rows, item.length - item.num_rows, item.head, group, inverse,
                          num_kv_heads);
    Keys keys = make_keys(cache, tables, item.slot, table_width, item.length, item.head, num_kv_heads, layer,
                          num_layers);
    turn.before_reading();
    Attended p = attend_partial(*(Exchange*)memory, rows, keys, item.which * PARTIAL_KEYS, scale);
    if (item.place < 0) return write_rows(p, rows);
    Places places(partials, item.head, num_kv_heads);
    places.write(p, rows, item.place);
    if (tails) return turn.end();
    merge_at_last(places, item, rows, tickets, num_kv_heads, scale);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attend_ahead(elem* out, float* partials, int* tickets, const elem* q, const char* cache, const int* work,
                 const int* starts, const int* lengths, const int* tables, int group, int inverse, int num_kv_heads,
                 int table_width, int layer, int num_layers, float scale) {
    extern __shared__ __align__(128) char memory[];
    start_next_kernel();
    const Item item(work, starts, lengths);
    if (item.sequence < 0) return wait_for_kernel_before();
    Rows rows = make_rows(out, q, item.first_row, item.num_rows, item.length - item.num_rows, item.head, group, inverse,
                          num_kv_heads);
    Keys keys = make_keys(cache, tables, item.slot, table_width, item.length, item.head, num_kv_heads, layer,
                          num_layers);
    Attended p = attend_ahead_of(*(Exchange*)memory, rows, keys, item.which * PARTIAL_KEYS, scale);
    if (item.place < 0) return write_rows(p, rows);
    Places places(partials, item.head, num_kv_heads);
    places.write(p, rows, item.place);
    merge_at_last(places, item, rows, tickets, num_kv_heads, scale);
}
