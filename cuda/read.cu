// sum_words: reads memory as fast as the card can, to measure how fast that is.
//
//   *sum += all words, modulo 2^32
//
//   words  u32 [grid * READ_PART * 4], 16-byte aligned
//   sum    u32 [1]
//
// Launch: a grid of one dimension, one block for each READ_PART 16-byte words; block READ_BLOCK; no dynamic shared
// memory. A thread has UNROLLED loads under way at once, which depend on nothing: enough, with all threads of a
// multiprocessor, for the delay of the memory.
// Must equal: words.sum(dtype=np.uint32); whole numbers do not round, so the order is no matter.
#include "common.cuh"

constexpr int READ_BLOCK = 256;
constexpr int UNROLLED = 8;
constexpr int READ_PART = 4 * UNROLLED * READ_BLOCK;  // 16-byte words of a block, 128 KiB

extern "C" __global__ void __launch_bounds__(READ_BLOCK) sum_words(const u32* words, u32* sum) {
    start_next_kernel();
    wait_for_kernel_before();
    const u32* mine = words + 4 * (static_cast<i64>(blockIdx.x) * READ_PART + threadIdx.x);
    u32 total = 0;
    for (int part = 0; part < READ_PART; part += UNROLLED * READ_BLOCK) {
        uint4 v[UNROLLED];
#pragma unroll
        for (int i = 0; i < UNROLLED; i++) v[i] = load16(mine + 4 * (part + i * READ_BLOCK));
#pragma unroll
        for (int i = 0; i < UNROLLED; i++) total += v[i].x + v[i].y + v[i].z + v[i].w;
    }
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) total += __shfl_xor_sync(ALL_LANES, total, offset);
    __shared__ u32 of_block;  // one addition a block to memory: those to one address follow one another
    if (threadIdx.x == 0) of_block = 0;
    __syncthreads();
    if (threadIdx.x % WARP == 0) atomicAdd(&of_block, total);
    __syncthreads();
    if (threadIdx.x == 0) atomicAdd(sum, of_block);
}
