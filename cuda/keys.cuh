// What attention reads: query rows, and K and V of a sequence on their way into shared memory, in tiles of 64 keys.
#pragma once
#include "kv.cuh"
#include "mma.cuh"

constexpr int TILE_KEYS = 64;  // of a tile
constexpr int TILE_BLOCKS = TILE_KEYS / BLOCK_SIZE;
constexpr int MMA_ROWS = 16;
constexpr int ROW_CHUNKS = HEAD_DIM / 8;  // 16-byte pieces of a row
// The 8 rows that ldmatrix takes at once must lie in different banks. Rows of a multiple of 128 bytes: chunks change
// places within each 8, as the row says. Other rows: made an odd number of 16 bytes long.
constexpr bool SWIZZLED = ROW_CHUNKS % 8 == 0;
constexpr int ROW_BYTES = HEAD_DIM * 2 + (SWIZZLED ? 0 : 16);  // of a row in shared memory
// Of a tile in shared memory: its rows, and in FP8 their scales.
constexpr int TILE_ROWS_BYTES = TILE_KEYS * ROW_BYTES, TILE_SCALES_BYTES = TILE_KEYS * SCALE_BYTES;
constexpr int TILE_BYTES = TILE_ROWS_BYTES + TILE_SCALES_BYTES;

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
    const elem* q;   // of its first row of T, first head of the group
    elem* out;       // likewise
    u32 row_stride;  // elements from a row of T to the next
    int group;
    int inverse;   // 2^16 / group, rounded up: rows are divided by group in every kernel
    int count;     // rows of T times group
    int position;  // of the first row

    // row / group: less than 2^8 divided by at most 16, for which this is exact.
    __device__ int row_of_step(int row) const { return row * inverse >> 16; }
    __device__ size_t offset(int row) const {
        u32 of_step = row_of_step(row);
        return (size_t)of_step * (row_stride - group * HEAD_DIM) + (u32)row * HEAD_DIM;
    }
    // Of a row that is not there: one that sees no key.
    __device__ int position_of(int row) const { return row < count ? position + row_of_step(row) : -1; }
};

__device__ __forceinline__ Rows make_rows(elem* out, const elem* q, int first_row, int num_rows, int position, int head,
                                          int group, int inverse, int num_kv_heads) {
    u32 of_group = group * HEAD_DIM, row_stride = of_group * num_kv_heads;
    size_t first = (size_t)(u32)first_row * row_stride + (u32)head * of_group;
    return {q + first, out + first, row_stride, group, inverse, num_rows * group, position};
}

template <int ROWS>
__device__ __forceinline__ void load_queries(u32 target, const Rows& rows) {
    for (int i = threadIdx.x; i < ROWS * ROW_CHUNKS; i += blockDim.x) {
        int row = i / ROW_CHUNKS, chunk = i % ROW_CHUNKS;
        bool valid = row < rows.count;
        copy_async(target + place_of(row, chunk), rows.q + (valid ? rows.offset(row) + chunk * 8 : 0), valid);
    }
}

// Where K and V of a sequence lie under one KV head: a plane of each block. Offsets in bytes, small enough for 32 bits
// but for those of blocks, as registers are few; without a sign, so that an address is one multiplication.
struct Keys {
    const char* cache;
    const int* tables;
    u32 layer_head, to_values, block_stride;  // from block 0 to K of this layer and head, from K to V, between blocks
    u32 row;                                  // of the sequence's table, in `tables`
    int end;                                  // keys of the sequence

    __device__ __forceinline__ const char* k(u32 block) const {
        return cache + ((size_t)block * block_stride + layer_head);
    }
    __device__ __forceinline__ const char* v(u32 block) const { return k(block) + to_values; }
    __device__ __forceinline__ u32 block(int key) const { return tables[row + (u32)key / BLOCK_SIZE]; }  // of a key
};

__device__ __forceinline__ Keys make_keys(const char* cache, const int* tables, int slot, int table_width, int end,
                                          int head, int num_kv_heads, int layer, int num_layers) {
    u32 of_half = PLANE_BYTES * num_kv_heads, of_layer = 2 * of_half,
        layer_head = layer * of_layer + head * PLANE_BYTES;
    return {cache, tables, layer_head, of_half, num_layers * of_layer, (u32)slot * table_width, end};
}

