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
// Launch: one warp a head of a row, so T * (Hq + 2 Hkv) warps in a grid of one dimension; block any multiple of 32; no
// shared memory. HEAD_DIM is a multiple of 16, at most 256.
// Must equal: qkv_rope_write in tinyvllm_cli/backends/cpu/ops.py, after its product.
#include "kv.cuh"

constexpr int HALF = HEAD_DIM / 2;
constexpr int PAIRS = HEAD_DIM / 4;  // of neighbouring elements, in each half of a head
constexpr int PAIRS_PER_LANE = (PAIRS + WARP - 1) / WARP;

// What a lane holds of a head: elements 2p, 2p + 1 of both halves, for p = lane, lane + 32, ...
struct Part {
    float2 a[PAIRS_PER_LANE], b[PAIRS_PER_LANE];
};

// Its pairs, for loops that the compiler unrolls: Part lives in registers.
template <typename Function>
__device__ __forceinline__ void each_pair(Function function) {
#pragma unroll
    for (int i = 0; i < PAIRS_PER_LANE; i++) {
        const int p = threadIdx.x % WARP + i * WARP;
        if (p < PAIRS) function(i, 2 * p);
    }
}

__device__ __forceinline__ float2 load2(const elem* p) {
    const u32 pair = *reinterpret_cast<const u32*>(p);
    return make_float2(low_float(pair), high_float(pair));
}

__device__ __forceinline__ float2 load2(const float* p) {
    return *reinterpret_cast<const float2*>(p);
}

__device__ __forceinline__ void store2(elem* p, float2 v) {
    *reinterpret_cast<u32*>(p) = pack(v.x, v.y);
}

__device__ __forceinline__ float2 add(float2 v, float2 w) {
    return make_float2(__fadd_rn(v.x, w.x), __fadd_rn(v.y, w.y));
}

__device__ __forceinline__ float add_squares(float sum, float2 v) {
    return __fmaf_rn(v.y, v.y, __fmaf_rn(v.x, v.x, sum));
}

__device__ __forceinline__ float2 scale_by(float2 v, float scale, float2 w) {
    return make_float2(__fmul_rn(__fmul_rn(v.x, scale), w.x), __fmul_rn(__fmul_rn(v.y, scale), w.y));
}

// v * c + w * s
__device__ __forceinline__ float2 turn(float2 v, float2 c, float2 w, float2 s) {
    return make_float2(__fmaf_rn(v.x, c.x, __fmul_rn(w.x, s.x)), __fmaf_rn(v.y, c.y, __fmul_rn(w.y, s.y)));
}

__device__ __forceinline__ void norm_head(Part& part, const float* weight, float eps) {
    float squares = 0.0f;
    each_pair([&](int i, int d) { squares = add_squares(add_squares(squares, part.a[i]), part.b[i]); });
    const float mean = __fdiv_rn(warp_sum(squares), static_cast<float>(HEAD_DIM));
    const float scale = __frsqrt_rn(__fadd_rn(mean, eps));
    each_pair([&](int i, int d) {
        part.a[i] = scale_by(part.a[i], scale, load2(weight + d));
        part.b[i] = scale_by(part.b[i], scale, load2(weight + HALF + d));
    });
}

// angle: cos and sin in the place of the two halves.
__device__ __forceinline__ void rotate(Part& part, const Part& angle) {
    each_pair([&](int i, int d) {
        const float2 a = part.a[i], b = part.b[i], c = angle.a[i], s = angle.b[i];
        part.a[i] = turn(a, c, make_float2(-b.x, -b.y), s);
        part.b[i] = turn(b, c, a, s);
    });
}

#ifdef KV_FP8
constexpr int MIXED = HEAD_DIM & -HEAD_DIM;  // numbers that are mixed with each other

__device__ constexpr int log2_of(int n) {
    return n > 1 ? 1 + log2_of(n / 2) : 0;
}

__device__ __forceinline__ void add_and_subtract(float2& v, float2& w) {
    const float2 sum = add(v, w), difference = add(v, make_float2(-w.x, -w.y));
    v = sum, w = difference;
}

// With the pair of the lane that is `apart` away.
__device__ __forceinline__ float2 exchanged(float2 v, int apart) {
    const float2 w = {__shfl_xor_sync(ALL_LANES, v.x, apart), __shfl_xor_sync(ALL_LANES, v.y, apart)};
    return threadIdx.x & apart ? add(w, make_float2(-v.x, -v.y)) : add(v, w);
}

// The Hadamard transform of each MIXED numbers, times 2^-shift.
__device__ __forceinline__ void mix(Part& part, int shift) {
    each_pair([&](int i, int d) {
        part.a[i] = make_float2(__fadd_rn(part.a[i].x, part.a[i].y), __fsub_rn(part.a[i].x, part.a[i].y));
        part.b[i] = make_float2(__fadd_rn(part.b[i].x, part.b[i].y), __fsub_rn(part.b[i].x, part.b[i].y));
        add_and_subtract(part.a[i], part.b[i]);
    });
#pragma unroll
    for (int i = 0; i < PAIRS_PER_LANE; i++) {  // lanes without a pair too
#pragma unroll
        for (int apart = 1; apart < min(MIXED / 4, WARP); apart *= 2) {
            part.a[i] = exchanged(part.a[i], apart);
            part.b[i] = exchanged(part.b[i], apart);
        }
    }
    if constexpr (MIXED / 4 > WARP) add_and_subtract(part.a[0], part.a[1]), add_and_subtract(part.b[0], part.b[1]);
    const float factor = __uint_as_float(static_cast<u32>(127 - shift) << 23);
    each_pair([&](int i, int d) {
        part.a[i] = make_float2(__fmul_rn(part.a[i].x, factor), __fmul_rn(part.a[i].y, factor));
        part.b[i] = make_float2(__fmul_rn(part.b[i].x, factor), __fmul_rn(part.b[i].y, factor));
    });
}

