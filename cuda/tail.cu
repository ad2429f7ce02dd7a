// Attention of many decoding sequences over their last partials, where decode.cu and prefix.cu have those before; and
// the merge of all.
//
// The formula, rows, q, cache, tables and group are those of prefill.cu, partials and work those of decode.cu; so are
// the bits. Here a warp has a sequence and a KV head to itself: last partials are of any length, and of one with few
// keys decode.cu's four warps would mostly wait for each other.
//
//   work    i32 [num_items, 5] sequence (-1: nothing to do), which of its partials the last one is, its place (unused
//           where there are no others), slot, and what is not read here
//   behind  whether decode.cu or prefix.cu comes right before
//
// Grid (num_items / TAIL_WARPS, rounded up, num_kv_heads), TAIL_WARPS warps. The kernels behind which it comes have
// waited for all before them by the time that this one may start: so it waits for the partials that they leave no
// earlier than it merges, and its blocks fill the card as theirs end.
#include "walk.cuh"

namespace {

constexpr int TAIL_WARPS = HEAD_DIM <= 64 ? 4 : 2;
constexpr int TAIL_BLOCKS = 3;  // on a multiprocessor, as shared memory allows
constexpr int QUERY_BYTES = MMA_ROWS * ROW_BYTES, WARP_BYTES = QUERY_BYTES + 2 * TILE_BYTES;
constexpr int PARTIAL_ROW = HEAD_DIM + 2;  // floats

// A tile that one warp copies and reads, its KV blocks one after another; each is found by some of the lanes.
struct Tile : WideTile<TILE_BLOCKS> {
    typedef WideTile<TILE_BLOCKS> Wide;
    static constexpr int FINDERS = WARP / TILE_BLOCKS;

    static __device__ __forceinline__ void sync() { __syncwarp(); }
    static __device__ __forceinline__ Wide of_block(int n) {
        Wide wide;
        wide.block = n, wide.member = threadIdx.x % WARP;
        return wide;
    }
    __device__ __forceinline__ u32 find(const Keys& keys, int first) const {
        return of_block(threadIdx.x % WARP / FINDERS).find(keys, first);
    }
    __device__ __forceinline__ void copy(u32 target, const char* plane, int first, int end) const {
#pragma unroll
        for (int n = 0; n < TILE_BLOCKS; n++) {
            u64 of_block_n = __shfl_sync(ALL_LANES, (u64)plane, n * FINDERS);
            of_block(n).copy(target, (const char*)of_block_n, first, end);
        }
    }
    template <bool VALUES>
    __device__ __forceinline__ void arrived(u32 target, int first, int end) const {
#pragma unroll
        for (int n = 0; n < TILE_BLOCKS; n++) of_block(n).template arrived<VALUES>(target, first, end);
    }
};

__device__ __forceinline__ void load_own_queries(u32 target, const Rows& rows) {
    for (int i = threadIdx.x % WARP; i < MMA_ROWS * ROW_CHUNKS; i += WARP) {
        int row = i / ROW_CHUNKS, chunk = i % ROW_CHUNKS;
        bool valid = row < rows.count;
        copy_async(target + place_of(row, chunk), rows.q + (valid ? rows.offset(row) + chunk * 8 : 0), valid);
    }
}

// The partials before p in ascending order, `next` floats apart from the first one on, then p, into row g or g + 8.
__device__ __forceinline__ void merge_row(elem* out, const float* partials, size_t next, int before, const Partial& p,
                                          float p_l, int r, float scale) {
    float m = minus_infinity(), l = 0.f, o[COLUMNS / 8][2] = {};
    int own = threadIdx.x % 4 * 2;
#pragma unroll 2
    for (int n = 0; n < before; n++, partials += next) {
        float2 ends = __ldcg((const float2*)(partials + HEAD_DIM));
        MergeWeights w = merge_weights(m, ends.x, scale);
        m = w.m, l = merged(l, ends.y, w);
#pragma unroll
        for (int i = 0; i < COLUMNS / 8; i++) {
            float2 pair = __ldcg((const float2*)(partials + i * 8 + own));
            o[i][0] = merged(o[i][0], pair.x, w), o[i][1] = merged(o[i][1], pair.y, w);
        }
    }
    MergeWeights w = merge_weights(m, p.m[r], scale);
    l = merged(l, p_l, w);
#pragma unroll
    for (int i = 0; i < COLUMNS / 8; i++) {
        float x = merged(o[i][0], p.o[i][2 * r], w), y = merged(o[i][1], p.o[i][2 * r + 1], w);
        *(u32*)(out + i * 8 + own) = pack(normalized(x, l), normalized(y, l));
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(TAIL_WARPS* WARP, TAIL_BLOCKS)
    attend_tail(elem* out, const float* partials, const elem* q, const char* cache, const int* work, int num_items,
                int behind, const int* starts, const int* lengths, const int* tables, int group, int inverse,
                int num_kv_heads, int table_width, int layer, int num_layers, float scale) {
    extern __shared__ __align__(128) char shared[];
    start_next_kernel();
    if (!behind) wait_for_kernel_before();
    int index = blockIdx.x * TAIL_WARPS + threadIdx.x / WARP, head = blockIdx.y, row = threadIdx.x % WARP / 4;
    const int* item = work + min(index, num_items - 1) * 5;
    int sequence = item[0];
    if (index >= num_items || sequence < 0) return wait_for_kernel_before();
    int length = lengths[sequence], first_row = starts[sequence], num_rows = starts[sequence + 1] - first_row;
    int before = item[1], first = before * PARTIAL_KEYS;
    Rows rows = make_rows(out, q, first_row, num_rows, length - num_rows, head, group, inverse, num_kv_heads);
    Keys keys = make_keys(cache, tables, item[3], table_width, length, head, num_kv_heads, layer, num_layers);
    u32 query_place = shared_address(shared) + threadIdx.x / WARP * WARP_BYTES;
    Tiles<Tile, 1> tiles = {{}, keys, query_place + QUERY_BYTES};
    load_own_queries(query_place, rows);  // joins the first copies
    tiles.start(first);
    Partial partial;
    int position[2] = {rows.position_of(row), rows.position_of(row + 8)};
    auto hides = [&](int key) { return key + TILE_KEYS > rows.position + 1; };
    walk_partial(partial, tiles, query_place, first, position, hides, 0, scale, true);
    if (behind) wait_for_kernel_before();
    size_t next = (size_t)num_kv_heads * MMA_ROWS * PARTIAL_ROW;
    const float* others = partials + ((size_t)(item[2] - before) * num_kv_heads + head) * MMA_ROWS * PARTIAL_ROW;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float l = sum_of_row(partial.l[r]);
        if (row + 8 * r >= rows.count) continue;
        merge_row(rows.out + rows.offset(row + 8 * r), others + (row + 8 * r) * PARTIAL_ROW, next, before, partial, l,
                  r, scale);
    }
}
