// The CUDA kernels behind cache_write_cuda.write_cache_cuda: one for every pair of source and cache dtype.
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <type_traits>

// What a kernel is launched with. launch.py reads the members' order and types from here, one a line.
// Strides count elements. The cache is in the order NHD by its strides. A scale of null is 1.
struct CacheWriteParams {
    const void* key;
    const void* value;
    void* kv_cache;
    const float* k_scale;
    const float* v_scale;
    const int64_t* slot_mapping;
    int64_t num_slots;
    int64_t key_token_stride;
    int64_t key_head_stride;
    int64_t value_token_stride;
    int64_t value_head_stride;
    int64_t cache_kv_stride;
    int64_t cache_block_stride;
    int64_t cache_slot_stride;
    int64_t cache_head_stride;
    uint32_t num_tokens;
    uint32_t num_kv_heads;
    uint32_t head_dim;
    uint32_t block_size;
    uint32_t k_scale_stride;
    uint32_t v_scale_stride;
    uint32_t wide;
};

constexpr int THREADS = 256;  // cache_write_cuda.py has the same number

struct E4M3 {
    static constexpr __nv_fp8_interpretation_t FORMAT = __NV_E4M3;
    uint8_t bits;
};
struct E5M2 {
    static constexpr __nv_fp8_interpretation_t FORMAT = __NV_E5M2;
    uint8_t bits;
};
template <typename C>
constexpr bool IS_FP8 = std::is_same_v<C, E4M3> || std::is_same_v<C, E5M2>;

constexpr int smaller(int a, int b) { return a < b ? a : b; }

// N elements that are moved by as few instructions as there are 16 bytes.
template <typename T, int N>
struct alignas(smaller(16, sizeof(T) * N)) Run {
    T x[N];
};

__device__ float wider(float x) { return x; }
__device__ float wider(__half x) { return __half2float(x); }
__device__ float wider(__nv_bfloat16 x) { return __bfloat162float(x); }

__device__ void round_to(float& to, float x) { to = x; }
__device__ void round_to(__half& to, float x) { to = __float2half_rn(x); }
__device__ void round_to(__nv_bfloat16& to, float x) { to = __float2bfloat16_rn(x); }

// What the cache holds of a run; scale may be null.
template <typename S, typename C, int N>
__device__ Run<C, N> as_stored(const Run<S, N>& run, const float* scale) {
    if constexpr (std::is_same_v<S, C>) {
        return run;
    } else {
        Run<C, N> out;
        if constexpr (IS_FP8<C>) {
            float x[N];
            const float divisor = scale == nullptr ? 1.0f : *scale;
#pragma unroll
            for (int i = 0; i < N; ++i) x[i] = scale == nullptr ? wider(run.x[i]) : wider(run.x[i]) / divisor;
            if constexpr (N == 1) {
                out.x[0].bits = __nv_cvt_float_to_fp8(x[0], __NV_SATFINITE, C::FORMAT);
            } else {
#pragma unroll
                for (int i = 0; i < N; i += 2) {
                    // One instruction rounds two from sm_89 on; earlier, the header does it in software.
                    const auto pair = __nv_cvt_float2_to_fp8x2({x[i], x[i + 1]}, __NV_SATFINITE, C::FORMAT);
                    out.x[i].bits = pair & 0xFF;
                    out.x[i + 1].bits = pair >> 8;
                }
            }
        } else {
#pragma unroll
            for (int i = 0; i < N; ++i) round_to(out.x[i], wider(run.x[i]));
        }
        return out;
    }
}

// A thread writes one run of N elements of a head's key, and the same of its value.
template <typename S, typename C, int N>
__device__ void write_run(const CacheWriteParams& p) {
    // Runs and slots are counted in 32 bits, which the launcher sees to: a 64-bit division takes a hundred instructions.
    const uint32_t run = blockIdx.x * THREADS + threadIdx.x;
    const uint32_t runs_of_head = p.head_dim / N;
    const uint32_t runs_of_token = p.num_kv_heads * runs_of_head;
    const uint32_t token = run / runs_of_token, in_token = run % runs_of_token;
    if (token >= p.num_tokens) return;
    const uint32_t head = in_token / runs_of_head, dim = in_token % runs_of_head * N;
    // Loaded whatever the slot is, so that these loads need not wait for that one.
    const S* key = static_cast<const S*>(p.key) + token * p.key_token_stride + head * p.key_head_stride + dim;
    const S* value = static_cast<const S*>(p.value) + token * p.value_token_stride + head * p.value_head_stride + dim;
    const auto k = *reinterpret_cast<const Run<S, N>*>(key);
    const auto v = *reinterpret_cast<const Run<S, N>*>(value);
    const int64_t slot = p.slot_mapping[token];
    if (slot < 0 || slot >= p.num_slots) return;

    const uint32_t block = uint32_t(slot) / p.block_size, in_block = uint32_t(slot) % p.block_size;
    C* target = static_cast<C*>(p.kv_cache) + block * p.cache_block_stride + in_block * p.cache_slot_stride;
    target += head * p.cache_head_stride + dim;
    const float* k_scale = p.k_scale == nullptr ? nullptr : p.k_scale + head * p.k_scale_stride;
    const float* v_scale = p.v_scale == nullptr ? nullptr : p.v_scale + head * p.v_scale_stride;
    *reinterpret_cast<Run<C, N>*>(target) = as_stored<S, C, N>(k, k_scale);
    *reinterpret_cast<Run<C, N>*>(target + p.cache_kv_stride) = as_stored<S, C, N>(v, v_scale);
}

#define KERNEL(S_NAME, S, C_NAME, C)                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                            \
        cache_write_##S_NAME##_##C_NAME(const __grid_constant__ CacheWriteParams p) {                                \
        if (p.wide) {                                                                                                \
            write_run<S, C, 16 / sizeof(S)>(p);                                                                     \
        } else {                                                                                                     \
            write_run<S, C, 1>(p);                                                                                  \
        }                                                                                                            \
    }
#define KERNELS(S_NAME, S)                     \
    KERNEL(S_NAME, S, float32, float)          \
    KERNEL(S_NAME, S, float16, __half)         \
    KERNEL(S_NAME, S, bfloat16, __nv_bfloat16) \
    KERNEL(S_NAME, S, float8_e4m3fn, E4M3)     \
    KERNEL(S_NAME, S, float8_e5m2, E5M2)

KERNELS(float32, float)
KERNELS(float16, __half)
KERNELS(bfloat16, __nv_bfloat16)