// Where column d, an even one, of q stands.
__device__ __forceinline__ int place_of(int d) {
    return d / 16 * 16 + d / 2 % 2 * 8 + d % 16 / 4 * 2;
}

__device__ __forceinline__ void write_q(elem* target, const Part& part) {
    each_pair([&](int i, int d) {
        *reinterpret_cast<u32*>(target + place_of(d)) = pack_halves(part.a[i].x, part.a[i].y);
        *reinterpret_cast<u32*>(target + place_of(HALF + d)) = pack_halves(part.b[i].x, part.b[i].y);
    });
}

__device__ __forceinline__ u32 greater_magnitude(u32 magnitude, float2 v) {
    return max(magnitude, max(__float_as_uint(v.x) & 0x7fffffff, __float_as_uint(v.y) & 0x7fffffff));
}

__device__ __forceinline__ void store_codes(char* p, float2 v, float factor) {
    const u32 codes = code_of(__fmul_rn(v.x, factor)) | code_of(__fmul_rn(v.y, factor)) << 8;
    *reinterpret_cast<unsigned short*>(p) = static_cast<unsigned short>(codes);
}

__device__ __forceinline__ void write_kv(char* plane, int row, const Part& part) {
    u32 greatest = 0;
    each_pair([&](int i, int d) { greatest = greater_magnitude(greater_magnitude(greatest, part.a[i]), part.b[i]); });
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2)
        greatest = max(greatest, __shfl_xor_sync(ALL_LANES, greatest, offset));
    const float scale = scale_of(greatest), factor = inverse(scale);
    char* codes = plane + row * HEAD_DIM;
    each_pair([&](int i, int d) {
        store_codes(codes + d, part.a[i], factor);
        store_codes(codes + HALF + d, part.b[i], factor);
    });
    if (threadIdx.x % WARP == 0)
        reinterpret_cast<unsigned short*>(plane + CODES_BYTES)[row] = __float_as_uint(scale) >> 16;
}
#else
__device__ __forceinline__ void write_q(elem* target, const Part& part) {
    each_pair([&](int i, int d) { store2(target + d, part.a[i]), store2(target + HALF + d, part.b[i]); });
}

__device__ __forceinline__ void write_kv(char* plane, int row, const Part& part) {
    write_q(reinterpret_cast<elem*>(plane) + row * HEAD_DIM, part);
}
#endif

extern "C" __global__ void rope_write(elem* __restrict__ q, char* __restrict__ cache, const elem* qkv,
                                      const float* __restrict__ bias, const float* __restrict__ q_norm,
                                      const float* __restrict__ k_norm, const float* cos, const float* sin,
                                      const int* positions, const int* __restrict__ slots, const int* block_tables,
                                      int T, int Hq, int Hkv, int B, int layer, int num_layers, float eps) {
    start_next_kernel();
    const int heads = Hq + 2 * Hkv, warp = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    const int t = warp / heads, head = warp % heads;
    if (t >= T) return wait_for_kernel_before();
    const bool is_q = head < Hq, is_v = head >= Hq + Hkv;
    const int position = positions[t];

    Part part, angle;
    const float *c = cos + static_cast<i64>(position) * HALF, *s = sin + static_cast<i64>(position) * HALF;
    each_pair([&](int i, int d) { angle.a[i] = load2(c + d), angle.b[i] = load2(s + d); });
    wait_for_kernel_before();
    const elem* source = qkv + static_cast<i64>(warp) * HEAD_DIM;
    each_pair([&](int i, int d) { part.a[i] = load2(source + d), part.b[i] = load2(source + HALF + d); });
    if (bias) {
        const float* of_head = bias + head * HEAD_DIM;
        each_pair([&](int i, int d) {
            part.a[i] = add(part.a[i], load2(of_head + d));
            part.b[i] = add(part.b[i], load2(of_head + HALF + d));
        });
    }
    if (!is_v) {
        if (q_norm) norm_head(part, is_q ? q_norm : k_norm, eps);
        rotate(part, angle);
#ifdef KV_FP8
        mix(part, is_q ? log2_of(MIXED) / 2 : (log2_of(MIXED) + 1) / 2);
#endif
    }

    if (is_q) {
        write_q(q + (static_cast<i64>(t) * Hq + head) * HEAD_DIM, part);
    } else {
        const i64 block = block_tables[static_cast<i64>(slots[t]) * B + position / BLOCK_SIZE];
        const i64 plane = ((block * num_layers + layer) * 2 + is_v) * Hkv + (head - Hq) % Hkv;
        write_kv(cache + plane * PLANE_BYTES, position % BLOCK_SIZE, part);
    }
}
