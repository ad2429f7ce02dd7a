// rope_write: the q, k and v heads of a step: bias, head norms, rotation, K and V into their blocks.
//
//   head    = float32(qkv[t, head]) + bias[head]
//   head    = head / sqrt(mean(head^2) + eps) * norm            q and k, where q_norm and k_norm are given (Qwen3)
//   (a, b)  = (a cos - b sin, b cos + a sin)                    q and k; a, b: its halves (RoPE, Su et al. 2021)
//   q[t, head], or K or V at the row's position, = elem(head)
//
// With -DKV_FP8 q and k are then mixed (tinyvllm_cli/backends/fp8.py says what for), K and V are rounded as kv.cuh has
// it, and q is fp16.
//
//   q             elem [T, Hq, HEAD_DIM]; with -DKV_FP8 fp16, and of each 16 columns first those at 0 and 1 of each
//                 four, then those at 2 and 3: as keys.cuh has K
//   cache         planes of kv.cuh [num_blocks, num_layers, 2, Hkv]
//   qkv           elem [T, Hq + 2 Hkv, HEAD_DIM]
//   bias          f32  [Hq + 2 Hkv, HEAD_DIM] or null
//   q_norm, k_norm f32 [HEAD_DIM], or both null
//   cos, sin      f32  [positions, HEAD_DIM / 2]
//   positions     i32  [T]
//   slots         i32  [T]       row of block_tables
//   block_tables  i32  [slots and one that is nobody's, B]    each position of a row has a block of the pool
//
// Launch: grid T x parts; block a multiple of 32, at most MOST_THREADS; parts * block threads are enough for a row, of
// which LANES take up to HEADS_AT_ONCE heads; no shared memory. HEAD_DIM is a multiple of 16, at most 256.
// Must equal: qkv_rope_write in tinyvllm_cli/backends/cpu/ops.py, after its product.
#include "kv.cuh"

constexpr int MOST_THREADS = 256;
constexpr int HALF = HEAD_DIM / 2;
constexpr int OCTETS = HALF / ELEMS_PER_16B;  // of neighbouring numbers, in each half of a head
constexpr int LANES = OCTETS > 4 ? 8 : OCTETS > 2 ? 4 : OCTETS;  // of a head: each moves 16 bytes at once
constexpr int OCTETS_PER_LANE = (OCTETS + LANES - 1) / LANES;
// Of a lane, all on their way before the first is used. More of them take registers, and so leave fewer warps.
constexpr int HEADS_AT_ONCE = OCTETS_PER_LANE == 1 ? 3 : 1;

// What a lane holds of a head: octets lane, lane + LANES, ... of both halves.
struct Part {
    float a[OCTETS_PER_LANE][ELEMS_PER_16B], b[OCTETS_PER_LANE][ELEMS_PER_16B];
};

// Its octets, for loops that the compiler unrolls: Part lives in registers.
template <typename Function>
__device__ __forceinline__ void each_octet(Function function) {
#pragma unroll
    for (int i = 0; i < OCTETS_PER_LANE; i++) {
        const int octet = threadIdx.x % LANES + i * LANES;
        if (octet < OCTETS) function(i, octet * ELEMS_PER_16B);
    }
}

// The same as it lies in memory.
struct Packed {
    uint4 a[OCTETS_PER_LANE], b[OCTETS_PER_LANE];

    __device__ __forceinline__ void load(const elem* head) {
        each_octet([&](int i, int d) { a[i] = load16(head + d), b[i] = load16(head + HALF + d); });
    }
    __device__ __forceinline__ Part unpacked() const {
        Part part;
        each_octet([&](int i, int) { unpack8(part.a[i], a[i]), unpack8(part.b[i], b[i]); });
        return part;
    }
};

// function(a, b, i, j) for number j of octet i of the first half and the one that turns with it.
template <typename Function>
__device__ __forceinline__ void each_turning(Part& part, Function function) {
#pragma unroll
    for (int i = 0; i < OCTETS_PER_LANE; i++)
#pragma unroll
        for (int j = 0; j < ELEMS_PER_16B; j++) function(part.a[i][j], part.b[i][j], i, j);
}

