// The part of a kernel in which its warps quantize x (kernels/gemm/sm90/quantize_within.cuh).
// Config: E4M3 (0, 1), GROUP.
#include "gemm/sm90/quantize_within.cuh"

extern "C" __global__ void quantize_within(const void* given, qgemm::XUnits* units, int type, qgemm::i64 k, int m,
                                           int rows) {
    using namespace qgemm;
    const QuantizeWithin<Config::GROUP, Config::E4M3> quantize(given, type, units, rows, k, m);
    quantize.run(threadIdx.x % 32);
    __syncthreads();
    if (threadIdx.x != 0) return;
    quantize.await();
    quantize.leave(gridDim.x);
}
