// What changes the logits of a row before a draw, in their place, and puts the raw ones back behind it: penalties on
// tokens that were there before, then numbers that the host adds. The whole block works on one row.
//
// Every thread calls every function, with 1024 threads a block.
// Must equal: penalize in tinyvllm_cli/backends/cpu/penalties.py bit for bit.
#pragma once
#include "select.cuh"

struct Edit {
    int id;
    float value;  // to add: a bias, or -inf to mask the id
};

// The host sends no other ids; none may be read or written.
__device__ __forceinline__ bool in_row(int id, int num_ids) {
    return static_cast<u32>(id) < static_cast<u32>(num_ids);
}

// The raw logits in the place of the edits, each id of which stands there once.
__device__ __forceinline__ void apply_edits(float* logits, int num_ids, Edit* edits, int num_edits) {
#pragma unroll 1
    for (int i = threadIdx.x; i < num_edits; i += THREADS) {
        const int id = edits[i].id;
        if (!in_row(id, num_ids)) continue;
        const float raw = logits[id];
        logits[id] = __fadd_rn(raw, edits[i].value);
        edits[i].value = raw;
    }
    __syncthreads();
}

__device__ __forceinline__ void undo_edits(float* logits, int num_ids, const Edit* edits, int num_edits) {
#pragma unroll 1
    for (int i = threadIdx.x; i < num_edits; i += THREADS) {
        const int id = edits[i].id;
        if (in_row(id, num_ids)) logits[id] = edits[i].value;
    }
    __syncthreads();
}

// ---------------------------------------------------------------- penalties

struct Penalties {
    float repetition;  // 1: none
    float presence, frequency;
    int output_start;  // position of the first output token
};

// The tokens of a sequence up to the row's own; those below 0 are marks, those from num_ids up are never drawn.
struct History {
    const int* tokens;
    int length;
    float* raw;  // scratch, as long: a touched logit, at one of the positions where its id stands; elsewhere TOUCHED
};

// An infinity, which no logit is: stands in the place of a logit while the output tokens that have its id are counted,
// by adding to its bits.
constexpr u32 TOUCHED = 0x7f800000u;

__device__ __forceinline__ bool has_penalties(const Penalties& of) {
    return of.repetition != 1.0f || of.presence != 0.0f || of.frequency != 0.0f;
}

__device__ __forceinline__ int first_position(const Penalties& of) {
    return of.repetition != 1.0f ? 0 : max(of.output_start, 0);
}

// What overflows stays finite: an infinity would be a mask.
__device__ __forceinline__ float finite(float x) {
    return fminf(fmaxf(x, -0x1.fffffep127f), 0x1.fffffep127f);
}

// count: of output tokens.
__device__ __forceinline__ float penalized(float x, u32 count, const Penalties& of) {
    x = finite(x > 0.0f ? __fdiv_rn(x, of.repetition) : __fmul_rn(x, of.repetition));
    if (count == 0) return x;
    return finite(__fsub_rn(x, __fadd_rn(__fmul_rn(__uint2float_rn(count), of.frequency), of.presence)));
}

// Logits are finite. Of the threads that find one id the first to come gets the logit, and it is changed once; which
// thread that is does not show.
__device__ __forceinline__ void apply_penalties(float* logits, int num_ids, const Penalties& of,
                                                const History& history) {
    u32* cells = reinterpret_cast<u32*>(logits);
    const int first = first_position(of);
#pragma unroll 1
    for (int i = first + threadIdx.x; i < history.length; i += THREADS) {
        const int id = history.tokens[i];
        history.raw[i] = __uint_as_float(in_row(id, num_ids) ? atomicExch(cells + id, TOUCHED) : TOUCHED);
    }
    __syncthreads();
#pragma unroll 1
    for (int i = max(of.output_start, 0) + threadIdx.x; i < history.length; i += THREADS) {
        const int id = history.tokens[i];
        if (in_row(id, num_ids)) atomicAdd(cells + id, 1u);
    }
    __syncthreads();
#pragma unroll 1
    for (int i = first + threadIdx.x; i < history.length; i += THREADS) {
        const float raw = history.raw[i];
        if (__float_as_uint(raw) == TOUCHED) continue;
        const int id = history.tokens[i];
        logits[id] = penalized(raw, cells[id] - TOUCHED, of);
    }
    __syncthreads();
}

__device__ __forceinline__ void undo_penalties(float* logits, const Penalties& of, const History& history) {
#pragma unroll 1
    for (int i = first_position(of) + threadIdx.x; i < history.length; i += THREADS) {
        const float raw = history.raw[i];
        if (__float_as_uint(raw) != TOUCHED) logits[history.tokens[i]] = raw;
    }
    __syncthreads();
}
