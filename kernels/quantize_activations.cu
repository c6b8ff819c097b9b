// quantize_activations: x [m, k] -> q8_1 blocks, tile by tile [along][m], bit for bit as the CPU encodes them:
// d = absmax / 127, q = x * (1 / d) rounded half away from zero, s = d * sum(q) with the unrounded d.
//
// A warp owns a block, a lane one value. NaN anywhere makes d and s NaN; codes that are not finite become 0. A block
// beyond k, in the last tile, is zero.
// Template: In (float, half, bf16).
#include "activations.cuh"
#include "pdl.cuh"

extern "C" __global__ void __launch_bounds__(128)
    quantize_activations(const In* __restrict__ x, Activations* __restrict__ tiles, i64 k, int m) {
    launch_dependents();
    wait_for_predecessors();
    constexpr int BLOCKS = X_COLUMNS / 32;
    const int lane = threadIdx.x % 32, token = blockIdx.y;
    const i64 block = i64(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    if (block >= (k + X_COLUMNS - 1) / X_COLUMNS * BLOCKS) return;
    const float value = 32 * block < k ? to_float(x[token * k + 32 * block + lane]) : 0.0f;

    float absmax = fabsf(value);
    for (int step = 16; step; step /= 2) absmax = fmaxf(absmax, __shfl_xor_sync(~0u, absmax, step));
    if (__any_sync(~0u, isnan(value))) absmax = __int_as_float(0x7fffffff);  // fmaxf passes NaN over

    const float d = __fdiv_rn(absmax, 127.0f);
    const float scaled = __fmul_rn(value, d == 0 ? 0.0f : __frcp_rn(d));
    const int q = isfinite(scaled) ? int(roundf(scaled)) : 0;
    int sum = q;
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);

    Activations& tile = tiles[block / BLOCKS * m + token];
    const int step = lane / 16, half_step = lane / 8 % 2, t = lane / 2 % 4, odd = lane % 2;
    tile.q[32 * (block % BLOCKS) + 8 * t + 4 * step + half_step + 2 * odd] = q;
    if (lane == 0) tile.ds[block % BLOCKS] = __floats2half2_rn(d, __fmul_rn(d, float(sum)));
}
