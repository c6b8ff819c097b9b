// dequantize_activations: blocks of codes [k_block][m] -> x [m, k] = d * q, row-major.
//
// A thread owns eight columns of a token.
// Config: Out (float, half).
#include "ptx/griddepcontrol.cuh"
#include "codes/quantize.cuh"

extern "C" __global__ void __launch_bounds__(128)
    dequantize_activations(const qgemm::Activations* __restrict__ k_blocks, qgemm::Config::Out* __restrict__ x,
                           qgemm::i64 k, int m) {
    using namespace qgemm;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    constexpr int SHARES = K_BLOCK / 8;  // in a k_block
    const i64 token = blockIdx.x, share = i64(blockIdx.y) * blockDim.x + threadIdx.x;
    if (8 * share >= k) return;
    const Activations& from = k_blocks[share / SHARES * m + token];
    const int column = int(share % SHARES) * 8, block = column / 32;
    const float d = ACTIVATION_UNIT * from.ds[block].x;
    float values[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = d * from.q[32 * block + code_offset(column % 32 + i)];
    store_eight(x + token * k + column + share / SHARES * K_BLOCK, values);
}
