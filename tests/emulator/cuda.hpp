// Enough of CUDA for a processor to run the kernels of cuda/: threads are fibers of one block, or cluster, at a time.
//
// A fiber runs until it waits for others: at __syncthreads, or at an operation of its warp (shuffle, vote, ldmatrix,
// mma); a warp runs until all of it waits for other warps. Asynchronous copies are done as late as may be: where their
// thread waits for them. tests/cuda_emulator.py says what that shows and what it cannot.
#pragma once
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define __constant__ static
#define __restrict__

typedef unsigned short elem;
typedef unsigned int u32;
typedef unsigned long long u64;

struct Index {
    unsigned x, y, z;
};
struct float2 {
    float x, y;
};
struct __align__(16) float4 {
    float x, y, z, w;
};
struct uint2 {
    unsigned x, y;
};
struct __align__(16) uint4 {
    unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) {
    return {x, y};
}
inline float4 make_float4(float x, float y, float z, float w) {
    return {x, y, z, w};
}
inline uint2 make_uint2(unsigned x, unsigned y) {
    return {x, y};
}
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
    return {x, y, z, w};
}

static Index threadIdx, blockIdx, blockDim, gridDim;
static Index cluster;  // its size in blocks

struct AnyPointer {  // an argument of a launch, of whatever type the kernel wants
    void* p;
    template <typename T>
    operator T*() const {
        return (T*)p;
    }
};

// ---------------------------------------------------------------- fibers

struct Group {  // threads that wait for each other
    int size = 0, arrived = 0;
    u64 generation = 0;
};
struct Copy {  // 16 bytes that are on their way into shared memory, with a thread's so many-th group
    unsigned group;
    u32 target;
    const void* source;
    bool valid;
};
struct Product {  // of tiles in shared memory, that is not multiplied yet, with a thread's so many-th group
    unsigned group;
    float* sums;
    u64 a, b;
    void (*run)(const Product&);
};
struct Barrier {  // that counts arrivals and bytes
    u32 address;
    Group group;
    long bytes = 0;
};
struct TileCopy {  // that is on its way to a block of the cluster
    u32 target;
    const void* map;
    int column, row;
    u32 barrier, rank;
};
struct Fiber {  // a thread of one block after another; starts with its context, goes on with its jump, which is quicker
    ucontext_t context;
    jmp_buf at;
    std::vector<char> stack;
    bool started = false, done = false, waited = false;  // the last: for the kernel before
    Group* waits_for = nullptr;  // to be of another generation than
    u64 generation = 0;
    unsigned exchanges = 0;    // operations of its warp that it took part in
    unsigned groups = 0;       // of copies that it committed
    std::vector<Copy> copies;  // that are not done
    unsigned product_groups = 0;
    std::vector<Product> products;
    explicit Fiber(void (*body)()) : stack(256 << 10) {
        getcontext(&context);
        context.uc_stack.ss_sp = stack.data();
        context.uc_stack.ss_size = stack.size();
        context.uc_link = nullptr;
        makecontext(&context, body, 0);
    }
};
struct Block {
    Fiber* fibers[1024] = {};
    Index place;
    Group all, named, warps[32];
    bool ended;
    unsigned char* shared = nullptr;
    std::vector<Barrier> barriers;
    // Of a warp's lanes, for every other operation: once all have come to one, all have read what the last but one
    // brought.
    u64 exchange[2][32][32];
    float factors[2][32][32][12];
};
static Block* blocks[16];  // of the cluster
static Block* block;       // whose thread runs
static Group cluster_group;
static std::vector<TileCopy> tile_copies;
static bool (*when_all_wait)();  // whether one of them can go on then; null where nothing could help
static jmp_buf scheduler;
static void (*kernel)(void** args);
static void** kernel_args;
static unsigned char* dynamic_shared;
static size_t dynamic_bytes;

static Fiber& this_fiber() {
    return *block->fibers[threadIdx.x];
}

static void yield() {
    if (!_setjmp(this_fiber().at)) _longjmp(scheduler, 1);
}

static void resume(Fiber& fiber) {
    if (_setjmp(scheduler)) return;
    if (fiber.started) _longjmp(fiber.at, 1);
    fiber.started = true;
    setcontext(&fiber.context);
}

static void release(Group& group) {
    group.arrived = 0;
    group.generation++;
}

