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
#include "tile.cuh"

namespace {

constexpr int PREFILL_WARPS = 4;
// Wide heads: two warps share 16 rows, each with all scores and half of the columns of V, so that accumulators fit into
// registers.
constexpr int COLUMN_GROUPS = HEAD_DIM > 128 ? 2 : 1;
constexpr int COLUMNS = HEAD_DIM / COLUMN_GROUPS;
// Tiles of K and of V in shared memory: two, so that the next one comes while this one is worked on, or one, so that
// more blocks fit on a multiprocessor and work while others wait.
constexpr int PREFILL_STAGES = HEAD_DIM <= 64 ? 2 : 1;
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
static_assert(HEAD_DIM % (16 * COLUMN_GROUPS) == 0 && HEAD_DIM <= 256, "head sizes that the fragments cover");

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

// K and V tile by tile through shared memory, in step with the warps that read them.
struct Tiles {
    Tile tile;
    const Keys& keys;
    u32 shared;
    u32 block;  // from which this thread copies next

    // Of K; V lies behind it.
    __device__ u32 place(int key) const { return shared + key / TILE_KEYS % PREFILL_STAGES * 2 * TILE_BYTES; }
    __device__ __forceinline__ void load_k(int key) {
        if (key < keys.end) tile.copy(place(key), keys.k(block), key, keys.end);
        commit_copies();
    }
    __device__ __forceinline__ void load_v(int key) {
        if (key < keys.end) tile.copy(place(key) + TILE_BYTES, keys.v(block), key, keys.end);
        commit_copies();
    }
    __device__ __forceinline__ void start() {
        block = tile.find(keys, 0);
        load_k(0);
        if constexpr (PREFILL_STAGES == 2) load_v(0), block = tile.find(keys, TILE_KEYS);
    }
    // K of the tile is there for all; all are through with the tile before.
    __device__ __forceinline__ void before_scores(int key) {
        wait_for_copies<0>();
        tile.arrived<false>(place(key), key, keys.end);
        if constexpr (PREFILL_STAGES == 2) tile.arrived<true>(place(key) + TILE_BYTES, key, keys.end);
        __syncthreads();
        if constexpr (PREFILL_STAGES == 2) key += TILE_KEYS, load_k(key);
        load_v(key);
        block = tile.find(keys, key + TILE_KEYS);
    }
    // All have read K.
    __device__ __forceinline__ void after_scores(int key) {
        if constexpr (PREFILL_STAGES == 1) {
            __syncthreads();
            load_k(key + TILE_KEYS);
        }
    }
    // V of the tile is there for all.
    __device__ __forceinline__ void before_values(int key) {
        if constexpr (PREFILL_STAGES == 1) {
            wait_for_copies<1>();  // not for the next K
            tile.arrived<true>(place(key) + TILE_BYTES, key, keys.end);
            __syncthreads();
        }
    }
};

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
    Tiles tiles = {{}, keys, query_place + QUERY_BYTES + KEPT_BYTES};
    load_queries<ROWS>(query_place, rows);  // joins the first copies
    tiles.start();
    Total total(shared + QUERY_BYTES);
    for (int first = 0; first < end; first += PARTIAL_KEYS) {
        Partial partial;
        for (int key = first; key < min(first + PARTIAL_KEYS, end); key += TILE_KEYS) {
            Scores s;
            tiles.before_scores(key);
            score_tile<Tile>(s, query_place + warp_row * ROW_BYTES, tiles.place(key),
                             tiles.place(key) + TILE_ROWS_BYTES, key, position, key + TILE_KEYS > first_position + 1);
            tiles.after_scores(key);
            weigh_tile(partial, s, scale);
            tiles.before_values(key);
            add_tile(partial, s, tiles.place(key) + TILE_BYTES, column_group);
        }
        total.merge(partial, scale);
    }
    write_rows(total, rows_of_block(), warp_row, column_group * 16);
}
