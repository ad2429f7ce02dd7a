// Random words and Gumbel noise as a pure function of (seed, position, token id): no state, no order of calls.
//
// Philox4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
// Must equal: philox4x32_10 in tinyvllm_cli/philox.py bit for bit, and gumbel_from_words in
// tinyvllm_cli/backends/cpu/sample.py within the error of logf and log1pf.
#pragma once
#include "common.cuh"

// counter, key -> the four words of 10 rounds.
__device__ __forceinline__ uint4 philox4x32_10(uint4 counter, uint2 key) {
    constexpr u32 M0 = 0xD2511F53u, M1 = 0xCD9E8D57u;
    constexpr u32 KEY_STEP0 = 0x9E3779B9u, KEY_STEP1 = 0xBB67AE85u;  // fractions of the golden ratio and of sqrt(3)
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const u32 low0 = M0 * counter.x, high0 = __umulhi(M0, counter.x);
        const u32 low1 = M1 * counter.z, high1 = __umulhi(M1, counter.z);
        counter = make_uint4(high1 ^ counter.y ^ key.x, low1, high0 ^ counter.w ^ key.y, low0);
        key.x += KEY_STEP0;
        key.y += KEY_STEP1;
    }
    return counter;
}

// The words of token ids 4 * block .. 4 * block + 3 at a position. The keys of the rounds would take 20 registers.
__device__ __forceinline__ uint4 words_of(u32 block, int position, u64 seed) {
    const uint2 key = make_uint2(computed_again(static_cast<u32>(seed)), computed_again(static_cast<u32>(seed >> 32)));
    return philox4x32_10(make_uint4(block, static_cast<u32>(position), 0, 0), key);
}

// -log(-log1p(-v)), v = min(float(word) 2^-32 + 2^-33, 1 - 2^-24). The product is exact, so the fused form has the one
// rounding of the sum. Without the minimum the last 128 words would give v = 1 and infinite noise.
__device__ __forceinline__ float gumbel(u32 word) {
    const float v = fminf(__fmaf_rn(__uint2float_rn(word), 0x1p-32f, 0x1p-33f), 1.0f - 0x1p-24f);
    return -logf(-log1pf(-v));
}