static void wait(Group& group) {
    if (++group.arrived == group.size) return release(group);
    Fiber& fiber = this_fiber();
    fiber.waits_for = &group;
    fiber.generation = group.generation;
    yield();
}

static void leave(Group& group) {
    if (--group.size > 0 && group.arrived == group.size) release(group);
}

static bool can_run(const Fiber& fiber) {
    return !fiber.done && (!fiber.waits_for || fiber.waits_for->generation != fiber.generation);
}

static void fiber_main() {
    for (;;) {
        kernel(kernel_args);
        if (!this_fiber().waited) {
            fprintf(stderr, "thread %u of block (%u, %u, %u) ended without wait_for_kernel_before()\n", threadIdx.x,
                    blockIdx.x, blockIdx.y, blockIdx.z);
            abort();
        }
        leave(block->all);
        leave(block->warps[threadIdx.x / 32]);
        this_fiber().done = true;
        yield();
    }
}

// Threads of a warp in turns, until none of them can go on: whether one could.
static bool run_warp(unsigned first, unsigned end) {
    bool ran = false;
    for (bool again = true; again; ran |= again) {
        again = false;
        for (unsigned i = first; i < end; i++) {
            if (!can_run(*block->fibers[i])) continue;
            again = true;
            threadIdx = {i, 0, 0};
            resume(*block->fibers[i]);
        }
    }
    return ran;
}

static void select(Block& next) {
    block = &next;
    blockIdx = next.place;
    dynamic_shared = next.shared;
}

static void begin_block(Block& block, unsigned threads, Index place) {
    block.place = place;
    block.all = {(int)threads};
    block.named = {};
    for (auto& group : block.warps) group = {};
    block.ended = false;
    block.barriers.clear();
    block.barriers.reserve(256);
    memset(block.shared, 0xff, dynamic_bytes);  // NaN
    for (unsigned i = 0; i < threads; i++) {
        block.warps[i / 32].size++;
        if (!block.fibers[i]) block.fibers[i] = new Fiber(fiber_main);
        Fiber& fiber = *block.fibers[i];
        fiber.done = fiber.waited = false;
        fiber.waits_for = nullptr;
        fiber.exchanges = fiber.groups = fiber.product_groups = 0;
        fiber.copies.clear();
        fiber.products.clear();
    }
}

// Warps of a block in turns, until none can go on: whether one could.
static bool run_block(unsigned threads) {
    bool any = false;
    for (bool ran = true; ran; any |= ran) {
        ran = false;
        for (unsigned i = 0; i < threads; i += 32) ran |= run_warp(i, i + 32 < threads ? i + 32 : threads);
    }
    return any;
}

static void require_all_done(Block& block, unsigned threads) {
    unsigned left = 0;
    for (unsigned i = 0; i < threads; i++) left += !block.fibers[i]->done;
    if (left) {
        const Index& at = block.place;
        fprintf(stderr, "%u threads of block (%u, %u, %u) wait for ever\n", left, at.x, at.y, at.z);
        abort();
    }
}

// At (x, y, z) and behind.
static void run_cluster(unsigned threads, Index first) {
    const unsigned count = cluster.x * cluster.y;
    cluster_group = {(int)(count * threads)};
    for (unsigned i = 0; i < count; i++)
        begin_block(*blocks[i], threads, {first.x + i % cluster.x, first.y + i / cluster.x, first.z});
    for (bool ran = true; ran;) {
        ran = false;
        for (unsigned i = 0; i < count; i++) {
            select(*blocks[i]);
            ran |= run_block(threads);
            block->ended = block->all.size == 0;
        }
        if (!ran && when_all_wait) ran = when_all_wait();
    }
    for (unsigned i = 0; i < count; i++) require_all_done(*blocks[i], threads);
}

static void run_grid(const int* grid, int threads, int shared, void (*body)(void**), void** args) {
    kernel = body;
    kernel_args = args;
    gridDim = {(unsigned)grid[0], (unsigned)grid[1], (unsigned)grid[2]};
    blockDim = {(unsigned)threads, 1, 1};
    dynamic_bytes = shared;
    cluster = {(unsigned)grid[3], (unsigned)grid[4], 1};
    const unsigned count = cluster.x * cluster.y;
    for (unsigned i = 0; i < count; i++) {
        if (!blocks[i]) blocks[i] = new Block;
        blocks[i]->shared = (unsigned char*)aligned_alloc(128, (shared + 255) / 128 * 128);
    }
    for (unsigned z = 0; z < gridDim.z; z++)
        for (unsigned y = 0; y < gridDim.y; y += cluster.y)
            for (unsigned x = 0; x < gridDim.x; x += cluster.x) run_cluster(threads, {x, y, z});
    for (unsigned i = 0; i < count; i++) free(blocks[i]->shared);
}

