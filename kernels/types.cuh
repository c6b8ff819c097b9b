// Scalar types and exact conversions. NVRTC has neither <stdint.h> nor the host's headers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ptx/rcp.cuh"

// The offset of a member, as a constant. NVRTC 12 lacks the built-in, host compilers lack __INTADDR__.
#ifdef __CUDACC_RTC__
#define OFFSET_OF(type, member) __INTADDR__(&static_cast<type*>(nullptr)->member)
#else
#define OFFSET_OF(type, member) __builtin_offsetof(type, member)
#endif

namespace qgemm {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;
using bf16 = __nv_bfloat16;

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(half value) { return __half2float(value); }
__device__ inline float to_float(bf16 value) { return __bfloat162float(value); }

// Rounded to nearest even, as NumPy's astype rounds.
template <class T>
__device__ T from_float(float value);
template <>
__device__ inline float from_float<float>(float value) {
    return value;
}
template <>
__device__ inline half from_float<half>(float value) {
    return __float2half_rn(value);
}
template <>
__device__ inline bf16 from_float<bf16>(float value) {
    return __float2bfloat16_rn(value);
}

// 1 / value, off by at most one place.
__device__ inline float reciprocal(float value) { return rcp_approx_ftz(value); }

// 2^e, e in -126..127.
__device__ inline float two_to(int e) { return __int_as_float((e + 127) << 23); }

// Copies N words, aligned to their total size, in one load.
template <int N>
__device__ inline void load_words(u32* to, const u32* from);
template <>
__device__ inline void load_words<1>(u32* to, const u32* from) {
    *to = *from;
}
template <>
__device__ inline void load_words<2>(u32* to, const u32* from) {
    *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(from);
}
template <>
__device__ inline void load_words<4>(u32* to, const u32* from) {
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
}

}  // namespace qgemm
