// Operand A of the tensor cores from levels of W: w = scale * level + minimum, in half.
#pragma once

#include "fragment.cuh"

namespace qgemm {

// Scale and minimum of a group of weights in rows g (r 0) and g + 8 (r 1). Without MINIMUM, w = scale * level. Levels
// are exact in half. Scale, minimum and weight are each rounded once.
template <bool MINIMUM>
struct GroupScale {
    half2 scale, minimum;

    GroupScale() = default;
    __device__ GroupScale(float2 d, float2 m) : scale(__float22half2_rn(d)), minimum(__float22half2_rn(m)) {}
    __device__ u32 weights(half2 levels, int r) const {
        const half2 d = r ? __high2half2(scale) : __low2half2(scale);
        const half2 m = r ? __high2half2(minimum) : __low2half2(minimum);
        const half2 w = MINIMUM ? __hfma2(levels, d, m) : __hmul2(levels, d);
        return *reinterpret_cast<const u32*>(&w);
    }
};

// Operand A of a step: the lane's eight weights.
template <bool MINIMUM>
__device__ inline Fragment dequantize(const Fragment& levels, const GroupScale<MINIMUM>& group) {
    Fragment a;
#pragma unroll
    for (int i = 0; i < 4; ++i) a.a[i] = as_half2(group.weights(levels.a[i], i % 2));
    return a;
}

// Broadcasts a value of lane `lane` of the quad: a pair of rows, or a GroupScale. HAS_MINIMUM: its minimum as well.
__device__ inline half2 shfl_quad(half2 pair, int lane) { return __shfl_sync(~0u, pair, lane, 4); }
template <bool HAS_MINIMUM, bool MINIMUM>
__device__ inline GroupScale<MINIMUM> shfl_quad(const GroupScale<MINIMUM>& group, int lane) {
    GroupScale<MINIMUM> result;
    result.scale = shfl_quad(group.scale, lane);
    if constexpr (HAS_MINIMUM) result.minimum = shfl_quad(group.minimum, lane);
    return result;
}

}  // namespace qgemm
