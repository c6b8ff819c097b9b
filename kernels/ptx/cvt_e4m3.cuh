// cvt to e4m3 (sm_89 and later): the nearest number, the even code of two; what is beyond 448 becomes it. In integers
// before sm_89, as qgemm/codec/e4m3.py has it.
#pragma once

#include "types.cuh"

namespace qgemm {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 890
// Of a normal number the code is the upper bits of the float, with another bias of the exponent; adding 2^14, of whose
// last place 2^-9 is the worth, makes the code of what is below.
__device__ inline u32 e4m3_code(float value) {
    const u32 bits = __float_as_uint(value), size = bits & 0x7fffffff;
    u32 code = min(((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3), 0x7eu);
    if (size < 0x3c800000) code = __float_as_uint(__fadd_rn(__uint_as_float(size), 16384.0f)) & 0xff;  // 2^-6
    return (size > 0x7f800000 ? 0x7fu : code) | (bits >> 24 & 0x80);
}
#endif

// Codes of two numbers, that of the first lowest.
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
