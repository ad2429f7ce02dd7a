// embed: tokens of a step, resolved, kept and turned into rows of the residual stream.
//
//   token    = token_ids[t], or token_table[slot, position] where that is -1
//   token_table[slot, position] = token where it was given: one that was read stands there
//   x[t, :]  = float32(table[token, :]), NaN for a token outside 0..V-1 (a failed draw stands as -1 or -2 in the table)
//
//   x            f32  [T, H]
//   table        elem [V, H]
//   token_ids    i32  [T]
//   positions    i32  [T]      below max_seq_len
//   slots        i32  [T]      no two rows write one place in the token table; rows that only pad read, and never write
//   token_table  i32  [slots and one that is nobody's, max_seq_len]
//
// Launch: grid T, block any multiple of 32; no shared memory. H is a multiple of 8.
// Must equal: embed in tinyvllm_cli/backends/cpu/ops.py, with resolve_rows in rows.py and the write in backend.py.
#include "common.cuh"

extern "C" __global__ void embed(float* __restrict__ x, const elem* __restrict__ table,
                                 const int* __restrict__ token_ids, const int* __restrict__ positions,
                                 const int* __restrict__ slots, int* token_table, int T, int H, int V,
                                 int max_seq_len) {
    wait_for_kernel_before();
    start_next_kernel();  // not before: common.cuh says why
    const int t = blockIdx.x;
    if (t >= T) return;
    int* place = token_table + static_cast<i64>(slots[t]) * max_seq_len + positions[t];
    int token = token_ids[t];
    if (token == -1) {
        token = *place;
    } else if (threadIdx.x == 0) {
        *place = token;
    }
    const bool known = 0 <= token && token < V;
    const elem* source = table + static_cast<i64>(known ? token : 0) * H;
    float* target = x + static_cast<i64>(t) * H;
    for (int i = threadIdx.x * ELEMS_PER_16B; i < H; i += blockDim.x * ELEMS_PER_16B) {
        float v[ELEMS_PER_16B];
        load8(v, source + i);
#pragma unroll
        for (int j = 0; j < ELEMS_PER_16B; j++) v[j] = known ? v[j] : __int_as_float(0x7fffffff);
        store8(target + i, v);
    }
}
