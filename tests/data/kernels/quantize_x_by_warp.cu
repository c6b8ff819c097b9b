// x quantized by warps that each draw their own work items (kernels/gemm/sm90/quantize_x_by_warp.cuh).
// Config: E4M3 (0, 1).
#include "gemm/sm90/quantize_x_by_warp.cuh"

extern "C" __global__ void quantize_x_by_warp(const void* raw_x, qgemm::WorkQueue* queue, int type, qgemm::i64 k, int m,
                                              int rows) {
    using namespace qgemm;
    const QuantizeXByWarp<Config::E4M3> quantize(raw_x, type, queue, rows, k, m);
    quantize.run(threadIdx.x % 32);
    __syncthreads();
    if (threadIdx.x != 0) return;
    quantize.await();
    quantize.exit(gridDim.x);
}
