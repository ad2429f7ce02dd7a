// place_blocks: what has changed in the block tables since the step before.
//
//   block_tables[place] = block, for each (place, block) of changes
//
//   block_tables  i32  [.]       of all slots, flattened
//   changes       i32  [N, 2]    each place once
//
// Launch: N threads in a grid of one dimension; block any size; no shared memory.
// Comes before the step's first kernel.
// Must equal: the assignment, as BlockTables in tinyvllm_cli/backends/gpu/slots.py does it on the host.
#include "common.cuh"

extern "C" __global__ void place_blocks(int* block_tables, const int* __restrict__ changes, int N) {
    start_next_kernel();
    wait_for_kernel_before();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < N) block_tables[changes[2 * i]] = changes[2 * i + 1];
}
