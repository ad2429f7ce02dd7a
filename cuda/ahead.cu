// Attention of decode.cu, of so few sequences that their blocks leave much of the card idle: K and V of the steps before
// are on their way while the kernel before still runs, each in a place of its own, and behind its end only what this step
// has added, and q, is waited for.
//
// Arguments, grid, threads and bits are those of decode.cu, without prefixes and tails.
#include "decode.cuh"

namespace {

// K (offset 0) or V of all tiles: rows of keys before `from`, or, OLD false, the others.
template <bool OLD>
__device__ __forceinline__ void load_part(u32 target, const Tiles& tiles, const Keys& keys, u32 offset, int from) {
#pragma unroll
    for (int n = 0; n < DECODE_WARPS; n++) {
        if (n >= tiles.count) break;
        int key = tiles.first + n * TILE_KEYS;
        u32 place = target + n * Tile::BYTES;
        const char* plane = keys.k(tiles.ids[n]) + offset;
        if constexpr (OLD)
            tiles.tile.copy_if(place, plane, key, keys.end, tiles.tile.before(key, from));
        else if (key + TILE_KEYS > from)
            tiles.tile.copy_if(place, plane, key, keys.end, tiles.tile.behind(key, from));
    }
}

// The kernel before is waited for in here.
__device__ __forceinline__ Attended attend_ahead_of(Exchange& shared, const Rows& rows, const Keys& keys, int first,
                                                    float scale) {
    u32 k = shared_address(&shared) + sizeof(Exchange), v = k + DECODE_WARPS * Tile::BYTES;
    int warp = threadIdx.x / WARP, from = rows.position;  // keys of this step
    Tiles tiles(keys, first);
    load_part<true>(k, tiles, keys, 0, from);
    load_part<true>(v, tiles, keys, keys.to_values, from);
    wait_for_kernel_before();
    load_queries<MMA_ROWS>(shared_address(shared.queries), rows);
    tiles.load_scales(shared, keys);
    load_part<false>(k, tiles, keys, 0, from);
    load_part<false>(v, tiles, keys, keys.to_values, from);
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

}  // namespace

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
