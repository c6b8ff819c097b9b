// prefill_sm90: y [m, n] = x [m, k] @ W [n, k].T for many tokens on tensor cores, from packed weights (sm_90a).
//
// A tile of y is ROW_BLOCKS row_blocks of 64 rows of W by BLOCK_TOKENS tokens. Warp-specialized pipeline: one producer
// warp loads W (cp.async.bulk), one loads x (TMA), in stages of K_BLOCKS_PER_STAGE k_blocks (sm90/producer.cuh).
// ROW_BLOCKS * WG_SPLIT_K consumer warpgroups dequantize W into registers as operand A and multiply
// (sm90/mainloop.cuh), reduce over K (sm90/reduce.cuh) and store y (sm90/store.cuh). A power of two for each row brings
// its weights into the range of half (row_exponent.cuh). The grid is persistent, with stream-K (schedule.cuh).
//
// Config::GROUPED chooses the product: 0: one matrix W (sm90/dense.cuh); 1: a matrix for each expert, and rows of x
// sorted by expert (sm90/grouped.cuh).
// Config: see sm90/config.cuh.
#include "gemm/sm90/dense.cuh"
#include "gemm/sm90/grouped.cuh"

namespace qgemm {

using Prefill = Sm90<Config>;

}  // namespace qgemm

extern "C" __global__ void __launch_bounds__(qgemm::Prefill::THREADS, 1)
    prefill_sm90(const __grid_constant__ qgemm::TensorMap x, const __grid_constant__ qgemm::Prefill::Product product) {
    using namespace qgemm;
    extern __shared__ __align__(1024) unsigned char bytes[];
    multiply<Prefill>(smem_address<Prefill>(bytes), &x, product);
}