// A thread's part in copying tiles, which WARPS warps do together: each KV block of a tile has its team of them.
template <int WARPS>
struct Team {
    static constexpr int SIZE = WARPS * WARP / TILE_BLOCKS;
    static constexpr int ROW_PIECES = KV_ROW_BYTES / 16, PIECES = BLOCK_SIZE * ROW_PIECES;  // of 16 bytes in the cache
    static constexpr int COPIES = (PIECES + SIZE - 1) / SIZE;
    static constexpr int UNROLL = COPIES > 8 ? 4 : COPIES;  // the addresses of more take too many registers
    static_assert(WARPS % TILE_BLOCKS == 0, "whole warps to a KV block, so that it is looked up once for all");
    u32 block = threadIdx.x / SIZE, member = threadIdx.x % SIZE;  // which block of the tile's

    // All that copy and read tiles together wait for each other.
    static __device__ __forceinline__ void sync() { __syncthreads(); }

    // The KV block of the tile from key `first` on.
    __device__ __forceinline__ u32 find(const Keys& keys, int first) const {
        int key = first + (int)block * BLOCK_SIZE;
        return key < keys.end ? keys.block(key) : 0;
    }

    // Rows of that block before the sequence's end.
    __device__ __forceinline__ int rows_left(int first, int end) const { return end - first - (int)block * BLOCK_SIZE; }

    // What copy_if wants of rows before key `from`, or of the others.
    __device__ __forceinline__ auto before(int first, int from) const {
        int pieces = rows_left(first, from) * ROW_PIECES - (int)member;
        return [pieces](int n) { return n < pieces; };
    }
    __device__ __forceinline__ auto behind(int first, int from) const {
        int pieces = rows_left(first, from) * ROW_PIECES - (int)member;
        return [pieces](int n) { return n >= pieces; };
    }

#ifdef KV_FP8
    static_assert(SIZE == WARP, "a warp sees what it has copied once all of it has waited");

    // A piece of 16 bytes of that block's scales to those of the tile.
    __device__ __forceinline__ void copy_scales(u32 scales, const char* plane, int first, int end, u32 piece) const {
        bool valid = (int)piece * 16 / SCALE_BYTES < rows_left(first, end);
        copy_async(scales + block * SCALES_BYTES + piece * 16, plane + CODES_BYTES + piece * 16, valid);
    }

    // Zeros from the sequence's end on, once they have come: what lies there may be NaN.
    __device__ __forceinline__ void clear_scales(u32 scales, int first, int end) const {
        int left = rows_left(first, end);
        if (left >= BLOCK_SIZE) return;
        __syncwarp();
        if (member < BLOCK_SIZE && (int)member >= left)
            store_shared(scales + block * SCALES_BYTES + member * SCALE_BYTES, (unsigned short)0);
    }
#endif
};

// A tile of K or V as rows of what the mma takes, and how they come there.
template <int WARPS>
struct WideTile : Team<WARPS> {
    typedef Team<WARPS> T;
    static constexpr int BYTES = TILE_BYTES;

    // Where this lane finds chunk 0 or 1 of 16 keys.
    static __device__ __forceinline__ u32 key_place(u32 k) {
        int lane = threadIdx.x % WARP;
        return k + place_of(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    }
    // K's columns from 16 d on of the keys from 32 n on, for an mma with each 8 of them.
    static __device__ __forceinline__ void load_keys(u32 (&b)[4][2], u32 key_place, int n, int d) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 r[4];
            load_matrices(r, further(key_place, 2 * d) + (2 * n + half) * 16 * ROW_BYTES);
            b[2 * half][0] = r[0], b[2 * half][1] = r[1], b[2 * half + 1][0] = r[2], b[2 * half + 1][1] = r[3];
        }
    }
    // Where this lane finds V's columns from 16 * group on of the first 16 keys.
    static __device__ __forceinline__ u32 value_place(u32 v, int group) {
        int lane = threadIdx.x % WARP;
        return v + further(place_of(lane % 16, lane / 16), 2 * group);
    }
    // Of the keys from 16 k on, for an mma with each 8 columns.
    static __device__ __forceinline__ void load_values(u32 (&b)[2][2], u32 value_place, int k) {
        u32 r[4];
        load_matrices_transposed(r, value_place + k * 16 * ROW_BYTES);
        b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
    }
    static constexpr bool NEIGHBOURS_IN_ONE = true;  // columns of V, of the two that load_values gives