__device__ __forceinline__ void add8(float* v, const float* bias) {
    float b[ELEMS_PER_16B];
    load8(b, bias);
#pragma unroll
    for (int j = 0; j < ELEMS_PER_16B; j++) v[j] = __fadd_rn(v[j], b[j]);
}

__device__ __forceinline__ void add_bias(Part& part, const float* bias) {
    each_octet([&](int i, int d) { add8(part.a[i], bias + d), add8(part.b[i], bias + HALF + d); });
}

__device__ __forceinline__ void scale8(float* v, float scale, const float* weight) {
    float w[ELEMS_PER_16B];
    load8(w, weight);
#pragma unroll
    for (int j = 0; j < ELEMS_PER_16B; j++) v[j] = __fmul_rn(__fmul_rn(v[j], scale), w[j]);
}

// Of a head, in all of its lanes; every lane of the warp calls it. The bits follow from this order: a sum for each pair
// of neighbours, over both halves and then the pair 32 pairs behind; a tree adds these, the most distant ones first.
__device__ __forceinline__ float sum_of_squares(const Part& part) {
    constexpr int PAIRS = ELEMS_PER_16B / 2;
    float sums[PAIRS] = {};
    each_octet([&](int i, int d) {
#pragma unroll
        for (int j = 0; j < ELEMS_PER_16B; j++) sums[j / 2] = __fmaf_rn(part.a[i][j], part.a[i][j], sums[j / 2]);
#pragma unroll
        for (int j = 0; j < ELEMS_PER_16B; j++) sums[j / 2] = __fmaf_rn(part.b[i][j], part.b[i][j], sums[j / 2]);
    });
#pragma unroll
    for (int apart = LANES / 2; apart > 0; apart /= 2)
#pragma unroll
        for (int p = 0; p < PAIRS; p++) sums[p] = __fadd_rn(sums[p], __shfl_xor_sync(ALL_LANES, sums[p], apart));
    return __fadd_rn(__fadd_rn(sums[0], sums[2]), __fadd_rn(sums[1], sums[3]));
}

__device__ __forceinline__ void norm_head(Part& part, float squares, const float* weight, float eps) {
    const float mean = __fdiv_rn(squares, static_cast<float>(HEAD_DIM));
    const float scale = __frsqrt_rn(__fadd_rn(mean, eps));
    each_octet([&](int i, int d) {
        scale8(part.a[i], scale, weight + d);
        scale8(part.b[i], scale, weight + HALF + d);
    });
}

// angle: cos and sin in the place of the two halves.
__device__ __forceinline__ void rotate(Part& part, const Part& angle) {
    each_turning(part, [&](float& a, float& b, int i, int j) {
        const float c = angle.a[i][j], s = angle.b[i][j], unturned = a;
        a = __fmaf_rn(a, c, __fmul_rn(-b, s));
        b = __fmaf_rn(b, c, __fmul_rn(unturned, s));
    });
}

#ifdef KV_FP8
constexpr int MIXED = HEAD_DIM & -HEAD_DIM;  // numbers that are mixed with each other

__device__ constexpr int log2_of(int n) {
    return n > 1 ? 1 + log2_of(n / 2) : 0;
}

// function(v) for each octet of both halves, those behind the last one too.
template <typename Function>
__device__ __forceinline__ void each_half(Part& part, Function function) {
#pragma unroll
    for (int i = 0; i < OCTETS_PER_LANE; i++) function(part.a[i]), function(part.b[i]);
}

__device__ __forceinline__ void add_and_subtract(float& v, float& w) {
    const float sum = __fadd_rn(v, w), difference = __fsub_rn(v, w);
    v = sum, w = difference;
}

// Each number with the one that is `apart` numbers away.
__device__ __forceinline__ void mix8(float* v, int apart) {
#pragma unroll
    for (int j = 0; j < ELEMS_PER_16B; j++)
        if (!(j & apart)) add_and_subtract(v[j], v[j + apart]);
}

