// fill_random: a matrix of random weights, made where it lies among the parameters.
//
//   w[r, c] = elem(bf16(float(int(word)) * scale)), i = (first + r) * width + c
//   word: word i % 4 of Philox4x32-10 with the key (seed, tensor) and the counter (i / 4, 0, 0, 0)
//
//   w  elem [rows, width]    pitch elements from a row to the next; what lies between stays as it is
//
// first: the row of the tensor with which w begins.
// Launch: rows * width / 8 threads in a grid of one dimension; block any size; no shared memory. width and pitch are
// multiples of 8, w is 16-byte aligned; seed, tensor and first are not negative; (first + rows) * width is at most 2^34
//
// The product is rounded to float32 and then to bf16, as the weights of a checkpoint are stored: fp16 holds what it
// would after loading them.
// Must equal: random_values in tinyvllm_cli/model/random_weights.py, bit for bit.
#include "common.cuh"
#include "philox.cuh"

// The nearest number of bf16, ties to even; x is finite.
__device__ __forceinline__ float round_to_bf16(float x) {
    const u32 bits = __float_as_uint(x);
    return __uint_as_float((bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u);
}

extern "C" __global__ void fill_random(elem* w, int rows, int width, int pitch, int seed, int tensor, int first,
                                       float scale) {
    start_next_kernel();
    wait_for_kernel_before();
    const u32 group = blockIdx.x * blockDim.x + threadIdx.x;  // of 8 elements of a row
    const u32 groups = width / ELEMS_PER_16B;                 // of a row
    if (group >= rows * groups) return;
    const uint2 key = make_uint2(seed, tensor);
    float v[ELEMS_PER_16B];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const uint4 words = philox4x32_10(make_uint4(2 * (first * groups + group) + half, 0, 0, 0), key);
        const u32 of_half[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int j = 0; j < 4; j++)
            v[4 * half + j] = round_to_bf16(__fmul_rn(__int2float_rn(static_cast<int>(of_half[j])), scale));
    }
    store8(w + static_cast<i64>(group / groups) * pitch + group % groups * ELEMS_PER_16B, v);
}
