// prefill_sm90: y [m, n] = x [m, k] @ W [n, k].T for many tokens on tensor cores, from packed weights (sm_90a).
//
// A tile of y is ROW_BLOCKS row_blocks of 64 rows of W by TOKENS tokens. Warp-specialized pipeline: one producer warp
// loads W (cp.async.bulk), one loads x (TMA), stages of K_BLOCKS_PER_STAGE k_blocks each (sm90/producer.cuh).
// ROW_BLOCKS * WG_SPLIT_K consumer warpgroups dequantize W into registers as operand A and multiply
// (sm90/mainloop.cuh), reduce over K (sm90/reduce.cuh) and store y (sm90/store.cuh). Weights of each row are brought
// into the range of half by a power of two (row_exponent.cuh). The grid is persistent, with stream-K (schedule.cuh).
// Config: see sm90/config.cuh.
#include "gemm/sm90/consumer.cuh"

namespace qgemm {

using Prefill = Sm90<Config>;

// Epilogue of a consumer warpgroup.
struct StoreProduct {
    const Epilogue& epilogue;

    __device__ __forceinline__ void operator()(const Warpgroup<Prefill>& wg, const Prefill::Acc& acc, int tile,
                                               u32 epi_tiles, const RowExponent<Prefill>& row_exponent) const {
        EpilogueStore<Prefill>{wg, row_exponent, epi_tiles}.store(acc, tile, epilogue);
    }
};

}  // namespace qgemm

extern "C" __global__ void __launch_bounds__(qgemm::Prefill::THREADS, 1)
    prefill_sm90(const __grid_constant__ qgemm::TensorMap x, const qgemm::Prefill::Tile* __restrict__ tiles,
                 const __grid_constant__ qgemm::Epilogue epilogue,
                 qgemm::Workspace<qgemm::Prefill::MAX_PARTIALS>* workspace, qgemm::i64 n, qgemm::i64 k, int m,
                 const __grid_constant__ qgemm::StreamK stream_k) {
    using namespace qgemm;
    extern __shared__ __align__(1024) unsigned char bytes[];
    const u32 address = smem_address<Prefill>(bytes);
    const Extent<Prefill> extent(n, k);
    const Problem<Prefill> problem = {{extent.k_blocks}, n, k, m, extent.row_tiles, stream_k};
    // The rows' absmax follow all tiles.
    const i64 all_tiles = i64(extent.row_blocks) * (extent.k_blocks / Prefill::K_BLOCKS);
    const auto* row_absmax = reinterpret_cast<const float*>(tiles + all_tiles);
    run_prefill<Prefill>(address, problem, &x, tiles, row_absmax, workspace, StoreProduct{epilogue});
}
