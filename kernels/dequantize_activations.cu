// dequantize_activations: q8_1 blocks, span by span [along][m] -> x [m, k] = d * q, row-major. Finite values beyond Out's
// range become its largest: d is rounded, so that d * 127 may exceed what the largest x was.
//
// A thread owns two columns of a token.
// Template: Out (float, half).
#include "pdl.cuh"

__device__ inline float largest_of(float) { return 3.4028234663852886e38f; }
__device__ inline float largest_of(half) { return 65504.0f; }

extern "C" __global__ void __launch_bounds__(128)
    dequantize_activations(const Activations* __restrict__ spans, Out* __restrict__ x, i64 k, int m) {
    launch_dependents();
    wait_for_predecessors();
    constexpr int PAIRS = X_COLUMNS / 2;
    const i64 token = blockIdx.x;
    const i64 pair = i64(blockIdx.y) * blockDim.x + threadIdx.x;
    if (2 * pair >= k) return;
    const Activations& from = spans[pair / PAIRS * m + token];
    const int column = 2 * (pair % PAIRS), block = column / 32;
    const float d = __low2float(from.ds[block]), largest = largest_of(Out());
    const signed char* q = from.q + 32 * block;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float value = d * q[code_place(column % 32 + i)];
        const bool beyond = fabsf(value) > largest && isfinite(value);
        x[token * k + 2 * pair + i] = from_float<Out>(beyond ? copysignf(largest, value) : value);
    }
}
