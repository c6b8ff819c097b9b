// decode: y [m, n] = x [m, k] @ W [n, k].T for few rows of x, at the speed of memory.
//
// Intra-CTA split-K: each warp streams its tiles of W through a private pipeline (decode/pipeline.cuh) and multiplies
// them on tensor cores, W as operand A, tokens as operand B. Two policies of the Config make the variants:
//   Grouping   decode/dense.cuh, expert_slots.cuh, expert_tiles.cuh
//   Mainloop   decode/a16.cuh, a8.cuh, slices.cuh
// Config: see decode/config.cuh.
#include "gemm/decode/a16.cuh"
#include "gemm/decode/a8.cuh"
#include "gemm/decode/dense.cuh"
#include "gemm/decode/expert_slots.cuh"
#include "gemm/decode/expert_tiles.cuh"
#include "gemm/decode/slices.cuh"

namespace qgemm {

using DecodeConfig = Decode<Config>;

}  // namespace qgemm

extern "C" __global__ void __launch_bounds__(qgemm::DecodeConfig::THREADS, qgemm::Config::CTAS)
    decode(const __grid_constant__ qgemm::Config::Grouping::Arguments arguments) {
    using namespace qgemm;
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ unsigned long long mbarriers[DecodeConfig::WARP_SPLIT_K][DecodeConfig::STAGES];
    Config::Grouping::run<DecodeConfig>(arguments, memory, mbarriers);
}
