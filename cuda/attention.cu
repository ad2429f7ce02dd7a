// Attention of ragged rows over paged K and V, causal and grouped-query: prefill, decode, and the merge of partials.
//
// h[t, i] = sum_j softmax_j(scale q[t, i] . K[j, i / group]) V[j, i / group] over the keys j <= position of row t of
// its own sequence; scale holds 1 / sqrt(HEAD_DIM) and log2(e), as weights are powers of 2. Equals `attention` of
// tinyvllm_cli/backends/cpu/ops.py up to rounding: scores and sums in float32, weights rounded to elem before V.
//
// Query heads of one KV head ride along in the 16 rows of an mma, so K and V are read once for all of them: row r of a
// block is position r / group, head r % group of the group. Row invariance: cuda/tile.cuh says why both kernels give a
// row the same bits. A sequence with at most 16 such rows decodes, others prefill; attention.py lays out the work.
//
//   out      elem [T, num_heads, HEAD_DIM]     q  elem [T, num_heads, HEAD_DIM]
//   cache    elem [blocks, num_layers, 2, num_kv_heads, BLOCK_SIZE, HEAD_DIM]; blocks of a sequence's keys hold finite
//            values up to its length, anything behind it
//   tables   i32 [S, table_width] blocks of each sequence
//   group    num_heads / num_kv_heads, at most 16
//
// Scores stay below 10^7: beyond, what float32 leaves of a score's fraction tells keys apart no more.
#include "tile.cuh"

namespace {

constexpr int PREFILL_WARPS = 4, DECODE_WARPS = COLUMN_GROUPS;
// Least blocks on a multiprocessor, for ptxas (0: its choice): of wider heads it would spill to make it three.
constexpr int PREFILL_BLOCKS = HEAD_DIM <= 64 ? 0 : 2;
// Tiles of K and V in shared memory. Prefill: two, where the portable limit of 99 KB allows it, so that the next tile
// comes while this one is worked on. Decode: one, so that many blocks on a multiprocessor hide each other's waits.
constexpr int PREFILL_STAGES = HEAD_DIM <= 128 ? 2 : 1;
constexpr int DECODE_STAGES = 1;

// What a block of threads works on: up to ROWS query rows of one sequence under one KV head.
struct Rows {
    const elem* q;      // of its first row of T, first head of the group
    elem* out;          // likewise
    size_t row_stride;  // elements from a row of T to the next
    int group;
    int count;     // rows of T times group
    int position;  // of the first row

    __device__ size_t offset(int row) const { return (size_t)(row / group) * row_stride + row % group * HEAD_DIM; }
    // Of a row that is not there: one that sees no key.
    __device__ int position_of(int row) const { return row < count ? position + row / group : -1; }
};

// Where K and V of a sequence lie.
struct Keys {
    const elem* k;  // of this layer and head, block 0
    const elem* v;
    size_t block_stride;
    const int* table;
};

__device__ Keys make_keys(const elem* cache, const int* tables, int sequence, int table_width, int head,
                          int num_kv_heads, int layer, int num_layers) {
    size_t of_head = BLOCK_SIZE * HEAD_DIM, of_half = of_head * num_kv_heads;
    const elem* k = cache + (size_t)layer * 2 * of_half + head * of_head;
    return {k, k + of_half, of_half * 2 * num_layers, tables + (size_t)sequence * table_width};
}

template <int ROWS>
__device__ void load_queries(u32 target, const Rows& rows) {
    for (int i = threadIdx.x; i < ROWS * ROW_CHUNKS; i += blockDim.x) {
        int row = i / ROW_CHUNKS, chunk = i % ROW_CHUNKS;
        bool valid = row < rows.count;
        copy_async(target + row * ROW_BYTES + chunk * 16, rows.q + (valid ? rows.offset(row) + chunk * 8 : 0), valid);
    }
}

// Rows g and g + 8 of this warp, of the columns it owns.
__device__ __forceinline__ void write_rows(const Partial& p, const Rows& rows, int first_row, int first_column) {
    int lane = threadIdx.x % WARP;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = first_row + lane / 4 + 8 * r;
        if (row >= rows.count) continue;
        elem* out = rows.out + rows.offset(row) + first_column + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++)
            *(u32*)(out + n * 8) = pack(normalized(p.o[n][2 * r], p.l[r]), normalized(p.o[n][2 * r + 1], p.l[r]));
    }
}

