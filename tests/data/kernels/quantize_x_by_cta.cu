// x quantized by the consumer warps of a CTA, with a leader warp (kernels/gemm/sm90/quantize_x_by_cta.cuh).
// Config: CONSUMERS, CONSUMER_THREADS.
#include "gemm/sm90/quantize_x_by_cta.cuh"

extern "C" __global__ void quantize_x_by_cta(const void* raw_x, qgemm::WorkQueue* queue, int type, qgemm::i64 k, int m,
                                             int rows) {
    using namespace qgemm;
    extern __shared__ __align__(1024) unsigned char bytes[];
    const QuantizeXByCta<Config> x(raw_x, type, queue, rows, k, m);
    u32& batch = *reinterpret_cast<u32*>(bytes);
    if (threadIdx.x < Config::CONSUMER_THREADS) return x.follow(batch, threadIdx.x / 32);
    x.lead(batch);
    __syncwarp();
    x.await();
    x.exit();
}
