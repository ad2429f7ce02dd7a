// medium_qkv: the product of 17 to 256 normed rows with q, k and v on Hopper, and rope_write in one kernel, which has
// the bits of those apart (medium.cu, rope_write.cu). Without head norms, and with K and V held as elem.
//
//   head    = float32(elem(y[n] weight^T))[head] + bias[head]
//   (a, b)  = (a cos - b sin, b cos + a sin)                     q and k; a, b: its halves
//   q[n, head], or K or V at the row's position, = elem(head)
//
//   weights, tokens  maps of weight and y as of medium.cu; weight elem [(Hq + 2 Hkv) HEAD_DIM, K]
//   q, cache, bias, cos, sin, positions, slots, block_tables     as of rope_write
//
// Launch: as of medium_elem, with 8 TOKENS bytes of dynamic shared memory more. HEAD_DIM is 16, 32, 64 or 128: the rows
// of a block are whole heads. Of others this does nothing, and is not launched.
// Must equal: qkv_rope_write in tinyvllm_cli/backends/cpu/ops.py, after its norm.
#include "kv.cuh"
#include "medium_results.cuh"

namespace {

constexpr int HALF = HEAD_DIM / 2;
constexpr int HALF_CHUNKS = HALF / ELEMS_PER_16B, HEAD_CHUNKS = 2 * HALF_CHUNKS;

constexpr int GROUPS = HEAD_DIM > 64 ? 2 : 1, SLABS = HEAD_DIM > 64 ? 1 : 2, THREADS = (GROUPS * GROUP + 2) * WARP;

// Of a row: its position, and the block that holds it.
struct Where {
    int position, block;
};

struct Rows {
    const int *positions, *slots, *block_tables;
    int rows, B;

    __device__ __forceinline__ Where find(int row) const {
        const int position = positions[row];
        return {position, block_tables[static_cast<i64>(slots[row]) * B + position / BLOCK_SIZE]};
    }
};

// 8 numbers of the first half of a head and the 8 that turn with them.
struct Pairs {
    float a[ELEMS_PER_16B], b[ELEMS_PER_16B];

    __device__ __forceinline__ void add(const float* bias) {
        float of_a[ELEMS_PER_16B], of_b[ELEMS_PER_16B];
        load8(of_a, bias), load8(of_b, bias + HALF);
#pragma unroll
        for (int i = 0; i < ELEMS_PER_16B; i++) a[i] = __fadd_rn(a[i], of_a[i]), b[i] = __fadd_rn(b[i], of_b[i]);
    }
    __device__ __forceinline__ void turn(const float* cos, const float* sin) {
        float c[ELEMS_PER_16B], s[ELEMS_PER_16B];
        load8(c, cos), load8(s, sin);
#pragma unroll
        for (int i = 0; i < ELEMS_PER_16B; i++) {
            const float unturned = a[i];
            a[i] = __fmaf_rn(a[i], c[i], __fmul_rn(-b[i], s[i]));
            b[i] = __fmaf_rn(b[i], c[i], __fmul_rn(unturned, s[i]));
        }
    }
};

__device__ __forceinline__ void unpack8(float* x, uint4 v) {
    const u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) x[2 * i] = low_float(pairs[i]), x[2 * i + 1] = high_float(pairs[i]);
}

// Where heads go, and what is done to them.
struct Heads {
    elem* q;
    char* cache;
    const float *bias, *cos, *sin;
    int Hq, Hkv, layer, num_layers;

    // pairs: from columns d and HALF + d on.
    __device__ __forceinline__ void finish(Pairs& pairs, int row, int head, int d, const Where& where) const {
        const bool is_q = head < Hq, is_v = head >= Hq + Hkv;
        if (bias) pairs.add(bias + head * HEAD_DIM + d);
        const i64 angle = static_cast<i64>(where.position) * HALF + d;
        if (!is_v) pairs.turn(cos + angle, sin + angle);
        elem* target = q + (static_cast<i64>(row) * Hq + head) * HEAD_DIM;
        if (!is_q) {
            const i64 plane =
                ((static_cast<i64>(where.block) * num_layers + layer) * 2 + is_v) * Hkv + (head - Hq) % Hkv;
            target = reinterpret_cast<elem*>(cache + plane * PLANE_BYTES) + where.position % BLOCK_SIZE * HEAD_DIM;
        }
        store8(target + d, pairs.a);
        store8(target + HALF + d, pairs.b);
    }
};

template <typename T>
__device__ __forceinline__ void product_qkv(const Operands& operands, const Heads& to, const Rows& of) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const int first_token = blockIdx.y * T::TOKENS, first_head = blockIdx.x * T::ROWS / HEAD_DIM;
    Where* where = reinterpret_cast<Where*>(shared + T::shared_bytes(operands.stages));  // behind the ring
    auto find = [&] {
        const int row = first_token + threadIdx.x;
        if (threadIdx.x < T::TOKENS && row < of.rows) where[threadIdx.x] = of.find(row);
    };
    product<T>(operands, find, [&](const float (&sums)[T::TOKENS / 2]) {
        const auto results = rounded<T>(sums);
        constexpr int PAIRS = T::ROWS / ELEMS_PER_16B / 2;  // of chunks, of a row
        for (int i = threadIdx.x; i < T::TOKENS * PAIRS; i += T::MULTIPLIERS * WARP) {
            const int token = i / PAIRS, of_block = i % PAIRS / HALF_CHUNKS, chunk = i % HALF_CHUNKS;
            const int row = first_token + token, head = first_head + of_block;
            if (row >= of.rows || head >= to.Hq + 2 * to.Hkv) continue;
            Pairs pairs;
            unpack8(pairs.a, load_shared(results.at(token, of_block * HEAD_CHUNKS + chunk)));
            unpack8(pairs.b, load_shared(results.at(token, of_block * HEAD_CHUNKS + HALF_CHUNKS + chunk)));
            to.finish(pairs, row, head, chunk * ELEMS_PER_16B, where[token]);
        }
    });
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    medium_qkv(const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap y, elem* q, char* cache,
               const float* bias, const float* cos, const float* sin, const int* positions, const int* slots,
               const int* block_tables, int rows, int Hq, int Hkv, int B, int layer, int num_layers, int K, int tokens,
               int stages) {
    const Operands operands{weights, y, K, stages};
    const Heads to{q, cache, bias, cos, sin, Hq, Hkv, layer, num_layers};
    const Rows of{positions, slots, block_tables, rows, B};
    if constexpr (GROUPS * GROUP_ROWS % HEAD_DIM == 0) {
        switch (tokens) {
            case 32:
                return product_qkv<Tile<GROUPS, 32, SLABS>>(operands, to, of);
            case 48:
                return product_qkv<Tile<GROUPS, 48, SLABS>>(operands, to, of);
            case 64:
                return product_qkv<Tile<GROUPS, 64, SLABS>>(operands, to, of);
            case 80:
                return product_qkv<Tile<GROUPS, 80, SLABS>>(operands, to, of);
            case 96:
                return product_qkv<Tile<GROUPS, 96, SLABS>>(operands, to, of);
            case 128:
                return product_qkv<Tile<GROUPS, 128, SLABS>>(operands, to, of);
        }
    }
}
