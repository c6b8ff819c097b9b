// moe_prefill_sm90: products by experts W [E, n, k] of many tokens on tensor cores, from packed weights (sm_90a).
//
//   y [rows, n] = x @ W[expert of the row].T, of rows that moe_sort has sorted by expert.
//   GATED: of two products by the same expert, of which one is the gate of the other, biases added to both.
// The pipeline, main loop and epilogue are those of prefill_sm90, over the token tiles of experts (sm90/grouped.cuh):
// how many there are is known on the device alone, so that each CTA computes the schedule of the persistent grid.
// Config: see sm90/config.cuh and sm90/grouped.cuh.
#include "gemm/sm90/grouped.cuh"

namespace qgemm {

using MoePrefill = Grouped<Config>;

}  // namespace qgemm

extern "C" __global__ void __launch_bounds__(qgemm::MoePrefill::THREADS, 1)
    moe_prefill_sm90(const __grid_constant__ qgemm::TensorMap x, const __grid_constant__ qgemm::GroupedProducts all) {
    using namespace qgemm;
    extern __shared__ __align__(1024) unsigned char bytes[];
    __shared__ GroupedSchedule schedule;
    const u32 address = smem_address<MoePrefill>(bytes);
    const Extent<MoePrefill> extent(all.n, all.k);
    // The kernel before the first product of a layer is the sort; that before the second has waited for it. Then W is
    // loaded while it runs; nothing is stored, partials included, before x is there.
    if (!all.tiles_are_known) griddepcontrol_wait();
    const int token_tiles = static_cast<const TokenTiles*>(all.counts)->count;
    if (token_tiles == 0) return;
    if (threadIdx.x == 0)
        schedule.init(all.stream_k, token_tiles * extent.row_tiles,
                      (extent.k_blocks + MoePrefill::WORK_UNIT - 1) / MoePrefill::WORK_UNIT);
    __syncthreads();
    const TokenTileMap map = {static_cast<const TokenTile*>(all.token_tiles), schedule.stream_k.row_tiles,
                              extent.row_tiles, token_tiles - 1};
    const Problem<MoePrefill> problem = {{extent.k_blocks}, all, all.n, all.rows_of_x, schedule.stream_k, map};
    auto* workspace = static_cast<Workspace<MoePrefill::MAX_PARTIALS>*>(all.partials);
    run_prefill<MoePrefill>(address, problem, &x, nullptr, nullptr, workspace, StoreGrouped<MoePrefill>{all});
}
