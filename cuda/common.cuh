// What every kernel shares: 16-bit elements to and from float32, 16-byte accesses, sums of a warp and of a block.
//
// elem is bf16 or fp16 as the file is compiled, with exactly one of -DELEM_BF16 and -DELEM_FP16. No header of CUDA's is
// included: NVRTC's wheels lack most of them, and what is needed is one PTX instruction each (PTX ISA, "cvt"; the
// packed forms and bf16 need sm_80).
#pragma once

#if defined(ELEM_BF16) == defined(ELEM_FP16)
#error "define exactly one of ELEM_BF16 and ELEM_FP16"
#endif

typedef unsigned short elem;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int WARP = 32;
constexpr u32 ALL_LANES = 0xffffffffu;
constexpr int BLOCK_SIZE = 16;    // tokens of a KV block
constexpr int ELEMS_PER_16B = 8;  // of a 16-byte access

__device__ __forceinline__ float minus_infinity() {
    return __uint_as_float(0xff800000u);
}

// x, with what follows from it computed where it is used: what no round of a loop changes takes registers for all of
// them if the compiler knows that.
__device__ __forceinline__ u32 computed_again(u32 x) {
    asm volatile("" : "+r"(x));
    return x;
}

// ---------------------------------------------------------------- one kernel after another

// Kernels of a step follow each other by programmatic dependent launch (CUDA C++ Programming Guide): one may start
// while the one before it still runs, and saves the time of starting. Every kernel therefore calls, in every thread,
// start_next_kernel() at its top, and wait_for_kernel_before() before it returns and before it reads or writes anything
// that a kernel writes; only what was there before the step's first kernel may be read earlier, and is on its way then
// while the kernel before still runs: weights, norms, biases, rope tables, what the host has copied for the step, and
// what the steps before have left, as embed, which comes first, starts the next behind its own wait. In attention,
// too, kernels of one op that read the same start the next behind their own wait (prefix.cu, and decode.cu where
// tail.cu follows): the next may then read at once what the kernels before both have left, and waits at its end, or
// where it needs what the one before leaves.
// The end of a kernel then says that all before it have ended too: one that returned without waiting would break that
// for every kernel after it. Both are nothing on cards that have no such launches, and where a launch did not ask.
// A parameter that points to what another kernel writes is never `const __restrict__`: that says it keeps its value as
// long as this kernel lives, which began before the wait, and the compiler may load it before. Nor is one that is to be
// read before the wait: it may as well load it behind.
//
// Built with -DJITTER, each warp stands still for a while at both, differently each time: what does not wait for what
// it needs, or overwrites what is still being read, then shows as other bits.

#ifdef JITTER
__device__ __forceinline__ void jitter() {
    u32 clock, nanoseconds;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(clock));
    nanoseconds = (clock / 32 + threadIdx.x / WARP * 97 + blockIdx.x * 31 + blockIdx.y * 7) * 2654435769u >> 19;
    asm volatile("nanosleep.u32 %0;" ::"r"(nanoseconds));  // up to 8 us
}
#else
__device__ __forceinline__ void jitter() {}
#endif

// Returns once all kernels before have ended and what they wrote can be read.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    jitter();
}

// The next kernel may start once every block has called this, or ended.
__device__ __forceinline__ void start_next_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
    jitter();
}

// ---------------------------------------------------------------- elements

// Exact.
__device__ __forceinline__ float to_float(elem e) {
#ifdef ELEM_BF16
    return __uint_as_float(static_cast<u32>(e) << 16);  // bf16 is the upper half of a float32
#else
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(e));
    return x;
#endif
}

// To nearest, ties to even. NaN stays NaN, and what is past the range becomes an infinity: both show in the logits.
__device__ __forceinline__ elem from_float(float x) {
    elem e;
#ifdef ELEM_BF16
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(e) : "f"(x));
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(e) : "f"(x));
#endif
    return e;
}

// Two elements in one register as they lie in memory: lo in the low half, first.
__device__ __forceinline__ u32 pack(float lo, float hi) {
    u32 pair;
#ifdef ELEM_BF16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));  // the first source is the upper half
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
#endif
    return pair;
}

__device__ __forceinline__ float low_float(u32 pair) {
    return to_float(static_cast<elem>(pair));
}
__device__ __forceinline__ float high_float(u32 pair) {
    return to_float(static_cast<elem>(pair >> 16));
}

// ---------------------------------------------------------------- 16-byte accesses; every pointer 16-byte aligned

__device__ __forceinline__ uint4 load16(const void* p) {
    return *static_cast<const uint4*>(p);
}
__device__ __forceinline__ void store16(void* p, uint4 value) {
    *static_cast<uint4*>(p) = value;
}

// 8 elements -> x[0..7].
__device__ __forceinline__ void unpack8(float* x, uint4 v) {
    const u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[2 * i] = low_float(pairs[i]);
        x[2 * i + 1] = high_float(pairs[i]);
    }
}
__device__ __forceinline__ void load8(float* x, const elem* p) {
    unpack8(x, load16(p));
}

// 8 float32 -> x[0..7].
__device__ __forceinline__ void load8(float* x, const float* p) {
    const float4 a = reinterpret_cast<const float4*>(p)[0], b = reinterpret_cast<const float4*>(p)[1];
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
    x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}

// x[0..7], each rounded -> 8 elements.
__device__ __forceinline__ uint4 pack8(const float* x) {
    return make_uint4(pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
}
__device__ __forceinline__ void store8(elem* p, const float* x) {
    store16(p, pack8(x));
}

// x[0..7] -> 8 float32.
__device__ __forceinline__ void store8(float* p, const float* x) {
    reinterpret_cast<float4*>(p)[0] = make_float4(x[0], x[1], x[2], x[3]);
    reinterpret_cast<float4*>(p)[1] = make_float4(x[4], x[5], x[6], x[7]);
}

// ---------------------------------------------------------------- blocks that come to their ends

// Whether this block is the last of `count` to come here; it then sees what the others wrote before. The ticket is 0
// before and after. Every thread calls it.
__device__ __forceinline__ bool last_to_come(int* ticket, int count) {
    bool last = false;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(ticket, 1) == count - 1;
        if (last) *ticket = 0;  // for the next launch
        __threadfence();
    }
    return __syncthreads_or(last);
}

// ---------------------------------------------------------------- sums in a fixed order

// Of all 32 lanes, in each of them the same bits: float addition commutes, and at each step both partners add the same
// two numbers. Every lane calls it.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) x = __fadd_rn(x, __shfl_xor_sync(ALL_LANES, x, offset));
    return x;
}

// Of all threads of a block, in each of them the same bits. Every thread calls it; blockDim.x is a multiple of 32 (the
// block has one dimension). The order depends on blockDim.x alone. May be called again at once.
__device__ __forceinline__ float block_sum(float x) {
    __shared__ float of_warp[WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    x = warp_sum(x);
    __syncthreads();  // the sums of a call before are read
    if (lane == 0) of_warp[warp] = x;
    __syncthreads();
    return warp_sum(lane < warps ? of_warp[lane] : 0.0f);
}
