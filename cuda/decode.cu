// Attention of a few rows of a sequence over its paged K and V: decoding, drafts.
//
// The formula, rows, out, q, cache, tables and group are those of prefill.cu; so are the bits of every row: decode.cuh
// says how a block comes to them. K and V are on their way in one piece.
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
// Grid (items, num_kv_heads), DECODE_WARPS warps. Without tails the last block of a sequence and head to come to its end
// merges all partials in ascending order: which block that is shows in no bit. With tails partials are left to that.
#include "decode.cuh"

namespace {

// Tiles of K or V that are in shared memory at once.
constexpr int TILES_AT_ONCE = Tile::BYTES > (16 << 10) ? 2 : DECODE_WARPS, ROUNDS = DECODE_WARPS / TILES_AT_ONCE;
// Least on a multiprocessor, for ptxas: left alone it takes other numbers of registers, too many or so few that it
// spills.
#if __CUDA_ARCH__ >= 1000  // needs more registers for the same
constexpr int DECODE_BLOCKS = 4;
#else
constexpr int DECODE_BLOCKS = Tile::BYTES <= 4096 ? 8 : Tile::BYTES <= 8192 ? 5 : 4;
#endif

// K (offset 0) or V of a round's tiles.
__device__ __forceinline__ void load_tiles(u32 target, const Tiles& tiles, const Keys& keys, u32 offset, int round) {
#pragma unroll
    for (int i = 0; i < TILES_AT_ONCE; i++) {
        int n = round * TILES_AT_ONCE + i;
        if (n >= tiles.count) break;
        tiles.tile.copy(target + i * Tile::BYTES, keys.k(tiles.ids[n]) + offset, tiles.first + n * TILE_KEYS, keys.end);
    }
    commit_copies();
}

// The scores of all warps, K coming to `place`, which has been read at the return.
__device__ __forceinline__ void score_partial(Scores& s, Exchange& shared, u32 place, const Rows& rows,
                                              const Keys& keys, const Tiles& tiles) {
    int warp = threadIdx.x / WARP;
    load_queries<MMA_ROWS>(shared_address(shared.queries), rows);  // joins the first copies
    tiles.load_scales(shared, keys);
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
        load_tiles(place, tiles, keys, 0, round);
        wait_for_copies<0>();
        tiles.clear_scales(shared, keys);
        __syncthreads();
        if (warp / TILES_AT_ONCE == round && warp < tiles.count)
            score_own(s, shared, place + warp % TILES_AT_ONCE * Tile::BYTES, rows, tiles);
        __syncthreads();
    }
}

__device__ __forceinline__ Attended attend_partial(Exchange& shared, const Rows& rows, const Keys& keys, int first,
                                                   float scale) {
    u32 place = shared_address(&shared) + sizeof(Exchange);  // of K and then of V: so more blocks have room
    Tiles tiles(keys, first);
    Scores s;
    score_partial(s, shared, place, rows, keys, tiles);
    load_tiles(place, tiles, keys, keys.to_values, 0);
    Attended p;
    Shrinks shrinks;
    weigh_partial(p, shrinks, s, shared, tiles, scale);
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
        if (round > 0) {
            __syncthreads();  // before the place of V is filled again
            load_tiles(place, tiles, keys, keys.to_values, round);
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
