// cvt to e4m3 (sm_89 and later): the nearest number, halves to the even code, saturating at 448. Before sm_89 it is
// computed in integers, as in qgemm/codec/e4m3.py.
#pragma once

#include "types.cuh"

namespace qgemm {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 890
// The code of a normal number is the upper bits of the float, with another exponent bias. The code of a smaller number
// counts multiples of 2^-9, the last place of 2^14: adding 2^14 leaves it in the low bits.
__device__ inline u32 e4m3_code(float value) {
    const u32 bits = __float_as_uint(value), size = bits & 0x7fffffff;
    u32 code = min(((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3), 0x7eu);
    if (size < 0x3c800000) code = __float_as_uint(__fadd_rn(__uint_as_float(size), 16384.0f)) & 0xff;  // 2^-6
    return (size > 0x7f800000 ? 0x7fu : code) | (bits >> 24 & 0x80);
}
#endif

// The codes of two numbers; the first is in the low byte.
__device__ inline u32 e4m3x2(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    u16 codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
    return codes;
#else
    return e4m3_code(first) | e4m3_code(second) << 8;
#endif
}
__device__ inline u32 e4m3x2(half2 pair) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    u16 codes;
    asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(codes) : "r"(*reinterpret_cast<const u32*>(&pair)));
    return codes;
#else
    const float2 values = __half22float2(pair);
    return e4m3x2(values.x, values.y);
#endif
}

}  // namespace qgemm
