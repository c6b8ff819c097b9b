// The part of a kernel in which its consumer warps quantize x, led by another (kernels/gemm/sm90/quantize_by_turns.cuh).
// Config: CONSUMERS, CONSUMER_THREADS, X_GROUP.
#include "gemm/sm90/quantize_by_turns.cuh"

extern "C" __global__ void quantize_by_turns(const void* given, qgemm::XUnits* units, int type, qgemm::i64 k, int m,
                                             int rows) {
    using namespace qgemm;
    extern __shared__ __align__(1024) unsigned char bytes[];
    const QuantizeByTurns<Config> x(given, type, units, rows, k, m);
    u32& turn = *reinterpret_cast<u32*>(bytes);
    if (threadIdx.x < Config::CONSUMER_THREADS) return x.follow(turn, threadIdx.x / 32);
    x.lead(turn);
    __syncwarp();
    x.await();
    x.leave();
}