// ---------------------------------------------------------------- a block, a warp

static void __syncthreads() {
    wait(block->all);
}
static int __syncthreads_or(int value) {
    static int any;
    wait(block->all);
    any = 0;
    wait(block->all);
    any |= value != 0;
    wait(block->all);
    return any;
}
static int __syncthreads_and(int value) {
    return !__syncthreads_or(!value);
}
static int __syncthreads_count(int value) {
    static int count;
    wait(block->all);
    count = 0;
    wait(block->all);
    count += value != 0;
    wait(block->all);
    return count;
}
inline void __threadfence() {}
inline void __threadfence_block() {}

static unsigned lane_id() {
    return threadIdx.x % 32;
}
static void wait_warp() {
    wait(block->warps[threadIdx.x / 32]);
}
inline void __syncwarp(unsigned = ~0u) {
    wait_warp();
}

// Where the lanes of a warp lay what they give to the operation that this thread is at, one of two places in turns.
static unsigned next_exchange() {
    return this_fiber().exchanges++ % 2;
}

// What every lane of the warp gives; to be read before the next operation of the warp.
template <typename T>
static u64* gather(T value) {
    static_assert(sizeof(T) <= 8, "one word each");
    auto* lanes = block->exchange[next_exchange()][threadIdx.x / 32];
    lanes[lane_id()] = 0;
    memcpy(&lanes[lane_id()], &value, sizeof(T));
    wait_warp();
    return lanes;
}
template <typename T>
static T taken(u64 word) {
    T value;
    memcpy(&value, &word, sizeof(T));
    return value;
}
template <typename T>
static T __shfl_xor_sync(unsigned, T value, int mask) {
    return taken<T>(gather(value)[lane_id() ^ mask]);
}
template <typename T>
static T __shfl_sync(unsigned, T value, int lane) {
    return taken<T>(gather(value)[lane % 32]);
}
template <typename T>
static T __shfl_down_sync(unsigned, T value, int delta) {
    unsigned lane = lane_id() + delta;
    return taken<T>(gather(value)[lane < 32 ? lane : lane_id()]);
}
template <typename T>
static T __shfl_up_sync(unsigned, T value, int delta) {
    int lane = (int)lane_id() - delta;
    return taken<T>(gather(value)[lane >= 0 ? lane : lane_id()]);
}
static unsigned __ballot_sync(unsigned, int value) {
    unsigned bits = 0;
    auto* lanes = gather(value);
    for (int i = 0; i < 32; i++) bits |= (unsigned)(taken<int>(lanes[i]) != 0) << i;
    return bits;
}
static int __any_sync(unsigned m, int value) {
    return __ballot_sync(m, value) != 0;
}
static int __all_sync(unsigned m, int value) {
    return __ballot_sync(m, !value) == 0;
}
template <typename T>
static unsigned __match_any_sync(unsigned, T value) {
    unsigned bits = 0;
    auto* lanes = gather(value);
    for (int i = 0; i < 32; i++) bits |= (unsigned)(taken<T>(lanes[i]) == value) << i;
    return bits;
}
template <typename T>
static T atomicAdd(T* p, T value) {
    T old = *p;
    *p += value;
    return old;
}
template <typename T>
static T atomicMin(T* p, T value) {
    T old = *p;
    if (value < old) *p = value;
    return old;
}
template <typename T>
static T atomicMax(T* p, T value) {
    T old = *p;
    if (value > old) *p = value;
    return old;
}
template <typename T>
static T atomicOr(T* p, T value) {
    T old = *p;
    *p |= value;
    return old;
}
template <typename T>
static T atomicExch(T* p, T value) {
    T old = *p;
    *p = value;
    return old;
}

// ---------------------------------------------------------------- arithmetic

