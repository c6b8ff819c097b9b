// decode: y [m, n] = x [m, k] @ W [n, k].T for up to 16 tokens, W4A16, at the speed of memory.
//
// Intra-CTA split-K: each warp streams its tiles through a pipeline of its own (decode/pipeline.cuh) and multiplies
// them by mma.sync, W as operand A, tokens as operand B (decode/a16.cuh).
// Config: see decode/config.cuh.
#include "gemm/decode/a16.cuh"

namespace qgemm {

using DecodeConfig = Decode<Config>;

}  // namespace qgemm

extern "C" __global__ void __launch_bounds__(qgemm::DecodeConfig::THREADS, 1)
    decode(const __grid_constant__ qgemm::Products products) {
    using namespace qgemm;
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ unsigned long long words[DecodeConfig::WARP_SPLIT_K][DecodeConfig::STAGES];
    const WarpCoord<DecodeConfig> coord(products);
    run_decode<DecodeConfig>(coord, static_cast<const Config::In*>(products.x), int(products.m), memory, words,
                             StoreProducts<DecodeConfig>{coord});
}
