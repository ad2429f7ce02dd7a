// Products of at most 16 rows, at the rate at which a weight comes from memory: out (+)= a weight^T.
//
// skinny.cuh says how. One warp loads the weight and one the activations.
//
//   out      elem or float32 [rows, ld], ld >= N; nothing but its [rows, N] is touched
//   a        elem [rows, K], 1 <= rows <= 16, K a multiple of 8, each row 16-byte aligned
//   weight   elem [N, K], likewise; read while the kernel before still runs
//
// Launch: ceil(N / ROWS) blocks of (MULTIPLIERS + 2) * 32 threads, STAGES (ROWS + rows) ROW_BYTES of dynamic shared
// memory, with the constants of Low, or of High where the name says so (skinny.cuh).
// NumPy: out[:, :N] = a @ weight.T, or +=, summed in float32 and rounded once.
#include "skinny.cuh"

namespace {

template <typename T>
constexpr int THREADS = (T::MULTIPLIERS + 2) * WARP;

template <typename Number>
struct Result {
    Number* out;
    int rows, N, ld;

    __device__ __forceinline__ Number* at(int row, int column) const {
        return out + static_cast<size_t>(row) * ld + column;
    }
};

// Written is finish(old, sum); OLD: it needs what was there.
template <typename T, int TILES, bool OLD, typename Number, typename Finish>
__device__ __forceinline__ void product(const Result<Number>& result, const elem* a, const elem* weight, int K,
                                        Finish finish) {
    extern __shared__ __align__(16) unsigned char shared[];
    constexpr int STAGES = T::STAGES, COLUMNS = T::COLUMNS, ROW_BYTES = T::ROW_BYTES;
    const int warp = threadIdx.x / WARP, rows = result.rows, N = result.N;
    const int first = blockIdx.x * T::ROWS, num_stages = (K + COLUMNS - 1) / COLUMNS;
    const bool multiplies = warp < T::MULTIPLIERS, loads_weight = warp == T::MULTIPLIERS;
    // A stage: rows of the weight (those behind its last hold anything, as what comes of them is not written), then
    // rows of activations.
    const u32 ring = shared_address(shared), stage_bytes = (T::ROWS + rows) * ROW_BYTES;
    const u32 activations = T::ROWS * ROW_BYTES;
    const Source<T> source = loads_weight
                                 ? Source<T>{weight + static_cast<size_t>(first) * K, min(T::ROWS, N - first), K}
                                 : Source<T>{a, rows, K};
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
    float old[TILES][4] = {}, sums[TILES][4] = {};
    const int first_of_warp = first + warp * WARP_ROWS;
    if (OLD && multiplies)
        visit_sums<TILES>(first_of_warp, rows, N,
                          [&](int tile, int i, int row, int column) { old[tile][i] = *result.at(row, column); });
    for (int stage = 0; stage < num_stages; stage++) {
        if (stage == 0)
            wait_for_copies<STAGES - 1>();
        else
            wait_for_copies<STAGES - 2>();
        __syncthreads();  // this stage has come, and the one before is read
        if (multiplies) {
            u32 tiles[TILES];
#pragma unroll
            for (int i = 0; i < TILES; i++) tiles[i] = place(stage) + activations + tile_of_lane(i, rows, ROW_BYTES);
            const int columns = min(COLUMNS, K - stage * COLUMNS);
            multiply_stage<T>(sums, place(stage) + weight_of_lane<T>(), tiles, (columns + PAIR - 1) / PAIR);
        } else if (stage > 0) {
            load(stage - 1 + STAGES);
        }
    }
    if (multiplies)
        visit_sums<TILES>(first_of_warp, rows, N, [&](int tile, int i, int row, int column) {
            *result.at(row, column) = finish(old[tile][i], sums[tile][i]);
        });
}

struct Rounded {
    __device__ __forceinline__ elem operator()(float, float sum) const { return from_float(sum); }
};
struct Exact {
    __device__ __forceinline__ float operator()(float, float sum) const { return sum; }
};
struct Added {
    __device__ __forceinline__ float operator()(float old, float sum) const { return __fadd_rn(old, sum); }
};

template <typename T, bool OLD, typename Number, typename Finish>
__device__ __forceinline__ void any_product(const Result<Number>& result, const elem* a, const elem* weight, int K,
                                            Finish finish) {
    if (result.rows <= TILE)
        product<T, 1, OLD>(result, a, weight, K, finish);
    else
        product<T, 2, OLD>(result, a, weight, K, finish);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS<Low>, 2)
    skinny_elem_low(elem* out, const elem* a, const elem* weight, int rows, int N, int K, int ld) {
    any_product<Low, false>(Result<elem>{out, rows, N, ld}, a, weight, K, Rounded());
}

extern "C" __global__ void __launch_bounds__(THREADS<High>, 2)
    skinny_elem_high(elem* out, const elem* a, const elem* weight, int rows, int N, int K, int ld) {
    any_product<High, false>(Result<elem>{out, rows, N, ld}, a, weight, K, Rounded());
}

extern "C" __global__ void __launch_bounds__(THREADS<Low>, 2)
    skinny_f32_low(float* out, const elem* a, const elem* weight, int rows, int N, int K, int ld) {
    any_product<Low, false>(Result<float>{out, rows, N, ld}, a, weight, K, Exact());
}

extern "C" __global__ void __launch_bounds__(THREADS<High>, 2)
    skinny_f32_high(float* out, const elem* a, const elem* weight, int rows, int N, int K, int ld) {
    any_product<High, false>(Result<float>{out, rows, N, ld}, a, weight, K, Exact());
}

extern "C" __global__ void __launch_bounds__(THREADS<Deep>, 1)
    skinny_add_deep(float* out, const elem* a, const elem* weight, int rows, int N, int K, int ld) {
    any_product<Deep, true>(Result<float>{out, rows, N, ld}, a, weight, K, Added());
}

extern "C" __global__ void __launch_bounds__(THREADS<Low>, 2)
    skinny_add_low(float* out, const elem* a, const elem* weight, int rows, int N, int K, int ld) {
    any_product<Low, true>(Result<float>{out, rows, N, ld}, a, weight, K, Added());
}