// Walk keys first .. end - 1 in tiles; at the end of each partial, `take(partial)`.
template <int WARPS, int STAGES, typename Take>
__device__ __forceinline__ void walk(const Rows& rows, const Keys& keys, int first, int end, float scale, Take take) {
    constexpr int THREADS = WARPS * WARP, ROWS = WARPS / COLUMN_GROUPS * MMA_ROWS;
    extern __shared__ __align__(16) unsigned char shared[];
    u32 q = shared_address(shared), tiles = q + ROWS * ROW_BYTES;
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, first_row = warp / COLUMN_GROUPS * MMA_ROWS;
    u32 columns = warp % COLUMN_GROUPS * COLUMNS * sizeof(elem);
    int position[2] = {rows.position_of(first_row + lane / 4), rows.position_of(first_row + lane / 4 + 8)};
    int num_tiles = (end - first + TILE_KEYS - 1) / TILE_KEYS;
    auto place = [&](int tile) { return tiles + tile % STAGES * 2 * TILE_BYTES; };  // of K; V lies behind it
    auto load_k = [&](int tile) {
        if (tile < num_tiles)
            load_tile<THREADS>(place(tile), keys.k, keys.block_stride, keys.table, first + tile * TILE_KEYS, end);
        commit_copies();
    };
    auto load_v = [&](int tile) {
        if (tile < num_tiles)
            load_tile<THREADS>(place(tile) + TILE_BYTES, keys.v, keys.block_stride, keys.table,
                               first + tile * TILE_KEYS, end);
        commit_copies();
    };
    load_queries<ROWS>(q, rows);  // joins the first copies
    load_k(0);
    load_v(0);
    Queries queries(q + first_row * ROW_BYTES);
    Partial partial;
    clear(partial);
    for (int tile = 0; tile < num_tiles; tile++) {
        int key = first + tile * TILE_KEYS;
        bool hides = key + TILE_KEYS > rows.position + 1;
        float s[TILE_KEYS / 8][4];
        if constexpr (STAGES == 1)
            wait_for_copies<1>();  // for K, not yet for V
        else
            wait_for_copies<0>();
        __syncthreads();  // K is there for all; all are through with the tile before
        if (tile == 0) queries.load();
        if constexpr (STAGES == 2) load_k(tile + 1), load_v(tile + 1);
        score_tile(s, queries, place(tile), key, position, hides);
        if constexpr (STAGES == 1) {
            __syncthreads();  // before the place of K is filled again
            load_k(tile + 1);
        }
        weigh(partial, s, scale);
        if constexpr (STAGES == 1) {
            wait_for_copies<1>();  // for V, not for the next K
            __syncthreads();
        }
        add_values(partial, s, place(tile) + TILE_BYTES + columns);
        if constexpr (STAGES == 1) {
            __syncthreads();
            load_v(tile + 1);
        }
        if (tile == num_tiles - 1 || (key + TILE_KEYS) % PARTIAL_KEYS == 0) {
            finish_partial(partial);
            take(partial);
            clear(partial);
        }
    }
}

}  // namespace

// Grid (tiles, num_kv_heads), PREFILL_WARPS warps. work i32 [tiles, 3]: sequence, first row of T, rows of T.
// positions i32 [T]. Partials are merged as they come.
extern "C" __global__ void __launch_bounds__(PREFILL_WARPS* WARP, PREFILL_BLOCKS)
    attend_prefill(elem* out, const elem* q, const elem* cache, const int* work, const int* positions,
                   const int* tables, int num_heads, int num_kv_heads, int table_width, int layer, int num_layers,
                   float scale) {
    const int* item = work + blockIdx.x * 3;
    int sequence = item[0], first_row = item[1], num_rows = item[2], head = blockIdx.y;
    int group = num_heads / num_kv_heads;
    size_t row_stride = (size_t)num_heads * HEAD_DIM, first = first_row * row_stride + (size_t)head * group * HEAD_DIM;
    Rows rows = {q + first, out + first, row_stride, group, num_rows * group, positions[first_row]};
    Keys keys = make_keys(cache, tables, sequence, table_width, head, num_kv_heads, layer, num_layers);
    int end = rows.position + num_rows;
    Partial total;
    clear(total);
    walk<PREFILL_WARPS, PREFILL_STAGES>(rows, keys, 0, end, scale, [&](const Partial& p) { merge(total, p, scale); });
    int warp = threadIdx.x / WARP;
    write_rows(total, rows, warp / COLUMN_GROUPS * MMA_ROWS, warp % COLUMN_GROUPS * COLUMNS);
}

