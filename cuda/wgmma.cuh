// Hopper's own: tiles that come by TMA to all blocks of a cluster, barriers that count their bytes, wgmma (PTX ISA,
// "cp.async.bulk.tensor", "mbarrier", "wgmma"; sm_90a alone).
#pragma once
#include "mma.cuh"

// CUtensorMap: a matrix in memory and the tile that one copy takes of it, as the driver encodes it.
struct alignas(64) TensorMap {
    u64 words[16];
};

// ---------------------------------------------------------------- clusters

__device__ __forceinline__ uint2 cluster_size() {
    uint2 v;
    asm volatile("mov.u32 %0, %%cluster_nctaid.x; mov.u32 %1, %%cluster_nctaid.y;" : "=r"(v.x), "=r"(v.y));
    return v;
}

__device__ __forceinline__ uint2 place_in_cluster() {
    uint2 v;
    asm volatile("mov.u32 %0, %%cluster_ctaid.x; mov.u32 %1, %%cluster_ctaid.y;" : "=r"(v.x), "=r"(v.y));
    return v;
}

// Of all threads of all its blocks.
__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// ---------------------------------------------------------------- barriers

__device__ __forceinline__ void init_barrier(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// What init_barrier has done is seen by the whole cluster, and by copies, after its next barrier.
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive_expecting(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// At the barrier that lies at the same place in another block of the cluster.
__device__ __forceinline__ void arrive_at(u32 barrier, u32 block) {
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
        "}" ::"r"(barrier),
        "r"(block)
        : "memory");
}

// Until the phase of this parity is over.
__device__ __forceinline__ void wait_at(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred over;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n"
        "@!over bra again;\n"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// ---------------------------------------------------------------- copies

// The tile at (column, row) to the same place of each block in `blocks`, a bit each; its bytes count at the barrier of
// each. What lies outside of the matrix is zero, and counts.
__device__ __forceinline__ void copy_tile(u32 target, const TensorMap& map, int column, int row, u32 barrier,
                                          unsigned short blocks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(target),
        "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(blocks)
        : "memory");
}

// To this block alone.
__device__ __forceinline__ void copy_tile(u32 target, const TensorMap& map, int column, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3}], [%4];" ::"r"(target),
        "l"(&map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}

// Ahead of the first copy: the map itself has a way to go.
__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Two matrices of 8 x 8 elements as an mma has them, transposed: rows of 16 bytes to the addresses of the first 16
// lanes.
__device__ __forceinline__ void store_transposed(u32 address, u32 first, u32 second) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(first),
                 "r"(second)
                 : "memory");
}

// ---------------------------------------------------------------- wgmma

