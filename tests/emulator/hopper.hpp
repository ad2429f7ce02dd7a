// Enough of Hopper for a processor to run cuda/medium*.cu: clusters, barriers that count bytes, tiles that come by
// tensor maps, wgmma.
//
// Copies are done when no thread can go on without one, in no order; products when their thread waits for them: so a
// tile that is read before it came, or overwritten before it was multiplied, shows.
#pragma once
#include "cuda.hpp"

#define __CUDA_ARCH_FEAT_SM90_ALL
#define __grid_constant__

struct Elems;
struct Codes;
struct TensorMap;
typedef u64 MapWords[16];  // address, rows, columns, rows of a tile, bytes of a number

constexpr u32 ROW_BYTES = 128;  // of a tile

// PTX ISA, "tensor swizzling modes": of 128 bytes.
inline u32 swizzled(u32 address) {
    return address ^ (address >> 7 & 7) << 4;
}

// ---------------------------------------------------------------- clusters and barriers

inline uint2 cluster_size() {
    return {cluster.x, cluster.y};
}
inline uint2 place_in_cluster() {
    return {blockIdx.x % cluster.x, blockIdx.y % cluster.y};
}
inline void cluster_barrier() {
    wait(cluster_group);
}
template <typename T>
inline void groups_barrier() {
    block->named.size = T::MULTIPLIERS * 32;
    wait(block->named);
}

inline Barrier& barrier_at(Block& of, u32 address) {
    for (auto& barrier : of.barriers)
        if (barrier.address == address) return barrier;
    fprintf(stderr, "no barrier at shared address %u\n", address);
    abort();
}
inline void complete(Barrier& barrier) {
    if (barrier.group.arrived > barrier.group.size) {
        fprintf(stderr, "too many arrive at the barrier at %u\n", barrier.address);
        abort();
    }
    if (barrier.group.arrived == barrier.group.size && barrier.bytes == 0) release(barrier.group);
}
inline void init_barrier(u32 address, u32 arrivals) {
    at_shared(address, 8);
    if (block->barriers.size() == block->barriers.capacity()) abort();  // fibers have addresses of those there are
    block->barriers.push_back({address, {(int)arrivals}});
}
inline void publish_barriers() {}
inline void arrive_expecting(u32 address, u32 bytes) {
    Barrier& barrier = barrier_at(*block, address);
    barrier.bytes += bytes;
    barrier.group.arrived++;
    complete(barrier);
}
inline Block& running(unsigned rank) {
    Block& other = *blocks[rank];
    if (rank >= cluster.x * cluster.y || other.ended) {
        fprintf(stderr, "block %u of a cluster is not there, or not any more\n", rank);
        abort();
    }
    return other;
}
inline void arrive_at(u32 address, u32 rank) {
    Barrier& barrier = barrier_at(running(rank), address);
    barrier.group.arrived++;
    complete(barrier);
}
inline void wait_at(u32 address, u32 parity) {
    Group& group = barrier_at(*block, address).group;
    while ((group.generation & 1) == parity) {
        this_fiber().waits_for = &group;
        this_fiber().generation = group.generation;
        yield();
    }
}

// ---------------------------------------------------------------- copies

inline void do_copy(const TileCopy& copy) {
    Block& to = running(copy.rank);
    const MapWords& map = *(const MapWords*)copy.map;
    const long rows = map[1], columns = map[2], tile_rows = map[3], size = map[4], slab = ROW_BYTES / size;
    if (copy.target % 1024 || copy.target + tile_rows * ROW_BYTES > dynamic_bytes) {
        fprintf(stderr, "a tile at shared address %u\n", copy.target);
        abort();
    }
    for (long row = 0; row < tile_rows; row++)
        for (long column = 0; column < slab; column++) {
            const bool inside = copy.row + row < rows && copy.column + column < columns;
            const u64 source = map[0] + ((copy.row + row) * columns + copy.column + column) * size;
            unsigned char* target = to.shared + swizzled(copy.target + row * ROW_BYTES + column * size);
            if (inside)
                memcpy(target, (const void*)source, size);
            else
                memset(target, 0, size);
        }
    Barrier& barrier = barrier_at(to, copy.barrier);
    barrier.bytes -= tile_rows * ROW_BYTES;
    complete(barrier);
}
inline bool do_any_copy() {
    static u32 random = 1;
    if (tile_copies.empty()) return false;
    random = random * 1664525 + 1013904223;
    const size_t i = (random >> 8) % tile_copies.size();
    const TileCopy copy = tile_copies[i];
    tile_copies.erase(tile_copies.begin() + i);
    do_copy(copy);
    return true;
}
static const bool copies_tiles = (when_all_wait = do_any_copy, true);