#ifdef KV_FP8
    static constexpr u32 BEFORE_CODES = BLOCK_SIZE * ROW_BYTES - CODES_BYTES;

    // From its plane on, to `target`: codes as they are, to the end of where their rows are to stand; zeros from the
    // sequence's end on.
    __device__ __forceinline__ void copy(u32 target, const char* plane, int first, int end) const {
        u32 own = computed_again(T::member);
        int left = T::rows_left(first, end) * T::ROW_PIECES - (int)own;
        const char* source = plane + own * 16;
        u32 codes = target + T::block * BLOCK_SIZE * ROW_BYTES + BEFORE_CODES + own * 16;
#pragma unroll T::UNROLL
        for (int n = 0; n < T::COPIES; n++)
            if (T::PIECES % T::SIZE == 0 || own + n * T::SIZE < T::PIECES)
                copy_async(codes + n * T::SIZE * 16, source + n * T::SIZE * 16, n * T::SIZE < left);
        if (own < SCALES_BYTES / 16) T::copy_scales(target + TILE_ROWS_BYTES, plane, first, end, own);
    }

    // Rows of fp16 from what this warp has copied and waited for; those of K in the order of q: of each 4 columns the
    // first two stand in the first half of 16. Rows are written in order, and so only where codes were that have been
    // read.
    template <bool VALUES>
    __device__ __forceinline__ void arrived(u32 target, int first, int end) const {
        T::clear_scales(target + TILE_ROWS_BYTES, first, end);
        target += T::block * BLOCK_SIZE * ROW_BYTES;
        __syncwarp();
#pragma unroll T::COPIES> 2 ? 1 : T::COPIES  // as scores and sums are in registers too
        for (u32 n = 0; n < T::COPIES; n++) {
            u32 i = computed_again(T::member) + n * T::SIZE, row = i / T::ROW_PIECES, chunk = i % T::ROW_PIECES * 2;
            bool there = T::PIECES % T::SIZE == 0 || i < T::PIECES;
            uint4 c, low, high;
            if (there) c = load_shared(target + BEFORE_CODES + i * 16);
            __syncwarp();
            if (!there) continue;
            halves_of(low.x, high.x, c.x), halves_of(low.y, high.y, c.y);
            halves_of(low.z, high.z, c.z), halves_of(low.w, high.w, c.w);
            uint4 left = VALUES ? make_uint4(low.x, high.x, low.y, high.y) : low;
            uint4 right = VALUES ? make_uint4(low.z, high.z, low.w, high.w) : high;
            store_shared(target + place_of(row, chunk), left);
            store_shared(target + place_of(row, chunk + 1), right);
        }
    }
#else
    static_assert(T::PIECES % T::SIZE == 0, "as many copies for each thread");

    // From its plane on, to `target`; zeros from the sequence's end on, for what lies there may be NaN.
    __device__ __forceinline__ void copy(u32 target, const char* plane, int first, int end) const {
        copy_if(target, plane, first, end, [](int) { return true; });
    }

    // Of that those rows that are wanted: wanted(n SIZE), a piece's number from this thread's first one on.
    template <typename Wanted>
    __device__ __forceinline__ void copy_if(u32 target, const char* plane, int first, int end, Wanted wanted) const {
        u32 own = computed_again(T::member);
        int left = T::rows_left(first, end) * T::ROW_PIECES - (int)own;  // before the end, from its first on
        const char* source = plane + own * 16;
        target += T::block * BLOCK_SIZE * ROW_BYTES;
#pragma unroll T::UNROLL
        for (int n = 0; n < T::COPIES; n++)
            if (wanted(n * T::SIZE))
                copy_async(target + place_after(own, n), source + n * T::SIZE * 16, n * T::SIZE < left);
    }

    // Of piece own + n SIZE of a block. Where rows are STEP apart, a power of 2, and the first is less than it, places
    // differ by what is known when this is compiled.
    static __device__ __forceinline__ u32 place_after(u32 own, u32 n) {
        constexpr u32 STEP = T::SIZE / T::ROW_PIECES;
        if constexpr (T::SIZE % T::ROW_PIECES == 0 && (STEP & (STEP - 1)) == 0) {
            u32 first = place_of(own / T::ROW_PIECES, own % T::ROW_PIECES);
            return (first ^ (SWIZZLED ? n * STEP % 8 * 16 : 0)) + n * STEP * ROW_BYTES;
        } else {
            u32 i = own + n * T::SIZE;
            return place_of(i / T::ROW_PIECES, i % T::ROW_PIECES);
        }
    }

    // Rows stand as they were copied.
    template <bool VALUES>
    __device__ __forceinline__ void arrived(u32, int, int) const {}