// Of a tile of rows of 128 bytes, swizzled by 128 bytes, 8 rows after each other: 1024 bytes from 8 to 8.
__device__ __forceinline__ u64 descriptor(u32 address) {
    return (address & 0x3ffff) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
constexpr u64 NEXT_STEP = 2;  // what the 32 bytes of a step add to it

__device__ __forceinline__ void begin_products() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void commit_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int PENDING>
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

#ifdef ELEM_BF16
#define WGMMA_TYPES "f32.bf16.bf16"
#else
#define WGMMA_TYPES "f32.f16.f16"
#endif

// What is multiplied, and how many of it 128 bytes hold.
struct Elems {
    static constexpr int SLAB = 64;
};
struct Codes {  // e4m3
    static constexpr int SLAB = 128;
};

// sums[64, N] += a[64, STEP] b[N, STEP]^T of a KIND, whose step is 32 bytes; a and b by their descriptors. A thread has
// of each 8 columns what it has of those of an mma whose 16 rows are its warp's.
template <typename KIND, int N>
__device__ void multiply_add(float (&sums)[N / 2], u64 a, u64 b);

// The registers of sums in the words of an instruction, and for the compiler, 8 for each 16 columns.
// clang-format off
#define F4(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define SUMS_16 F4(0), F4(4)
#define NAMES_32 NAMES_16 ", " "%8, %9, %10, %11, %12, %13, %14, %15"
#define SUMS_32 SUMS_16, F4(8), F4(12)
#define NAMES_40 NAMES_32 ", " "%16, %17, %18, %19"
#define SUMS_40 SUMS_32, F4(16)
#define NAMES_48 NAMES_32 ", " "%16, %17, %18, %19, %20, %21, %22, %23"
#define SUMS_48 SUMS_32, F4(16), F4(20)
#define NAMES_56 NAMES_48 ", " "%24, %25, %26, %27"
#define SUMS_56 SUMS_48, F4(24)
#define NAMES_64 NAMES_48 ", " "%24, %25, %26, %27, %28, %29, %30, %31"
#define SUMS_64 SUMS_48, F4(24), F4(28)
#define NAMES_72 NAMES_64 ", " "%32, %33, %34, %35"
#define SUMS_72 SUMS_64, F4(32)
#define NAMES_80 NAMES_64 ", " "%32, %33, %34, %35, %36, %37, %38, %39"
#define SUMS_80 SUMS_64, F4(32), F4(36)
#define NAMES_88 NAMES_80 ", " "%40, %41, %42, %43"
#define SUMS_88 SUMS_80, F4(40)
#define NAMES_96 NAMES_80 ", " "%40, %41, %42, %43, %44, %45, %46, %47"
#define SUMS_96 SUMS_80, F4(40), F4(44)
#define NAMES_104 NAMES_96 ", " "%48, %49, %50, %51"
#define SUMS_104 SUMS_96, F4(48)
#define NAMES_112 NAMES_96 ", " "%48, %49, %50, %51, %52, %53, %54, %55"
#define SUMS_112 SUMS_96, F4(48), F4(52)
#define NAMES_128 NAMES_112 ", " "%56, %57, %58, %59, %60, %61, %62, %63"
#define SUMS_128 SUMS_112, F4(56), F4(60)
#define NAMES_144 NAMES_128 ", " "%64, %65, %66, %67, %68, %69, %70, %71"
#define SUMS_144 SUMS_128, F4(64), F4(68)
#define NAMES_160 NAMES_144 ", " "%72, %73, %74, %75, %76, %77, %78, %79"
#define SUMS_160 SUMS_144, F4(72), F4(76)
#define NAMES_176 NAMES_160 ", " "%80, %81, %82, %83, %84, %85, %86, %87"
#define SUMS_176 SUMS_160, F4(80), F4(84)
#define NAMES_192 NAMES_176 ", " "%88, %89, %90, %91, %92, %93, %94, %95"
#define SUMS_192 SUMS_176, F4(88), F4(92)
#define NAMES_208 NAMES_192 ", " "%96, %97, %98, %99, %100, %101, %102, %103"
#define SUMS_208 SUMS_192, F4(96), F4(100)
#define NAMES_224 NAMES_208 ", " "%104, %105, %106, %107, %108, %109, %110, %111"
#define SUMS_224 SUMS_208, F4(104), F4(108)
#define NAMES_240 NAMES_224 ", " "%112, %113, %114, %115, %116, %117, %118, %119"
#define SUMS_240 SUMS_224, F4(112), F4(116)
#define NAMES_256 NAMES_240 ", " "%120, %121, %122, %123, %124, %125, %126, %127"
#define SUMS_256 SUMS_240, F4(120), F4(124)
#define DEFINE_MULTIPLY_ADD_OF(KIND, TYPES, FLAGS, N, A, B)                                    \
    template <>                                                                                \
    __device__ __forceinline__ void multiply_add<KIND, N>(float (&sums)[N / 2], u64 a, u64 b) { \
        asm volatile(                                                                          \
            "{\n"                                                                              \
            ".reg .pred adds;\n"                                                               \
            "setp.ne.b32 adds, 1, 0;\n"                                                        \
            "wgmma.mma_async.sync.aligned.m64n" #N TYPES " {" NAMES_##N                        \
            "}, %" #A ", %" #B ", adds, 1, 1" FLAGS ";\n"                                      \
            "}"                                                                                \
            : SUMS_##N                                                                         \
            : "l"(a), "l"(b));                                                                 \
    }
#define DEFINE_MULTIPLY_ADD(N, A, B)                                            \
    DEFINE_MULTIPLY_ADD_OF(Elems, "k16." WGMMA_TYPES, ", 0, 0", N, A, B)        \
    DEFINE_MULTIPLY_ADD_OF(Codes, "k32.f32.e4m3.e4m3", "", N, A, B)
// clang-format on

// N, and the numbers of the two operands behind N / 2 sums.
DEFINE_MULTIPLY_ADD(16, 8, 9)
DEFINE_MULTIPLY_ADD(32, 16, 17)
DEFINE_MULTIPLY_ADD(40, 20, 21)
DEFINE_MULTIPLY_ADD(48, 24, 25)
DEFINE_MULTIPLY_ADD(56, 28, 29)
DEFINE_MULTIPLY_ADD(64, 32, 33)
DEFINE_MULTIPLY_ADD(72, 36, 37)
DEFINE_MULTIPLY_ADD(80, 40, 41)
DEFINE_MULTIPLY_ADD(88, 44, 45)
DEFINE_MULTIPLY_ADD(96, 48, 49)
DEFINE_MULTIPLY_ADD(104, 52, 53)
DEFINE_MULTIPLY_ADD(112, 56, 57)
DEFINE_MULTIPLY_ADD(128, 64, 65)
DEFINE_MULTIPLY_ADD(144, 72, 73)
DEFINE_MULTIPLY_ADD(192, 96, 97)
DEFINE_MULTIPLY_ADD(256, 128, 129)
