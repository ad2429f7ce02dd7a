// Products of at most 16 rows, at the rate at which a weight comes from memory: out (+)= a weight^T.
//
// The bits are those of cublasLt's algorithms without split K, by which more rows are multiplied: for each number of
// the result one float32 accumulator goes from zero through mma.sync.m16n8k16 over K in ascending steps of 16. A step
// takes about 33 cycles on Hopper and waits for the one before, so nothing else may stand in its way: MULTIPLIERS warps
// of a block do nothing but multiply, one loads the weight and one the activations, as far ahead as shared memory
// holds. Activations are the 16 rows of the mma (for those that are not there the last one stands in, and what comes of
// it is not written), rows of the weight its 8 columns.
//
//   out      elem or float32 [rows, ld], ld >= N; nothing but its [rows, N] is touched
//   a        elem [rows, K], 1 <= rows <= 16, K a multiple of 8, each row 16-byte aligned
//   weight   elem [N, K], likewise; read while the kernel before still runs
//
// Launch: ceil(N / BLOCK_ROWS) blocks of THREADS threads, STAGES (BLOCK_ROWS + rows) ROW_BYTES of dynamic shared
// memory. NumPy: out[:, :N] = a @ weight.T, or +=, summed in float32 and rounded once.
#include "mma.cuh"

namespace {

constexpr int COLUMNS = 512;    // of K in a stage
constexpr int STAGES = 3;       // of the ring in shared memory
constexpr int MULTIPLIERS = 4;  // warps, each with 8 rows of the weight
constexpr int BLOCK_ROWS = MULTIPLIERS * 8;
constexpr int THREADS = (MULTIPLIERS + 2) * WARP;
constexpr int ROW_BYTES = COLUMNS * sizeof(elem) + 16;  // of a stage: an odd number of 16 bytes, no bank conflicts
constexpr int PAIR = 32;                                // columns of two steps
constexpr int PAIR_BYTES = PAIR * sizeof(elem);

// What one warp loads: the first rows of a matrix with K columns.
struct Source {
    const elem* data;
    int rows, K;

    // Columns from `first` on, a stage of them; zeros behind the last.
    __device__ __forceinline__ void load(u32 target, int first) const {
        const int column = first + threadIdx.x % WARP * ELEMS_PER_16B;
        const elem* source = data + column;
        target += threadIdx.x % WARP * 16;
#pragma unroll 4
        for (int row = 0; row < rows; row++, source += K, target += ROW_BYTES)
#pragma unroll
            for (int i = 0; i < COLUMNS; i += WARP * ELEMS_PER_16B)
                copy_async(target + i * sizeof(elem), source + i, column + i < K);
    }
};

// A lane's part of the operands of two steps. HALF: there are no rows of activations behind the first 8.
template <bool HALF>
struct Pair {
    u32 a[2][4], b[4];

    __device__ __forceinline__ void load(u32 a_address, u32 b_address) {
        load_matrices(b, b_address);
        load_matrices(a[0], a_address);
        if constexpr (HALF) {
            a[1][0] = a[0][2], a[1][2] = a[0][3], a[0][2] = a[0][1];
            a[0][1] = a[0][3] = a[1][1] = a[1][3] = 0;
        } else {
            load_matrices(a[1], a_address + PAIR_BYTES / 2);
        }
    }
    __device__ __forceinline__ void multiply(float (&c)[4]) const {
        multiply_add(c, a[0], b[0], b[1]);
        multiply_add(c, a[1], b[2], b[3]);
    }
};

// c += the first `pairs` pairs of a stage.
template <bool HALF>
__device__ __forceinline__ void multiply_stage(float (&c)[4], u32 a, u32 b, int pairs) {
    constexpr int ALL = COLUMNS / PAIR;
    if (pairs == ALL) {
        Pair<HALF> pair, next;
        pair.load(a, b);
#pragma unroll
        for (int i = 1; i <= ALL; i++) {
            if (i < ALL) next.load(a + i * PAIR_BYTES, b + i * PAIR_BYTES);  // while the pair before is multiplied
            pair.multiply(c);
            pair = next;
        }
    } else {
        for (int i = 0; i < pairs; i++) {
            Pair<HALF> pair;
            pair.load(a + i * PAIR_BYTES, b + i * PAIR_BYTES);
            pair.multiply(c);
        }
    }
}

template <typename Number>
struct Result {
    Number* out;
    int rows, N, ld;