// With the octet of the lane that is `apart` away, if the head is to be mixed; every lane of the warp calls it.
__device__ __forceinline__ void mix_lanes(float* v, int apart, bool mixes) {
#pragma unroll
    for (int j = 0; j < ELEMS_PER_16B; j++) {
        const float w = __shfl_xor_sync(ALL_LANES, v[j], apart);
        if (mixes) v[j] = threadIdx.x & apart ? __fsub_rn(w, v[j]) : __fadd_rn(v[j], w);
    }
}

// The Hadamard transform of each MIXED numbers, times 2^-shift, of a head that is to be mixed. Every lane of the warp
// calls it.
__device__ __forceinline__ void mix(Part& part, bool mixes, int shift) {
    if (mixes) {
        each_half(part, [&](float* v) { mix8(v, 1); });
        each_turning(part, [&](float& a, float& b, int, int) { add_and_subtract(a, b); });
        each_half(part, [&](float* v) { mix8(v, 2), mix8(v, 4); });
    }
#pragma unroll
    for (int apart = 1; apart < min(MIXED / 16, LANES); apart *= 2)
        each_half(part, [&](float* v) { mix_lanes(v, apart, mixes); });
    if (!mixes) return;
    if constexpr (MIXED / 16 > LANES) {
#pragma unroll
        for (int j = 0; j < ELEMS_PER_16B; j++)
            add_and_subtract(part.a[0][j], part.a[1][j]), add_and_subtract(part.b[0][j], part.b[1][j]);
    }
    const float factor = __uint_as_float(static_cast<u32>(127 - shift) << 23);
    each_turning(part, [&](float& a, float& b, int, int) { a = __fmul_rn(a, factor), b = __fmul_rn(b, factor); });
}

__device__ __forceinline__ u32 greatest_of(const float* v) {
    u32 greatest = 0;
#pragma unroll
    for (int j = 0; j < ELEMS_PER_16B; j++) greatest = max(greatest, __float_as_uint(v[j]) & 0x7fffffff);
    return greatest;
}

// v at columns d .. d + 7 of a head of q.
__device__ __forceinline__ void write_q8(elem* head, int d, const float* v) {
    auto store4 = [&](int place, float a, float b, float c, float e) {
        *reinterpret_cast<uint2*>(head + place) = make_uint2(pack_halves(a, b), pack_halves(c, e));
    };
    const int place = d / 16 * 16 + d % 16 / 2;
    store4(place, v[0], v[1], v[4], v[5]);
    store4(place + 8, v[2], v[3], v[6], v[7]);
}

__device__ __forceinline__ void write_q(elem* target, const Part& part) {
    each_octet([&](int i, int d) { write_q8(target, d, part.a[i]), write_q8(target, HALF + d, part.b[i]); });
}

// Mixes a head of q or K. Gives the greatest magnitude of any head, as bits. Every lane of the warp calls it.
__device__ __forceinline__ u32 mix_head(Part& part, bool is_q, bool is_v) {
    mix(part, !is_v, is_q ? log2_of(MIXED) / 2 : (log2_of(MIXED) + 1) / 2);
    u32 greatest = 0;
    each_octet([&](int i, int) { greatest = max(greatest, max(greatest_of(part.a[i]), greatest_of(part.b[i]))); });
#pragma unroll
    for (int apart = LANES / 2; apart > 0; apart /= 2)
        greatest = max(greatest, __shfl_xor_sync(ALL_LANES, greatest, apart));
    return greatest;
}

__device__ __forceinline__ void store_codes8(char* p, const float* v, float factor) {
    u32 words[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float* w = v + 4 * i;
        words[i] = codes_of(__fmul_rn(w[0], factor), __fmul_rn(w[1], factor)) |
                   codes_of(__fmul_rn(w[2], factor), __fmul_rn(w[3], factor)) << 16;
    }
    *reinterpret_cast<uint2*>(p) = make_uint2(words[0], words[1]);
}

