// prefill_sm90 with GROUPED 0: one product y [m, n] = x [m, k] @ W [n, k].T.
//
// Config: Sm90 of config.cuh.
#pragma once

#include "consumer.cuh"

namespace qgemm {

// Epilogue of a consumer warpgroup.
template <class Config>
struct StoreDense {
    const Epilogue& epilogue;
    ScaledRows x;

    template <class RowFactor>
    __device__ __forceinline__ void operator()(const Warpgroup<Config>& wg, typename Config::Acc& acc, int tile,
                                               u32 epi_tiles, const RowFactor& row_factor) const {
        apply_x_factors(wg, acc, tile, x);
        EpilogueStore<Config, RowFactor>{wg, row_factor, epi_tiles}.store(acc, tile, epilogue);
    }
};

// smem: address of Smem in shared memory.
template <class Config>
__device__ __forceinline__ void multiply(u32 smem, const TensorMap* x, const DenseProduct& product) {
    const Extent<Config> extent(product.n, product.k);
    const Problem<Config> problem = {{extent.k_blocks}, product.n,        product.k,
                                     product.m,         extent.row_tiles, product.stream_k};
    const auto* tiles = static_cast<const typename Config::Tile*>(product.tiles);
    // The rows' absmax follow all tiles.
    const i64 tile_count = i64(extent.row_blocks) * (extent.k_blocks / Config::K_BLOCKS);
    const auto* row_absmax = reinterpret_cast<const float*>(tiles + tile_count);
    auto* workspace = static_cast<Workspace<Config::MAX_PARTIALS>*>(product.partials);
    const Epilogue epilogue = {product.epilogue};
    run_prefill<Config>(smem, problem, x, tiles, row_absmax, workspace,
                        StoreDense<Config>{epilogue, {product.x, product.k}});
}

}  // namespace qgemm
