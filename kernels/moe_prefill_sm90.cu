// moe_prefill_sm90: products by experts W [E, n, k] of many tokens on tensor cores, from packed weights (sm_90a).
//
//   y [rows, n] = x @ W[expert of the row].T, of rows that moe_sort has sorted by expert.
//   GATED: of two products by the same expert, of which one is the gate of the other, biases added to both.
// The pipeline, main loop and epilogue are those of prefill_sm90, over the token tiles of experts (sm90/grouped.cuh):
// how many there are is known on the device alone, so that each CTA computes the schedule of the persistent grid.
// Config: see sm90/config.cuh and sm90/grouped.cuh.
#include "sm90/grouped.cuh"

namespace qgemm {

using MoePrefill = Grouped<Config>;

}  // namespace qgemm

extern "C" __global__ void __launch_bounds__(qgemm::MoePrefill::THREADS, 1)
    moe_prefill_sm90(const __grid_constant__ qgemm::TensorMap x, const __grid_constant__ qgemm::GroupedProducts all) {
    using namespace qgemm;
    static_assert(MoePrefill::TileFormat::TABLE_BYTES + sizeof(Smem<MoePrefill>) == MoePrefill::SMEM_BYTES,
                  "shared memory differs from what the host asks for");
    extern __shared__ __align__(1024) unsigned char bytes[];
    __shared__ GroupedSchedule schedule;
    const u32 address = __shfl_sync(~0u, shared_address(bytes), 0) + MoePrefill::TileFormat::TABLE_BYTES;
    const int row_blocks = int((all.n + TILE_ROWS - 1) / TILE_ROWS);
    const int row_tiles =
        MoePrefill::GATED ? row_blocks : (row_blocks + MoePrefill::ROW_BLOCKS - 1) / MoePrefill::ROW_BLOCKS;
    const int k_blocks = int((all.k + MoePrefill::TILE_COLUMNS - 1) / MoePrefill::TILE_COLUMNS) * MoePrefill::K_BLOCKS;
    griddepcontrol_wait();  // the sort may have been the kernel before
    const int token_tiles = static_cast<const TokenTiles*>(all.counts)->count;
    if (token_tiles == 0) return;
    if (threadIdx.x == 0)
        schedule.init(all.stream_k, token_tiles * row_tiles,
                      (k_blocks + MoePrefill::WORK_UNIT - 1) / MoePrefill::WORK_UNIT);
    __syncthreads();
    const TokenTileMap map = {static_cast<const TokenTile*>(all.token_tiles), schedule.stream_k.row_tiles, row_tiles,
                              token_tiles - 1};
    const Problem<MoePrefill> problem = {{k_blocks}, all, all.n, all.rows_of_x, schedule.stream_k, map};
    auto* workspace = static_cast<Workspace<MoePrefill::MAX_PARTIALS>*>(all.partials);
    run_prefill<MoePrefill>(address, problem, &x, nullptr, nullptr, workspace, StoreGrouped<MoePrefill>{all});
}