inline float __fmul_rn(float a, float b) {
    return a * b;
}
inline float __fadd_rn(float a, float b) {
    return a + b;
}
inline float __fsub_rn(float a, float b) {
    return a - b;
}
inline float __fdiv_rn(float a, float b) {
    return a / b;
}
inline float __fmaf_rn(float a, float b, float c) {
    return fmaf(a, b, c);
}
inline float __frcp_rn(float a) {
    return 1.0f / a;
}
inline float __frsqrt_rn(float a) {
    return (float)(1.0 / sqrt((double)a));
}
inline float __fsqrt_rn(float a) {
    return sqrtf(a);
}
inline float __fdividef(float a, float b) {
    return a / b;
}
inline float __expf(float a) {
    return expf(a);
}
inline double __dmul_rn(double a, double b) {
    return a * b;
}
inline double __dadd_rn(double a, double b) {
    return a + b;
}
inline float __int_as_float(int i) {
    return taken<float>((u32)i);
}
inline float __uint_as_float(unsigned i) {
    return taken<float>(i);
}
inline int __float_as_int(float f) {
    u32 i;
    memcpy(&i, &f, 4);
    return (int)i;
}
inline unsigned __float_as_uint(float f) {
    u32 i;
    memcpy(&i, &f, 4);
    return i;
}
inline float __uint2float_rn(unsigned i) {
    return (float)i;
}
inline float __int2float_rn(int i) {
    return (float)i;
}
inline unsigned __float2uint_rz(float f) {
    return (unsigned)f;
}
inline u64 __float2ull_rz(float f) {
    return (u64)f;
}
inline u64 __float2ull_rn(float f) {
    return (u64)llrintf(f);
}
inline u64 __double2ull_rz(double f) {
    return (u64)f;
}
inline u64 __double2ull_ru(double f) {
    return (u64)ceil(f);
}
inline double __ull2double_rn(u64 i) {
    return (double)i;
}
// PTX ISA, "prmt": bytes of x and then of y, by the digits of `selector`.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    u64 bytes = (u64)y << 32 | x;
    unsigned picked = 0;
    for (int i = 0; i < 4; i++) picked |= (unsigned)(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return picked;
}
inline unsigned __umulhi(unsigned a, unsigned b) {
    return (unsigned)((u64)a * b >> 32);
}
inline int __popc(unsigned v) {
    return __builtin_popcount(v);
}
inline int __ffs(int v) {
    return __builtin_ffs(v);
}
inline int __clz(int v) {
    return v ? __builtin_clz(v) : 32;
}
template <typename T>
inline T __ldg(const T* p) {
    return *p;
}
template <typename T>
inline T __ldcg(const T* p) {
    return *p;
}
#define EXTREMES(T)           \
    inline T min(T a, T b) {  \
        return b < a ? b : a; \
    }                         \
    inline T max(T a, T b) {  \
        return a < b ? b : a; \
    }
EXTREMES(int)
EXTREMES(unsigned)
EXTREMES(long long)
EXTREMES(u64)

// ---------------------------------------------------------------- what the kernels write in PTX

inline void wait_for_kernel_before() {
    this_fiber().waited = true;
}
inline void start_next_kernel() {}

