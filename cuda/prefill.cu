// Attention of many rows of a sequence over its paged K and V, causal and grouped-query.
//
// h[t, i] = sum_j softmax_j(scale q[t, i] . K[j, i / group]) V[j, i / group] over the keys j <= position of row t of
// its own sequence; scale holds 1 / sqrt(HEAD_DIM) and log2(e), as weights are powers of 2. Equals `attention` of
// tinyvllm_cli/backends/cpu/ops.py up to rounding: scores and sums in float32, weights rounded before V: to elem, or
// over FP8, times the scales of V, to fp16.
//
// Query heads of one KV head ride along in the 16 rows of an mma, so K and V are read once for all of them: row r of a
// block is position r / group, head r % group of the group. Row invariance: tile.cuh says why a row has the same bits
// here and in decode.cu, which takes sequences with at most 16 such rows; attention.py lays out the work.
//
//   out        elem [T, num_heads, HEAD_DIM]     q  elem [T, num_heads, HEAD_DIM], or fp16 as rope_write.cu says
//   cache      planes of kv.cuh [blocks, num_layers, 2, num_kv_heads]; a sequence's blocks hold finite values up to its
//              length, anything behind it
//   work       i32 [tiles, 4] sequence, first row of T, rows of T, slot
//   positions  i32 [T]
//   tables     i32 [slots, table_width] blocks of the sequence in each slot
//   group      num_heads / num_kv_heads, at most 16; inverse: 2^16 / group, rounded up
//
// Scores stay below 10^7: beyond, what float32 leaves of a score's fraction tells keys apart no more.
//
// Grid (tiles, num_kv_heads), PREFILL_WARPS warps. Each warp walks all keys for 16 rows and merges partials as they
// come; K and V pass through shared memory, for all warps of the block.
#include "walk.cuh"

namespace {

constexpr int PREFILL_WARPS = 4;
// Of the merged partials, columns of 8 that lie in shared memory, where they are touched once a partial: registers
// would not be enough for PREFILL_BLOCKS blocks on a multiprocessor.
constexpr int KEPT_COLUMNS = HEAD_DIM <= 64 ? COLUMNS / 8 : HEAD_DIM <= 128 ? COLUMNS / 8 - 3 : 0;
#if __CUDA_ARCH__ >= 1000  // needs more registers for the same
constexpr int PREFILL_BLOCKS = HEAD_DIM <= 64 ? 3 : 2;
#else
constexpr int PREFILL_BLOCKS = HEAD_DIM <= 64 ? 4 : HEAD_DIM <= 128 ? 3 : 2;
#endif

typedef WideTile<PREFILL_WARPS> Tile;

constexpr int THREADS = PREFILL_WARPS * WARP, ROWS = PREFILL_WARPS / COLUMN_GROUPS * MMA_ROWS;
constexpr int QUERY_BYTES = ROWS * ROW_BYTES, KEPT_BYTES = KEPT_COLUMNS * THREADS * sizeof(float4);

// Partials so far, merged.
struct Total {
    float m[2], l[2], o[COLUMNS / 8][4];
    float4* kept;  // this thread's, in shared memory: the first KEPT_COLUMNS of o

    __device__ __forceinline__ explicit Total(char* shared) : kept((float4*)shared + threadIdx.x) {
#pragma unroll
        for (int r = 0; r < 2; r++) m[r] = minus_infinity(), l[r] = 0.f;
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++) put(n, make_float4(0.f, 0.f, 0.f, 0.f));
    }
    __device__ __forceinline__ float4 get(int n) const {
        if (n < KEPT_COLUMNS) return kept[n * THREADS];
        return make_float4(o[n][0], o[n][1], o[n][2], o[n][3]);
    }
    __device__ __forceinline__ void put(int n, float4 x) {
        if (n < KEPT_COLUMNS)
            kept[n * THREADS] = x;
        else
            o[n][0] = x.x, o[n][1] = x.y, o[n][2] = x.z, o[n][3] = x.w;
    }
    // And then p, which is at its end.
    __device__ __forceinline__ void merge(const Partial& p, float scale) {
        MergeWeights w[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            w[r] = merge_weights(m[r], p.m[r], scale);
            m[r] = w[r].m;
            l[r] = merged(l[r], sum_of_row(p.l[r]), w[r]);
        }
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++) {
            float4 x = get(n);
            put(n, make_float4(merged(x.x, p.o[n][0], w[0]), merged(x.y, p.o[n][1], w[0]), merged(x.z, p.o[n][2], w[1]),
                               merged(x.w, p.o[n][3], w[1])));
        }
    }
};

__device__ __forceinline__ void write_rows(const Total& total, const Rows& rows, int first_row, int first_column) {
    int lane = threadIdx.x % WARP;
    bool low = first_row + lane / 4 < rows.count, high = first_row + lane / 4 + 8 < rows.count;
    elem* out = rows.out + first_column + lane % 4 * 2;
    elem* out_low = out + rows.offset(first_row + lane / 4);
    elem* out_high = out + rows.offset(first_row + lane / 4 + 8);
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; n++) {
        float4 o = total.get(n);
        if (low) *(u32*)(out_low + n * 8) = pack(normalized(o.x, total.l[0]), normalized(o.y, total.l[0]));
        if (high) *(u32*)(out_high + n * 8) = pack(normalized(o.z, total.l[1]), normalized(o.w, total.l[1]));
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, PREFILL_BLOCKS)
    attend_prefill(elem* out, const elem* q, const char* cache, const int* work, const int* positions,
                   const int* tables, int group, int inverse, int num_kv_heads, int table_width, int layer,
                   int num_layers, float scale) {
    extern __shared__ __align__(128) char shared[];
    start_next_kernel();
    wait_for_kernel_before();
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    int warp_row = warp / COLUMN_GROUPS * MMA_ROWS, column_group = warp % COLUMN_GROUPS * (COLUMNS / 16);
    // Read again at the end, as registers are few.
    auto rows_of_block = [&] {
        const int* item = work + blockIdx.x * 4;
        return make_rows(out, q, item[1], item[2], positions[item[1]], blockIdx.y, group, inverse, num_kv_heads);
    };
    Rows rows = rows_of_block();
    const int* item = work + blockIdx.x * 4;
    int first_position = rows.position, end = first_position + item[2];
    int position[2] = {rows.position_of(warp_row + lane / 4), rows.position_of(warp_row + lane / 4 + 8)};
    Keys keys = make_keys(cache, tables, item[3], table_width, end, blockIdx.y, num_kv_heads, layer, num_layers);
    u32 query_place = shared_address(shared);
    Tiles<Tile, STAGES> tiles = {{}, keys, query_place + QUERY_BYTES + KEPT_BYTES};
    load_queries<ROWS>(query_place, rows);  // joins the first copies
    tiles.start(0);
    Total total(shared + QUERY_BYTES);
    auto hides = [&](int key) { return key + TILE_KEYS > first_position + 1; };
    for (int first = 0; first < end; first += PARTIAL_KEYS) {
        Partial partial;
        walk_partial(partial, tiles, query_place + warp_row * ROW_BYTES, first, position, hides, column_group, scale,
                     true);
        total.merge(partial, scale);
    }
    write_rows(total, rows_of_block(), warp_row, column_group * 16);
}
