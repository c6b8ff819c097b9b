// quantize_activations: x [m, k] -> blocks of codes [k_block][m], computed by codes/quantize.cuh.
//
// A thread owns eight columns of a token. A block beyond k, in the last k_block, is zero.
// Config: In (float, half, bf16).
#include "ptx/griddepcontrol.cuh"
#include "codes/quantize.cuh"

extern "C" __global__ void __launch_bounds__(128)
    quantize_activations(const qgemm::Config::In* __restrict__ x, qgemm::Activations* __restrict__ k_blocks,
                         qgemm::i64 k, int m) {
    using namespace qgemm;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    constexpr int SHARES = K_BLOCK / 8;  // in a k_block
    const i64 token = blockIdx.x, share = i64(blockIdx.y) * blockDim.x + threadIdx.x;
    float values[8] = {};
    if (8 * share < k) load_eight(values, x + token * k + 8 * share);
    const bool inside = 8 * share < (k + K_BLOCK - 1) / K_BLOCK * K_BLOCK;
    QuantizedShare(values).store(k_blocks[share / SHARES * m + token], int(share % SHARES), inside);
}