inline void copy_tile(u32 target, const TensorMap& map, int column, int row, u32 barrier, unsigned short ranks) {
    for (u32 rank = 0; rank < 16; rank++)
        if (ranks >> rank & 1) tile_copies.push_back({target, &map, column, row, barrier, rank});
}
inline void copy_tile(u32 target, const TensorMap& map, int column, int row, u32 barrier) {
    const uint2 mine = place_in_cluster();
    tile_copies.push_back({target, &map, column, row, barrier, mine.x + mine.y * cluster.x});
}
inline void prefetch_map(const TensorMap&) {}

// PTX ISA, "stmatrix": with .trans a lane's pair is of neighbouring rows.
inline void store_transposed(u32 address, u32 first, u32 second) {
    auto* lanes = gather(address);
    const u32 pairs[2] = {first, second};
    for (int matrix = 0; matrix < 2; matrix++)
        for (int i = 0; i < 2; i++)
            store_shared((u32)lanes[matrix * 8 + lane_id() % 4 * 2 + i] + lane_id() / 4 * 2,
                         (unsigned short)(pairs[matrix] >> 16 * i));
}

// ---------------------------------------------------------------- wgmma

template <int COUNT>
inline void hold(float (&)[COUNT]) {}
inline void begin_products() {}
inline void commit_products() {
    this_fiber().product_groups++;
}
template <int PENDING>
inline void wait_for_products() {
    Fiber& fiber = this_fiber();
    size_t count = 0;
    for (; count < fiber.products.size() && fiber.products[count].group + PENDING < fiber.product_groups; count++)
        fiber.products[count].run(fiber.products[count]);
    fiber.products.erase(fiber.products.begin(), fiber.products.begin() + count);
}

// PTX ISA, "matrix descriptor": a byte of a row, in a tile of rows of 128 bytes, 8 rows after each other.
inline const unsigned char* in_tile(u64 descriptor, u32 row, u32 byte) {
    const u32 start = (u32)(descriptor & 0x3fff) << 4, of_8_rows = (u32)(descriptor >> 32 & 0x3fff) << 4;
    if (descriptor >> 62 != 1) {
        fprintf(stderr, "a descriptor without a swizzle of 128 bytes\n");
        abort();
    }
    return at_shared(swizzled(start + row / 8 * of_8_rows + row % 8 * ROW_BYTES + byte), 1);
}
template <typename KIND>
struct Number;
template <>
struct Number<Elems> {
    static constexpr u32 SIZE = 2;
    static float of(const unsigned char* p) {
        elem e;
        memcpy(&e, p, 2);
        return to_float(e);
    }
};
template <>
struct Number<Codes> {
    static constexpr u32 SIZE = 1;
    static float of(const unsigned char* p) {
        return e4m3_of(*p);
    }
};
constexpr u32 STEP_BYTES = 32;

// PTX ISA, "wgmma, register fragments": of 64 rows a warp has 16, as in an mma. Sums go over K in order.
template <typename KIND, int N>
static void run_product(const Product& product) {
    constexpr u32 COUNT = STEP_BYTES / Number<KIND>::SIZE;
    const u32 row = threadIdx.x / 32 % 4 * 16 + lane_id() / 4, column = lane_id() % 4 * 2;
    float left[2][COUNT];
    for (u32 i = 0; i < 2; i++)
        for (u32 k = 0; k < COUNT; k++)
            left[i][k] = Number<KIND>::of(in_tile(product.a, row + i * 8, k * Number<KIND>::SIZE));
    for (u32 i = 0; i < N / 4; i++)
        for (u32 k = 0; k < COUNT; k++) {
            const auto* place = in_tile(product.b, i / 2 * 8 + column + i % 2, k * Number<KIND>::SIZE);
            const float right = Number<KIND>::of(place);
            for (u32 j = 0; j < 2; j++) {
                float& sum = product.sums[i / 2 * 4 + j * 2 + i % 2];
                sum = fmaf(left[j][k], right, sum);
            }
        }
}
template <typename KIND, int N>
inline void multiply_add(float (&sums)[N / 2], u64 a, u64 b) {
    this_fiber().products.push_back({this_fiber().product_groups, sums, a, b, run_product<KIND, N>});
}