#endif
};

#ifdef KV_FP8
// A tile of codes, which become fp16 on their way into registers: for warps that are the only ones to read them.
// Columns 4 t .. 4 t + 3 of K stand where the mma has 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, as in the rows of WideTile.
template <int WARPS>
struct CodeTile : Team<WARPS> {
    typedef Team<WARPS> T;
    static constexpr u32 P = T::ROW_PIECES;
    // As for rows of elem: pieces change places, or rows are an odd number of pieces long.
    static constexpr bool MIXED = (P & (P - 1)) == 0;
    static constexpr u32 ROW = MIXED ? P * 16 : (P | 1) * 16;
    static constexpr int BYTES = TILE_KEYS * ROW;

    static __device__ __forceinline__ u32 mix(u32 row) { return MIXED ? row * P / 8 % (P < 8 ? P : 8) * 16 : 0; }
    static __device__ __forceinline__ u32 place(u32 row, u32 piece) { return piece_of(row * ROW + mix(row), piece); }
    static __device__ __forceinline__ u32 piece_of(u32 first, u32 piece) {
        return MIXED ? (first ^ piece % 8 * 16) + piece / 8 * 128 : first + piece * 16;
    }

    // As WideTile has them.
    static __device__ __forceinline__ u32 key_place(u32 k) { return k + place(threadIdx.x % WARP, 0); }
    static __device__ __forceinline__ void load_keys(u32 (&b)[4][2], u32 key_place, int n, int d) {
        u32 r[4];
        load_matrices(r, piece_of(key_place, d) + n * 32 * ROW);
#pragma unroll
        for (int i = 0; i < 4; i++) halves_of(b[i][0], b[i][1], r[i]);
    }
    static __device__ __forceinline__ u32 value_place(u32 v, int group) {
        return piece_of(v + place(threadIdx.x % 16, 0), group);
    }
    // A matrix's numbers are pairs of codes: of its transpose a lane gets those of two keys, for two columns. The first
    // mma has the even columns.
    static __device__ __forceinline__ void load_values(u32 (&b)[2][2], u32 value_place, int k) {
        u32 r[2];
        load_matrices_transposed(r, value_place + k * 16 * ROW);
#pragma unroll
        for (int i = 0; i < 2; i++) halves_of(b[0][i], b[1][i], __byte_perm(r[i], 0, 0x3120));  // by column
    }
    static constexpr bool NEIGHBOURS_IN_ONE = false;

    __device__ __forceinline__ void copy(u32 target, const char* plane, int first, int end) const {
        copy_if(target, plane, first, end, [](int) { return true; });
    }
    template <typename Wanted>
    __device__ __forceinline__ void copy_if(u32 target, const char* plane, int first, int end, Wanted wanted) const {
        u32 own = computed_again(T::member);
        int left = T::rows_left(first, end) * (int)P - (int)own;
        const char* source = plane + own * 16;
#pragma unroll T::UNROLL
        for (u32 n = 0; n < T::COPIES; n++) {
            u32 i = own + n * T::SIZE;
            if ((T::PIECES % T::SIZE == 0 || i < T::PIECES) && wanted((int)(n * T::SIZE)))
                copy_async(target + place(T::block * BLOCK_SIZE + i / P, i % P), source + n * T::SIZE * 16,
                           (int)n * T::SIZE < left);
        }
    }
};
#endif
