// quantize_activations: x [m, k] -> q8_1 blocks, span by span [along][m], as quantize.cuh computes them.
//
// A warp owns a block, a lane one value. A block beyond k, in the last span, is zero.
// Template: In (float, half, bf16).
#include "pdl.cuh"
#include "quantize.cuh"

extern "C" __global__ void __launch_bounds__(128)
    quantize_activations(const In* __restrict__ x, Activations* __restrict__ spans, i64 k, int m) {
    launch_dependents();
    wait_for_predecessors();
    constexpr int BLOCKS = X_COLUMNS / 32;
    const int lane = threadIdx.x % 32;
    const i64 token = blockIdx.x;
    const i64 block = i64(blockIdx.y) * (blockDim.x / 32) + threadIdx.x / 32;
    if (block >= (k + X_COLUMNS - 1) / X_COLUMNS * BLOCKS) return;
    const float value = 32 * block < k ? to_float(x[token * k + 32 * block + lane]) : 0.0f;

    u32 largest = magnitude_bits(value);
    for (int step = 16; step; step /= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, step));
    const Quantizer quantizer(largest);
    const int q = quantizer.code(value);
    int sum = q;
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);

    Activations& to = spans[block / BLOCKS * m + token];
    to.q[32 * (block % BLOCKS) + code_place(lane)] = q;
    if (lane == 0) to.ds[block % BLOCKS] = quantizer.scale_and_sum(sum);
}
