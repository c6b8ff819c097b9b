// What NVRTC declares without an include: qualifiers, vector types, the indices of a thread, intrinsics.
//
// One host thread runs one CTA after the other (cta.h): shared memory is static, and so is the thread's index.
#pragma once

#include <fenv.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define __device__
#define __host__
#define __global__
#define __constant__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(BYTES) __attribute__((aligned(BYTES)))
#define __shared__ static

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

alignas(1024) inline unsigned char host_dynamic_smem[227 << 10];  // as much as a CTA can ask for

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

// ---------------------------------------------------------------- bits

template <class To, class From>
inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "the same number of bits");
    To to;
    memcpy(&to, &from, sizeof(to));
    return to;
}
inline unsigned __float_as_uint(float value) { return bits_as<unsigned>(value); }
inline int __float_as_int(float value) { return bits_as<int>(value); }
inline float __uint_as_float(unsigned bits) { return bits_as<float>(bits); }
inline float __int_as_float(int bits) { return bits_as<float>(bits); }

// Nibble i of the selector names the byte of b:a that becomes byte i; its top bit asks for that byte's sign instead.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t both = uint64_t(b) << 32 | a;
    unsigned word = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned nibble = selector >> 4 * i & 15, byte = both >> 8 * (nibble & 7) & 0xff;
        word |= (nibble & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << 8 * i;
    }
    return word;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return (uint64_t(high) << 32 | low) << (shift & 31) >> 32;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (uint64_t(high) << 32 | low) >> (shift & 31);
}
inline unsigned __vmaxu2(unsigned a, unsigned b) {
    const unsigned low = (a & 0xffff) < (b & 0xffff) ? b : a, high = a >> 16 < b >> 16 ? b : a;
    return (high & 0xffff0000u) | (low & 0xffff);
}
inline int __clz(int bits) { return bits ? __builtin_clz(bits) : 32; }
inline int __ffs(unsigned bits) { return __builtin_ffs(int(bits)); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline unsigned __umulhi(unsigned a, unsigned b) { return uint64_t(a) * b >> 32; }
inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; ++i) c += int(int8_t(a >> 8 * i)) * int8_t(b >> 8 * i);
    return c;
}

// ---------------------------------------------------------------- numbers; -ffp-contract=off keeps each rounding

inline float nan_of_cuda(float value) { return isnan(value) ? bits_as<float>(0x7fffffff) : value; }
inline float __fmul_rn(float a, float b) { return nan_of_cuda(a * b); }
inline float __fadd_rn(float a, float b) { return nan_of_cuda(a + b); }
inline float __fdiv_rn(float a, float b) { return nan_of_cuda(a / b); }
inline float __fsqrt_rn(float a) { return nan_of_cuda(sqrtf(a)); }
inline float __frcp_rn(float a) { return nan_of_cuda(1 / a); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fadd_rz(float a, float b) {
    const int before = fegetround();
    fesetround(FE_TOWARDZERO);
    const volatile float left = a, right = b;  // read, added and stored between the two calls
    const volatile float sum = left + right;
    fesetround(before);
    return sum;
}
// NaN becomes 0, and values beyond int its nearest end.
inline int __double_as_saturated_int(double whole) {
    return isnan(whole) ? 0 : whole < INT32_MIN ? INT32_MIN : whole > INT32_MAX ? INT32_MAX : int(whole);
}
inline int __float2int_rz(float value) { return __double_as_saturated_int(trunc(double(value))); }
inline int __float2int_rn(float value) { return __double_as_saturated_int(nearbyint(double(value))); }

template <class T>
inline T max(T a, T b) {
    return a < b ? b : a;
}
template <class T>
inline T min(T a, T b) {
    return b < a ? b : a;
}

// ---------------------------------------------------------------- memory

template <class T>
inline T __ldg(const T* from) {
    return *from;
}
template <class T>
inline T __ldcs(const T* from) {
    return *from;
}
template <class T>
inline T __ldcg(const T* from) {
    return *from;
}
template <class T>
inline void __stcs(T* to, T value) {
    *to = value;
}
// An address in shared memory has 32 bits: those from host_dynamic_smem on, and back.
inline size_t __cvta_generic_to_shared(const void* pointer) {
    return static_cast<const unsigned char*>(pointer) - host_dynamic_smem;
}
inline void* host_shared(unsigned address) { return host_dynamic_smem + int(address); }
// The threads of a CTA take turns on one host thread: nothing else writes between the load and the store.
template <class T>
inline T atomicOr(T* to, T value) {
    const T before = *to;
    *to |= value;
    return before;
}
inline void __threadfence() {}
template <class T, class U>
inline T atomicAdd(T* to, U value) {
    const T before = *to;
    *to += value;
    return before;
}
template <class T>
inline T atomicMax(T* to, T value) {
    const T before = *to;
    *to = max(before, value);
    return before;
}
template <class T, class U>
inline T atomicMin(T* to, U value) {
    const T before = *to;
    *to = min(before, T(value));
    return before;
}

#include "cta.h"
