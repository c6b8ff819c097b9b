// What kernels use of CUDA's header of this name.
#pragma once

#include "small_float.h"

SMALL_FLOAT(__nv_bfloat16, __nv_bfloat162, 8)

inline __nv_bfloat16 __float2bfloat16_rn(float value) { return __nv_bfloat16(value); }
inline float __bfloat162float(__nv_bfloat16 value) { return float(double(value)); }
inline __nv_bfloat162 __float2bfloat162_rn(float value) { return {__nv_bfloat16(value), __nv_bfloat16(value)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__nv_bfloat16(x), __nv_bfloat16(y)}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 values) { return __floats2bfloat162_rn(values.x, values.y); }
inline float2 __bfloat1622float2(__nv_bfloat162 values) {
    return {__bfloat162float(values.x), __bfloat162float(values.y)};
}
