// What becomes of the sums of medium.cuh: rounded, and on their way to memory.
#pragma once
#include "medium.cuh"

namespace {

// A thread's sums are of few tokens and rows far apart; in memory a token's numbers lie side by side. So they go, as
// elem, through where the ring was: a row for each of the block's tokens, its 16 bytes in an order that depends on the
// token, so that no bank is asked twice.
template <int CHUNKS>
struct Results {
    u32 start;

    __device__ __forceinline__ u32 at(int token, int chunk) const {
        constexpr int SPREAD = CHUNKS < 8 ? 8 / CHUNKS : 1;  // tokens whose rows lie in the same 128 bytes
        return start + (token * CHUNKS + (chunk ^ (token / SPREAD & (CHUNKS < 8 ? CHUNKS : 8) - 1))) * 16;
    }
    // Of a warp two matrices of 8 numbers of 8 tokens from `token` on, of chunk `chunk` and the next. A lane has two
    // neighbouring tokens of a number of each, the next lane two more.
    __device__ __forceinline__ void store_chunks(int token, int chunk, u32 first, u32 second) const {
        const int lane = threadIdx.x % WARP;
        store_transposed(at(token + lane % 8, chunk + lane / 8 % 2), first, second);
    }
};

// Of the threads of all groups.
template <typename T>
__device__ __forceinline__ void groups_barrier() {
    asm volatile("bar.sync 1, %0;" ::"n"(T::MULTIPLIERS * WARP) : "memory");
}

// The sums of all groups, rounded, each token's in a row; every thread of the groups calls it, and may read them then.
template <typename T>
__device__ __forceinline__ Results<T::ROWS / 8> rounded(const float (&sums)[T::TOKENS / 2]) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Results<T::ROWS / 8> results{shared_address(shared)};
    groups_barrier<T>();  // the ring is read
#pragma unroll
    for (int i = 0; i < T::TOKENS / 2; i += 4)
        results.store_chunks(i * 2, threadIdx.x / WARP * 2, pack(sums[i], sums[i + 1]), pack(sums[i + 2], sums[i + 3]));
    groups_barrier<T>();
    return results;
}

// The block's part of a result, and where it begins.
template <typename T, typename Number>
struct Result {
    Number* out;
    int rows, columns, ld, first_row, first_column;

    __device__ __forceinline__ bool has(int token, int column) const {
        return first_row + token < rows && first_column + column < columns;
    }
    __device__ __forceinline__ Number* at(int token, int column) const {
        return out + static_cast<size_t>(first_row + token) * ld + first_column + column;
    }
    // From shared memory, 16 bytes a thread.
    template <int CHUNKS>
    __device__ __forceinline__ void take(const Results<CHUNKS>& results) const {
#pragma unroll
        for (int i = threadIdx.x; i < T::TOKENS * CHUNKS; i += T::MULTIPLIERS * WARP) {
            const int token = i / CHUNKS, chunk = i % CHUNKS;
            if (has(token, chunk * 8)) store16(at(token, chunk * 8), load_shared(results.at(token, chunk)));
        }
    }
};

// visit(i, place) for each of a thread's sums that stands for a number of the result.
template <typename T, typename Visit>
__device__ __forceinline__ void visit_result(const Result<T, float>& result, Visit visit) {
    const int lane = threadIdx.x % WARP, row = threadIdx.x / WARP * 16 + lane / 4, token = lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < T::TOKENS / 2; i++) {
        const int of_token = i / 4 * 8 + token + i % 2, column = row + i % 4 / 2 * 8;
        if (result.has(of_token, column)) visit(i, result.at(of_token, column));
    }
}

template <typename T>
__device__ __forceinline__ void product_elem(const Operands& operands, elem* out, int rows, int N, int ld) {
    const int first = blockIdx.x * T::ROWS, first_token = blockIdx.y * T::TOKENS;
    product<T>(
        operands, [] {},
        [&](const float (&sums)[T::TOKENS / 2]) {
            Result<T, elem>{out, rows, N, ld, first_token, first}.take(rounded<T>(sums));
        });
}

}  // namespace