// Grid (items, num_kv_heads), COLUMN_GROUPS warps. work i32 [items, 3]: sequence, which of its partials, where to leave
// it (-1: it is the only one, and the row is done). starts i32 [S + 1] first row of T of each sequence, lengths i32
// [S]. partials f32 [places, num_kv_heads, 16, HEAD_DIM + 2]: o, m, l of each row that there is. A sequence of -1 is
// nothing to do.
extern "C" __global__ void __launch_bounds__(DECODE_WARPS* WARP)
    attend_decode(elem* out, float* partials, const elem* q, const elem* cache, const int* work, const int* starts,
                  const int* lengths, const int* tables, int num_heads, int num_kv_heads, int table_width, int layer,
                  int num_layers, float scale) {
    const int* item = work + blockIdx.x * 3;
    int sequence = item[0], which = item[1], place = item[2], head = blockIdx.y;
    if (sequence < 0) return;  // padding of a captured launch
    int first_row = starts[sequence], num_rows = starts[sequence + 1] - first_row, length = lengths[sequence];
    int group = num_heads / num_kv_heads;
    size_t row_stride = (size_t)num_heads * HEAD_DIM, first = first_row * row_stride + (size_t)head * group * HEAD_DIM;
    Rows rows = {q + first, out + first, row_stride, group, num_rows * group, length - num_rows};
    Keys keys = make_keys(cache, tables, sequence, table_width, head, num_kv_heads, layer, num_layers);
    int begin = which * PARTIAL_KEYS, end = min(begin + PARTIAL_KEYS, length);
    int column = threadIdx.x / WARP * COLUMNS, lane = threadIdx.x % WARP;
    walk<DECODE_WARPS, DECODE_STAGES>(rows, keys, begin, end, scale, [&](const Partial& p) {
        if (place < 0) return write_rows(p, rows, 0, column);
        float* target = partials + ((size_t)place * num_kv_heads + head) * MMA_ROWS * (HEAD_DIM + 2);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (lane / 4 + 8 * r >= rows.count) continue;
            float* row = target + (lane / 4 + 8 * r) * (HEAD_DIM + 2);
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; n++)
                *(float2*)(row + column + n * 8 + lane % 4 * 2) = make_float2(p.o[n][2 * r], p.o[n][2 * r + 1]);
            if (column == 0 && lane % 4 == 0) row[HEAD_DIM] = p.m[r], row[HEAD_DIM + 1] = p.l[r];
        }
    });
}

// Grid (sequences with several partials, num_kv_heads), 128 threads. work i32 [., 3]: sequence, place of its first
// partial, how many.
extern "C" __global__ void __launch_bounds__(128)
    merge_partials(elem* out, const float* partials, const int* work, const int* starts, int num_heads,
                   int num_kv_heads, float scale) {
    const int* item = work + blockIdx.x * 3;
    int sequence = item[0], place = item[1], count = item[2], head = blockIdx.y, group = num_heads / num_kv_heads;
    if (sequence < 0) return;
    int first_row = starts[sequence], num_rows = starts[sequence + 1] - first_row;
    constexpr int ROW = HEAD_DIM + 2;
    size_t next = (size_t)num_kv_heads * MMA_ROWS * ROW;
    const float* first = partials + place * next + (size_t)head * MMA_ROWS * ROW;
    for (int i = threadIdx.x; i < num_rows * group * HEAD_DIM; i += blockDim.x) {
        int row = i / HEAD_DIM, column = i % HEAD_DIM;
        const float* p = first + row * ROW;
        float m = minus_infinity(), l = 0.f, o = 0.f;
        for (int n = 0; n < count; n++, p += next) {
            MergeWeights w = merge_weights(m, p[HEAD_DIM], scale);
            m = w.m;
            l = merged(l, p[HEAD_DIM + 1], w);
            o = merged(o, p[column], w);
        }
        int t = first_row + row / group, query_head = head * group + row % group;
        out[((size_t)t * num_heads + query_head) * HEAD_DIM + column] = from_float(normalized(o, l));
    }
}