#ifdef ELEM_BF16
inline float to_float(elem e) {
    return __uint_as_float((u32)e << 16);
}
inline elem from_float(float x) {
    u32 bits = __float_as_uint(x);
    if (x != x) return 0x7fff;
    return (elem)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
#else
inline float to_float(elem e) {
    return (float)taken<_Float16>(e);
}
inline elem from_float(float x) {
    _Float16 h = (_Float16)x;
    elem e;
    memcpy(&e, &h, 2);
    return e;
}
#endif
inline u32 pack(float lo, float hi) {
    return from_float(lo) | (u32)from_float(hi) << 16;
}
inline float exp2_fast(float x) {
    return x < -126.0f ? 0.0f : exp2f(x);
}

inline u32 computed_again(u32 x) {
    return x;
}
inline u32 shared_address(const void* p) {
    return (u32)((const unsigned char*)p - dynamic_shared);
}
inline unsigned char* at_shared(u32 address, size_t bytes) {
    if (address + bytes > dynamic_bytes) {
        fprintf(stderr, "shared address %u past %zu bytes\n", address, dynamic_bytes);
        abort();
    }
    return dynamic_shared + address;
}
inline void copy_async(u32 target, const void* source, bool valid) {
    at_shared(target, 16);
    this_fiber().copies.push_back({this_fiber().groups, target, source, valid});
}
inline void commit_copies() {
    this_fiber().groups++;
}
template <int PENDING>
inline void wait_for_copies() {
    Fiber& fiber = this_fiber();
    size_t count = 0;
    for (; count < fiber.copies.size() && fiber.copies[count].group + PENDING < fiber.groups; count++) {
        const Copy& copy = fiber.copies[count];
        unsigned char* p = at_shared(copy.target, 16);
        if (copy.valid)
            memcpy(p, copy.source, 16);
        else
            memset(p, 0, 16);
    }
    fiber.copies.erase(fiber.copies.begin(), fiber.copies.begin() + count);
}

inline uint4 load_shared(u32 address) {
    uint4 v;
    memcpy(&v, at_shared(address, 16), 16);
    return v;
}
inline u32 load_shared_word(u32 address) {
    u32 word;
    memcpy(&word, at_shared(address, 4), 4);
    return word;
}
inline void store_shared(u32 address, unsigned short v) {
    memcpy(at_shared(address, 2), &v, 2);
}
inline void store_shared(u32 address, uint4 v) {
    memcpy(at_shared(address, 16), &v, 16);
}

static u32 matrix_word(const u64* lanes, int matrix, int row, int column) {
    elem e;
    memcpy(&e, at_shared((u32)lanes[matrix * 8 + row] + column * 2, 2), 2);
    return e;
}
static void load_matrices(u32 (&r)[4], u32 address) {
    auto* lanes = gather(address);
    int row = lane_id() / 4, column = lane_id() % 4 * 2;
    for (int i = 0; i < 4; i++)
        r[i] = matrix_word(lanes, i, row, column) | matrix_word(lanes, i, row, column + 1) << 16;
}
template <int N>
static void load_matrices_transposed(u32 (&r)[N], u32 address) {
    auto* lanes = gather(address);
    int column = lane_id() / 4, row = lane_id() % 4 * 2;
    for (int i = 0; i < N; i++)
        r[i] = matrix_word(lanes, i, row, column) | matrix_word(lanes, i, row + 1, column) << 16;
}

static float element_of(u32 pair, int which) {
    return to_float((elem)(pair >> 16 * which));
}
static float half_of(u32 pair, int which) {
    return (float)taken<_Float16>(pair >> 16 * which & 0xffff);
}
inline u32 pack_halves(float lo, float hi) {
    _Float16 pair[2] = {(_Float16)lo, (_Float16)hi};
    u32 bits;
    memcpy(&bits, pair, 4);
    return bits;
}
// PTX ISA, "cvt": e4m3 has 4 bits of exponent, which count from 7, and 3 of mantissa; 0x7f is NaN.
inline float e4m3_of(u32 code) {
    int exponent = code >> 3 & 15, mantissa = code & 7;
    float x = exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
    if ((code & 0x7f) == 0x7f) x = NAN;
    return code & 0x80 ? -x : x;
}
inline void halves_of(u32& first, u32& second, u32 codes) {
    first = pack_halves(e4m3_of(codes & 0xff), e4m3_of(codes >> 8 & 0xff));
    second = pack_halves(e4m3_of(codes >> 16 & 0xff), e4m3_of(codes >> 24));
}

// PTX ISA, "Matrix fragments for mma.m16n8k16 with floating point type": who holds which element of a and b.
template <typename ValueOf>
static void multiply_add_values(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, ValueOf value_of) {
    u32 own[6] = {a[0], a[1], a[2], a[3], b0, b1};
    auto* lanes = block->factors[next_exchange()][threadIdx.x / 32];
    for (int i = 0; i < 12; i++) lanes[lane_id()][i] = value_of(own[i / 2], i % 2);
    wait_warp();
    for (int j = 0; j < 4; j++) {
        int row = lane_id() / 4 + j / 2 * 8, column = lane_id() % 4 * 2 + j % 2;
        float sum = c[j];
        for (int k = 0; k < 16; k++) {
            float left = lanes[row % 8 * 4 + k % 8 / 2][(row / 8 + k / 8 * 2) * 2 + k % 2];
            float right = lanes[column * 4 + k % 8 / 2][(4 + k / 8) * 2 + k % 2];
            sum = fmaf(left, right, sum);
        }
        c[j] = sum;
    }
}
static void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    multiply_add_values(c, a, b0, b1, element_of);
}
static void multiply_add_halves(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    multiply_add_values(c, a, b0, b1, half_of);
}