__device__ __forceinline__ void write_kv(char* plane, int row, const Part& part, u32 greatest) {
    const float scale = scale_of(greatest), factor = inverse(scale);
    char* codes = plane + row * HEAD_DIM;
    each_octet([&](int i, int d) {
        store_codes8(codes + d, part.a[i], factor);
        store_codes8(codes + HALF + d, part.b[i], factor);
    });
    if (threadIdx.x % LANES == 0)
        reinterpret_cast<unsigned short*>(plane + CODES_BYTES)[row] = __float_as_uint(scale) >> 16;
}
#else
__device__ __forceinline__ void write_q(elem* target, const Part& part) {
    each_octet([&](int i, int d) { store8(target + d, part.a[i]), store8(target + HALF + d, part.b[i]); });
}

__device__ __forceinline__ u32 mix_head(Part&, bool, bool) {
    return 0;
}

__device__ __forceinline__ void write_kv(char* plane, int row, const Part& part, u32) {
    write_q(reinterpret_cast<elem*>(plane) + row * HEAD_DIM, part);
}
#endif

extern "C" __global__ void __launch_bounds__(MOST_THREADS)
    rope_write(elem* __restrict__ q, char* __restrict__ cache, const elem* qkv, const float* __restrict__ bias,
               const float* __restrict__ q_norm, const float* __restrict__ k_norm, const float* cos, const float* sin,
               const int* positions, const int* slots, const int* block_tables, int T, int Hq, int Hkv, int B,
               int layer, int num_layers, float eps) {
    start_next_kernel();
    const int t = blockIdx.x;
    if (t >= T) return wait_for_kernel_before();
    const int position = positions[t], slot = slots[t];
    wait_for_kernel_before();

    // All that a lane reads is on its way before any of it is used.
    const int heads = Hq + 2 * Hkv, step = gridDim.y * blockDim.x / LANES;
    const int first = (blockIdx.y * blockDim.x + threadIdx.x) / LANES;
    const elem* row = qkv + static_cast<i64>(t) * heads * HEAD_DIM;
    Packed packed[HEADS_AT_ONCE];
#pragma unroll
    for (int n = 0; n < HEADS_AT_ONCE; n++)
        if (first + n * step < heads) packed[n].load(row + (first + n * step) * HEAD_DIM);
    Part angle;
    const i64 turn = static_cast<i64>(position) * HALF;
    each_octet([&](int i, int d) { load8(angle.a[i], cos + turn + d), load8(angle.b[i], sin + turn + d); });
    const int block = block_tables[static_cast<i64>(slot) * B + position / BLOCK_SIZE];

#pragma unroll
    for (int n = 0; n < HEADS_AT_ONCE; n++) {
        const int head = first + n * step;
        if (head - static_cast<int>(threadIdx.x % WARP / LANES) >= heads) return;  // and so of all lanes of the warp
        const bool is_there = head < heads, is_q = head < Hq, is_v = head >= Hq + Hkv;
        Part part = packed[n].unpacked();
        if (bias && is_there) add_bias(part, bias + head * HEAD_DIM);
        if (q_norm) {
            const float squares = sum_of_squares(part);
            if (!is_v) norm_head(part, squares, is_q ? q_norm : k_norm, eps);
        }
        if (!is_v) rotate(part, angle);
        const u32 greatest = mix_head(part, is_q, is_v);
        if (is_q) {
            write_q(q + (static_cast<i64>(t) * Hq + head) * HEAD_DIM, part);
        } else if (is_there) {
            // Computed here, so that nothing waits for the block table while the first heads can be written.
            const i64 planes = static_cast<i64>(computed_again(block)) * num_layers + layer;
            const i64 plane = planes * 2 * Hkv + head - Hq;  // those of V come behind those of K, as heads do
            write_kv(cache + plane * PLANE_BYTES, position % BLOCK_SIZE, part, greatest);
        }
    }
}
