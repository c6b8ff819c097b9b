// Floats whose every operation rounds: no product and sum are contracted to a fused multiply-add, as in NumPy and in C.
#pragma once

#include "types.cuh"

namespace qgemm {

struct Rounded {
    float value;

    Rounded() = default;
    __device__ Rounded(float value) : value(value) {}
};

__device__ inline Rounded operator+(Rounded a, Rounded b) { return __fadd_rn(a.value, b.value); }
__device__ inline Rounded operator-(Rounded a, Rounded b) { return __fadd_rn(a.value, -b.value); }
__device__ inline Rounded operator*(Rounded a, Rounded b) { return __fmul_rn(a.value, b.value); }
__device__ inline Rounded operator/(Rounded a, Rounded b) { return __fdiv_rn(a.value, b.value); }
__device__ inline Rounded operator-(Rounded a) { return -a.value; }
__device__ inline Rounded& operator+=(Rounded& a, Rounded b) { return a = a + b; }
__device__ inline Rounded& operator-=(Rounded& a, Rounded b) { return a = a - b; }
__device__ inline bool operator<(Rounded a, Rounded b) { return a.value < b.value; }
__device__ inline bool operator>(Rounded a, Rounded b) { return a.value > b.value; }
__device__ inline bool operator>=(Rounded a, Rounded b) { return a.value >= b.value; }
__device__ inline bool operator!=(Rounded a, Rounded b) { return a.value != b.value; }
__device__ inline bool operator==(Rounded a, Rounded b) { return a.value == b.value; }

__device__ inline Rounded magnitude(Rounded a) { return fabsf(a.value); }
__device__ inline Rounded square_root(Rounded a) { return __fsqrt_rn(a.value); }
__device__ inline Rounded as_half(Rounded a) { return __half2float(__float2half_rn(a.value)); }

// 1 / d, 0 where d is 0.
__device__ inline Rounded reciprocal_or_0(Rounded d) { return d == 0 ? Rounded(0) : Rounded(1) / d; }

// The nearest integer, ties to even, by adding 1.5 * 2^23 as ggml does, so that too large values become the same
// integers. NaN becomes 0, as the bits of a CPU's NaN do.
__device__ inline int nearest_int(Rounded value) {
    const float sum = (value + 12582912.0f).value;
    return isnan(sum) ? 0 : (__float_as_int(sum) & 0x007fffff) - 0x00400000;
}
__device__ inline int clipped(int value, int least, int most) { return max(least, min(value, most)); }

}  // namespace qgemm
