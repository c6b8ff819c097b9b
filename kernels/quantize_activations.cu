// quantize_activations: x -> q8_1 blocks, bit for bit as the CPU encodes them:
// d = absmax / 127, q = x * (1 / d) rounded half away from zero, s = d * sum(q) with the unrounded d.
//
// A warp owns a block, a lane one value. NaN anywhere makes d and s NaN; codes that are not finite become 0.
// Template: In (float, half, bf16).
#include "q8_1_block.cuh"

extern "C" __global__ void __launch_bounds__(256)
    quantize_activations(const In* __restrict__ x, q8_1_block* __restrict__ blocks, i64 count) {
    const int lane = threadIdx.x % 32;
    const i64 block = i64(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    if (block >= count) return;
    const float value = to_float(x[32 * block + lane]);

    float absmax = fabsf(value);
    for (int step = 16; step; step /= 2) absmax = fmaxf(absmax, __shfl_xor_sync(~0u, absmax, step));
    if (__any_sync(~0u, isnan(value))) absmax = __int_as_float(0x7fffffff);  // fmaxf passes NaN over

    const float d = __fdiv_rn(absmax, 127.0f);
    const float scaled = __fmul_rn(value, d == 0 ? 0.0f : __frcp_rn(d));
    const int q = isfinite(scaled) ? int(roundf(scaled)) : 0;
    int sum = q;
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);

    blocks[block].qs[lane] = q;
    if (lane == 0) blocks[block].d = __float2half_rn(d);
    if (lane == 1) blocks[block].s = __float2half_rn(__fmul_rn(d, float(sum)));
}
