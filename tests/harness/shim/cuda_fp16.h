// What kernels use of CUDA's header of this name.
#pragma once

#include "small_float.h"

SMALL_FLOAT(half, half2, 5)
using __half = half;
using __half2 = half2;

inline half __float2half_rn(float value) { return half(value); }
inline half __float2half(float value) { return half(value); }
inline float __half2float(half value) { return float(double(value)); }
inline unsigned short __half_as_ushort(half value) { return value.bits; }
inline half __ushort_as_half(unsigned short bits) {
    half value;
    value.bits = bits;
    return value;
}

inline half2 __float2half2_rn(float value) { return {half(value), half(value)}; }
inline half2 __floats2half2_rn(float x, float y) { return {half(x), half(y)}; }
inline half2 __float22half2_rn(float2 values) { return {half(values.x), half(values.y)}; }
inline float2 __half22float2(half2 values) { return {__half2float(values.x), __half2float(values.y)}; }
inline half2 __half2half2(half value) { return {value, value}; }
inline half2 __halves2half2(half x, half y) { return {x, y}; }
inline half2 __low2half2(half2 a) { return {a.x, a.x}; }
inline half2 __high2half2(half2 a) { return {a.y, a.y}; }
// The sign alone changes, that of NaN as well.
inline half2 __hneg2(half2 a) {
    a.x.bits ^= 0x8000, a.y.bits ^= 0x8000;
    return a;
}
