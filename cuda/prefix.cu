// Attention of decoding rows over the partials that their sequences have in common: K and V are read once for all.
//
// The formula, q, cache, tables and group are those of prefill.cu, partials those of decode.cu, which comes
// next: it has the other partials of a sequence, and merges all. Bits are those that decode.cu would give: tile.cuh
// says why neither a row's place among the 16 of an mma nor how the tiles of a partial are walked shows in any.
//
//   partials  f32 [places, num_kv_heads, 16, HEAD_DIM + 2] o, m, l of each row, where its member says
//   work      i32 [items, 4] the first of its members, how many (-1: nothing to do), which partial of their sequences,
//             slot of one of those; every member sees all keys of the partial
//   members   i32 [., 2] row of T; 16 times the place of the first partial of its sequence, plus the first of its rows
//             there, one for each head of the group
//
// Grid (items, num_kv_heads), PREFIX_WARPS warps, each with 16 query rows of what members follow one another.
#include "walk.cuh"

namespace {

constexpr int PREFIX_WARPS = 4;
constexpr int PREFIX_BLOCKS = HEAD_DIM <= 64 ? 4 : HEAD_DIM <= 128 ? 3 : 2;  // on a multiprocessor
constexpr int THREADS = PREFIX_WARPS * WARP, ROWS = PREFIX_WARPS / COLUMN_GROUPS * MMA_ROWS;
constexpr int QUERY_BYTES = ROWS * ROW_BYTES;
constexpr int PARTIAL_ROW = HEAD_DIM + 2;  // floats

typedef WideTile<PREFIX_WARPS> Tile;

// Query rows of a block: row r is that of member r / group and of head r % group of the group.
struct Members {
    const int* of_item;
    int count, group, inverse;  // as Rows has them
    int head, num_kv_heads;

    __device__ __forceinline__ int member_of(int row) const { return row * inverse >> 16; }
    __device__ __forceinline__ size_t query(int row) const {
        int member = member_of(row);
        u32 first = (u32)of_item[2 * member] * num_kv_heads + head;
        return ((size_t)first * group + (u32)(row - member * group)) * HEAD_DIM;
    }
    // Where a row's partial lies in the workspace.
    __device__ __forceinline__ size_t target(int row, int which) const {
        int member = member_of(row), first = of_item[2 * member + 1];
        u32 place = (u32)(first / MMA_ROWS + which) * num_kv_heads + head;
        return ((size_t)place * MMA_ROWS + (u32)(first % MMA_ROWS + row - member * group)) * PARTIAL_ROW;
    }
};

__device__ __forceinline__ void load_queries(u32 target, const elem* q, const Members& members) {
    for (int i = threadIdx.x; i < ROWS * ROW_CHUNKS; i += THREADS) {
        int row = i / ROW_CHUNKS, chunk = i % ROW_CHUNKS;
        bool valid = row < members.count;
        copy_async(target + place_of(row, chunk), q + (valid ? members.query(row) + chunk * 8 : 0), valid);
    }
}

__device__ __forceinline__ void write_partial(float* partials, const Partial& p, const Members& members, int which,
                                              int first_row, int column_group) {
    int lane = threadIdx.x % WARP;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = first_row + lane / 4 + 8 * r;
        float l = sum_of_row(p.l[r]);
        if (row >= members.count) continue;
        float* target = partials + members.target(row, which);
        float* columns = target + column_group * 16 + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++)
            *(float2*)(columns + n * 8) = make_float2(p.o[n][2 * r], p.o[n][2 * r + 1]);
        if (column_group == 0 && lane % 4 == 0) target[HEAD_DIM] = p.m[r], target[HEAD_DIM + 1] = l;
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, PREFIX_BLOCKS)
    attend_prefix(float* partials, const elem* q, const char* cache, const int* work, const int* members,
                  const int* tables, int group, int inverse, int num_kv_heads, int table_width, int layer,
                  int num_layers, float scale) {
    extern __shared__ __align__(128) char shared[];
    wait_for_kernel_before();
    start_next_kernel();  // not before: tail.cu reads what the kernels before this one have left
    const int* item = work + blockIdx.x * 4;
    if (item[1] <= 0) return;
    int warp = threadIdx.x / WARP, first = item[2] * PARTIAL_KEYS, end = first + PARTIAL_KEYS;
    int warp_row = warp / COLUMN_GROUPS * MMA_ROWS, column_group = warp % COLUMN_GROUPS * (COLUMNS / 16);
    // Read again at the end, as registers are few.
    auto members_of_block = [&] {
        const int* item = work + blockIdx.x * 4;
        return Members{members + item[0] * 2, item[1] * group, group, inverse, (int)blockIdx.y, num_kv_heads};
    };
    Keys keys = make_keys(cache, tables, item[3], table_width, end, blockIdx.y, num_kv_heads, layer, num_layers);
    u32 query_place = shared_address(shared);
    Tiles<Tile, STAGES> tiles = {{}, keys, query_place + QUERY_BYTES};
    load_queries(query_place, q, members_of_block());  // joins the first copies
    tiles.start(first);
    Partial partial;
    const int anywhere[2] = {end, end};
    auto hides = [](int) { return false; };
    walk_partial(partial, tiles, query_place + warp_row * ROW_BYTES, first, anywhere, hides, column_group, scale,
                 warp_row < item[1] * group);
    write_partial(partials, partial, members_of_block(), work[blockIdx.x * 4 + 2], warp_row, column_group);
}
