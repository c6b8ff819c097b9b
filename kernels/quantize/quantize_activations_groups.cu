// quantize_activations_groups: x [m, k] -> bytes, then a scale for each token and group of columns
// (quantize_groups.cuh).
//
// A warp owns 256 columns of TOKENS tokens.
// Config: In (float, half, bf16), E4M3 (0, 1), TOKENS.
#include "ptx/griddepcontrol.cuh"
#include "quantize/quantize_groups.cuh"

extern "C" __global__ void __launch_bounds__(128)
    quantize_activations_groups(const qgemm::Config::In* __restrict__ x, signed char* __restrict__ codes, qgemm::i64 k,
                                int m) {
    using namespace qgemm;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    constexpr int TOKENS = Config::TOKENS;
    const GroupedX out(codes, gridDim.x * TOKENS, k, m);
    const u32 first = (blockIdx.y * blockDim.x + threadIdx.x) / 32 * EIGHT_BIT_COLUMNS;
    if (first >= out.columns) return;
    TokenGroups<Config::In, TOKENS> values;
    values.load(x, out, blockIdx.x * TOKENS, first, threadIdx.x % 32);
    values.store<Config::E4M3>(out, blockIdx.x * TOKENS, first, threadIdx.x % 32);
}
