// What attention reads: query rows, and K and V of a sequence on their way into shared memory, in tiles of 64 keys.
#pragma once
#include "mma.cuh"

constexpr int TILE_KEYS = 64;  // of a tile
constexpr int TILE_BLOCKS = TILE_KEYS / BLOCK_SIZE;
constexpr int MMA_ROWS = 16;
constexpr int ROW_CHUNKS = HEAD_DIM / 8;  // 16-byte pieces of a row
// The 8 rows that ldmatrix takes at once must lie in different banks. Rows of a multiple of 128 bytes: chunks change
// places within each 8, as the row says. Other rows: made an odd number of 16 bytes long.
constexpr bool SWIZZLED = ROW_CHUNKS % 8 == 0;
constexpr int ROW_BYTES = HEAD_DIM * 2 + (SWIZZLED ? 0 : 16);  // of a row in shared memory
constexpr int TILE_BYTES = TILE_KEYS * ROW_BYTES;

// x, with what follows from it computed where it is used: addresses that no loop changes take registers from one tile
// to the next if the compiler knows that.
__device__ __forceinline__ u32 computed_again(u32 x) {
    asm volatile("" : "+r"(x));
    return x;
}

// Of a chunk, from the first row of a tile, which starts at a multiple of 128 bytes.
__device__ __forceinline__ u32 place_of(u32 row, u32 chunk) {
    return row * ROW_BYTES + (SWIZZLED ? chunk ^ row % 8 : chunk) * 16;
}

// The place that lies an even number of chunks further in the row than that of chunk 0 or 1.
__device__ __forceinline__ u32 further(u32 place, u32 chunks) {
    return SWIZZLED ? (place ^ chunks % 8 * 16) + chunks / 8 * 128 : place + chunks * 16;
}

// What a block of threads works on: query rows of one sequence under one KV head. Row r is that of position
// r / group and of head r % group of the group.
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

__device__ __forceinline__ Rows make_rows(elem* out, const elem* q, int first_row, int num_rows, int position, int head,
                                          int num_heads, int num_kv_heads) {
    int group = num_heads / num_kv_heads;
    size_t row_stride = (size_t)num_heads * HEAD_DIM, first = first_row * row_stride + (size_t)head * group * HEAD_DIM;
    return {q + first, out + first, row_stride, group, num_rows * group, position};
}

template <int ROWS>
__device__ __forceinline__ void load_queries(u32 target, const Rows& rows) {
    for (int i = threadIdx.x; i < ROWS * ROW_CHUNKS; i += blockDim.x) {
        int row = i / ROW_CHUNKS, chunk = i % ROW_CHUNKS;
        bool valid = row < rows.count;
        copy_async(target + place_of(row, chunk), rows.q + (valid ? rows.offset(row) + chunk * 8 : 0), valid);
    }
}

// Where K and V of a sequence lie under one KV head: the rows of a block one after another. Offsets in elements, small
// enough for 32 bits but for those of blocks, as registers are few.
struct Keys {
    const elem* cache;
    const int* tables;
    int layer_head, to_values, block_stride;  // from block 0 to K of this layer and head, from K to V, between blocks
    int row;                                  // of the sequence's table, in `tables`
    int end;                                  // keys of the sequence

    __device__ __forceinline__ const elem* k(int block) const {
        return cache + ((size_t)block * block_stride + layer_head);
    }
    __device__ __forceinline__ const elem* v(int block) const { return k(block) + to_values; }
    __device__ __forceinline__ int block(int key) const { return tables[row + key / BLOCK_SIZE]; }  // of a key
};

__device__ __forceinline__ Keys make_keys(const elem* cache, const int* tables, int slot, int table_width, int end,
                                          int head, int num_kv_heads, int layer, int num_layers) {
    int of_head = BLOCK_SIZE * HEAD_DIM, of_half = of_head * num_kv_heads, of_layer = 2 * of_half;
    return {cache, tables, layer * of_layer + head * of_head, of_half, num_layers * of_layer, slot * table_width, end};
}

// A thread's part in copying tiles, which WARPS warps do together: each KV block of a tile has its team of them.
template <int WARPS>
struct Copier {
    static constexpr int TEAM = WARPS * WARP / TILE_BLOCKS, CHUNKS = BLOCK_SIZE * ROW_CHUNKS;
    static constexpr int COPIES = CHUNKS / TEAM;
    static constexpr int UNROLL = COPIES > 8 ? 4 : COPIES;  // the addresses of more take too many registers
    static_assert(WARPS % TILE_BLOCKS == 0, "whole warps to a KV block, so that it is looked up once for all");
    static_assert(CHUNKS % TEAM == 0, "as many copies for each thread");
    u32 block = threadIdx.x / TEAM, chunk = threadIdx.x % TEAM;  // which of the tile's, the first of its chunks

    // The KV block of the tile from key `first` on.
    __device__ __forceinline__ int find(const Keys& keys, int first) const {
        int key = first + (int)block * BLOCK_SIZE;
        return key < keys.end ? keys.block(key) : 0;
    }

    // K or V of that tile to `target`, from its KV block on; zeros from the sequence's end on, for what lies there may
    // be NaN.
    __device__ __forceinline__ void copy(u32 target, const elem* source, int first, int end) const {
        u32 own = computed_again(chunk);
        int left =
            (end - first - (int)block * BLOCK_SIZE) * ROW_CHUNKS - (int)own;  // before the end, from its first on
        target += block * BLOCK_SIZE * ROW_BYTES;
        source += own * ELEMS_PER_16B;
#pragma unroll UNROLL
        for (int n = 0; n < COPIES; n++)
            copy_async(target + place_after(own, n), source + n * TEAM * ELEMS_PER_16B, n * TEAM < left);
    }

    // Of chunk own + n TEAM of a block. Where rows are STEP apart, a power of 2, and the first is less than it, places
    // differ by what is known when this is compiled.
    static __device__ __forceinline__ u32 place_after(u32 own, u32 n) {
        constexpr u32 STEP = TEAM / ROW_CHUNKS;
        if constexpr (TEAM % ROW_CHUNKS == 0 && (STEP & (STEP - 1)) == 0) {
            u32 first = place_of(own / ROW_CHUNKS, own % ROW_CHUNKS);
            return (first ^ (SWIZZLED ? n * STEP % 8 * 16 : 0)) + n * STEP * ROW_BYTES;
        } else {
            u32 i = own + n * TEAM;
            return place_of(i / ROW_CHUNKS, i % ROW_CHUNKS);
        }
    }
};
