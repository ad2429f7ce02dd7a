// How K and V lie in the cache, a plane for each block, layer, K or V, and KV head: as elem, or in 8 bits.
//
//   cache   planes of PLANE_BYTES [num_blocks, num_layers, 2, Hkv]      K, then V
//   plane   elem [BLOCK_SIZE, HEAD_DIM]
//           with -DKV_FP8: codes e4m3 [BLOCK_SIZE, HEAD_DIM], then scales bf16 [BLOCK_SIZE]; a value is code * scale
//
// A scale is the least power of 2, at least 2^-22, for which no code is beyond 448, e4m3's greatest (Micikevicius et
// al., FP8 Formats for Deep Learning, 2022; powers of 2 as scales: OCP Microscaling Formats, 2023). A head that holds
// NaN, or what is beyond 448 * 2^7, has NaN as its scale: all of it is NaN, which shows in the logits.
// Must equal: quantize and dequantize in tinyvllm_cli/backends/fp8.py.
//
// Attention over codes is done in fp16, which has all codes, whatever elem is: q comes in fp16, scales are multiplied
// into scores and into the weights of V.
#pragma once
#include "e4m3.cuh"

#ifdef KV_FP8
constexpr int KV_BYTES = 1, SCALE_BYTES = 2;  // of a number, and of what a head has besides
#else
constexpr int KV_BYTES = 2, SCALE_BYTES = 0;
#endif
constexpr int KV_ROW_BYTES = HEAD_DIM * KV_BYTES;
constexpr int CODES_BYTES = BLOCK_SIZE * KV_ROW_BYTES, SCALES_BYTES = BLOCK_SIZE * SCALE_BYTES;  // of a plane
constexpr int PLANE_BYTES = CODES_BYTES + SCALES_BYTES;

#ifdef KV_FP8

constexpr int LEAST_SCALE = 127 - 22;  // exponent as float32 has it
constexpr float GREATEST_VALUE = 448.f * 0x1p7f;

// The scale of a head, of its greatest magnitude as bits: those of NaN are greater than of any number. Adding what
// mantissas above 1.75 lack of 2 makes them count to the next exponent.
__device__ __forceinline__ float scale_of(u32 greatest) {
    if (greatest > __float_as_uint(GREATEST_VALUE)) return __uint_as_float(0x7fc00000u);
    int exponent = static_cast<int>((greatest + 0x1fffffu) >> 23) - 8;
    return __uint_as_float(static_cast<u32>(max(exponent, LEAST_SCALE)) << 23);
}

// 1 / scale; 0 of NaN.
__device__ __forceinline__ float inverse(float scale) {
    return scale == scale ? __uint_as_float((254u << 23) - __float_as_uint(scale)) : 0.f;
}

// Four codes as fp16, two by two.
__device__ __forceinline__ void halves_of(u32& first, u32& second, u32 codes) {
#if __CUDA_ARCH__ >= 890
    asm("{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, lo;\ncvt.rn.f16x2.e4m3x2 %1, hi;\n}"
        : "=r"(first), "=r"(second)
        : "r"(codes));
#else
    // To where fp16 has exponent and mantissa; e4m3's exponents count from 7, fp16's from 15.
    u32 low = __byte_perm(codes, 0, 0x1404), high = __byte_perm(codes, 0, 0x3424);
    low = (low & 0x80008000u) | (low & 0x7f007f00u) >> 1, high = (high & 0x80008000u) | (high & 0x7f007f00u) >> 1;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(first) : "r"(low), "r"(0x5c005c00u));
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(second) : "r"(high), "r"(0x5c005c00u));
#endif
}

// As pack, whatever elem is.
__device__ __forceinline__ u32 pack_halves(float lo, float hi) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
    return pair;
}

#endif