    // visit(i, place) for each of a lane's four accumulators that stands for a number; `first`: the column of the tile.
    template <typename Visit>
    __device__ __forceinline__ void visit(int first, Visit visit) const {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = lane / 4 + i / 2 * 8, column = first + lane % 4 * 2 + i % 2;
            if (row < rows && column < N) visit(i, out + static_cast<size_t>(row) * ld + column);
        }
    }
};

// Written is finish(old, sum); OLD: it needs what was there. HALF: there are at most 8 rows.
template <bool HALF, bool OLD, typename Number, typename Finish>
__device__ __forceinline__ void product(const Result<Number>& result, const elem* a, const elem* weight, int K,
                                        Finish finish) {
    extern __shared__ __align__(16) unsigned char shared[];
    constexpr int HEIGHT = HALF ? 8 : 16;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, rows = result.rows;
    const int first = blockIdx.x * BLOCK_ROWS, num_stages = (K + COLUMNS - 1) / COLUMNS;
    const bool multiplies = warp < MULTIPLIERS, loads_weight = warp == MULTIPLIERS;
    // A stage: rows of the weight (those behind its last hold anything, as what comes of them is not written), then
    // rows of activations.
    const u32 ring = shared_address(shared), stage_bytes = (BLOCK_ROWS + rows) * ROW_BYTES;
    const u32 activations = BLOCK_ROWS * ROW_BYTES;
    const Source source = loads_weight
                              ? Source{weight + static_cast<size_t>(first) * K, min(BLOCK_ROWS, result.N - first), K}
                              : Source{a, rows, K};
    auto place = [&](int stage) { return ring + stage % STAGES * stage_bytes; };
    auto load = [&](int stage) {
        if (stage < num_stages) source.load(place(stage) + (loads_weight ? 0 : activations), stage * COLUMNS);
        commit_copies();
    };
    auto load_all = [&] {
        for (int stage = 0; stage < STAGES; stage++) load(stage);
    };

    start_next_kernel();
    if (loads_weight) load_all();
    wait_for_kernel_before();
    if (!multiplies && !loads_weight) load_all();
    float old[4] = {}, sum[4] = {};
    if (OLD && multiplies) result.visit(first + warp * 8, [&](int i, Number* from) { old[i] = *from; });
    const u32 a_lane = activations + min(lane % HEIGHT, rows - 1) * ROW_BYTES + lane / HEIGHT * 16;
    const u32 b_lane = (warp * 8 + lane % 8) * ROW_BYTES + lane / 8 * 16;
    for (int stage = 0; stage < num_stages; stage++) {
        if (stage == 0)
            wait_for_copies<STAGES - 1>();
        else
            wait_for_copies<STAGES - 2>();
        __syncthreads();  // this stage has come, and the one before is read
        if (multiplies) {
            const int columns = min(COLUMNS, K - stage * COLUMNS);
            multiply_stage<HALF>(sum, place(stage) + a_lane, place(stage) + b_lane, (columns + PAIR - 1) / PAIR);
        } else if (stage > 0) {
            load(stage - 1 + STAGES);
        }
    }
    if (multiplies) result.visit(first + warp * 8, [&](int i, Number* to) { *to = finish(old[i], sum[i]); });
}

template <bool OLD, typename Number, typename Finish>
__device__ __forceinline__ void any_product(const Result<Number>& result, const elem* a, const elem* weight, int K,
                                            Finish finish) {
    if (result.rows <= 8)
        product<true, OLD>(result, a, weight, K, finish);
    else
        product<false, OLD>(result, a, weight, K, finish);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS)
    skinny_elem(elem* out, const elem* a, const elem* weight, int rows, int N, int K, int ld) {
    any_product<false>(Result<elem>{out, rows, N, ld}, a, weight, K, [](float, float sum) { return from_float(sum); });
}

extern "C" __global__ void __launch_bounds__(THREADS)
    skinny_f32(float* out, const elem* a, const elem* weight, int rows, int N, int K, int ld) {
    any_product<false>(Result<float>{out, rows, N, ld}, a, weight, K, [](float, float sum) { return sum; });
}

extern "C" __global__ void __launch_bounds__(THREADS)
    skinny_add(float* out, const elem* a, const elem* weight, int rows, int N, int K, int ld) {
    any_product<true>(Result<float>{out, rows, N, ld}, a, weight, K,
                      [](float old, float sum) { return __fadd_rn(old, sum); });
}
