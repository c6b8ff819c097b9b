// The CTA of prefill_sm90 and prefill_sm90_eight_bits: the roles of its warps, and the consumer warpgroup.
//
// Config: Sm90 of config.cuh.
#pragma once

#include "ptx/opaque.cuh"
#include "ptx/setmaxnreg.cuh"
#include "mainloop.cuh"
#include "producer.cuh"
#include "reduce.cuh"
#include "store.cuh"

namespace qgemm {

// Reduction and epilogue of a work tile.
//
// Store: store(wg, acc, tile, epi_tiles, row_factor) stores the finished epilogue tiles of a mask.
template <class Config, class Store, class RowFactor>
__device__ __forceinline__ void finish_tile(const Warpgroup<Config>& wg, const Store& store, typename Config::Acc& acc,
                                            int tile, const TilePeers<Config::EPI_TILES>& peers,
                                            Workspace<Config::MAX_PARTIALS>* workspace, const RowFactor& row_factor) {
    const u32 epi_tiles = peers.epi_tiles_of(blockIdx.x);
    const ClusterReduction<Config> cluster = {wg, epi_tiles};
    if (peers.clustered) cluster.open_inbox();
    SplitKReduction<Config>{wg}.reduce(acc);
    if (peers.clustered) barrier_cluster_wait();
    if (!Config::SINGLE_TILE && wg.wg_k != 0) return;
    if (peers.clustered) cluster.reduce(acc);
    if (peers.count > peers.step()) StreamKFixUp<Config>{wg, workspace}.reduce(acc, peers, epi_tiles);
    if (peers.is_finalizer(blockIdx.x)) store(wg, acc, tile, epi_tiles, row_factor);
}

// A consumer warpgroup: mainloop, reduction and epilogue of its work tiles, one after the other. EIGHT_BITS: see
// eight_bit_mainloop.cuh.
template <class Config, class Store, bool EIGHT_BITS = Config::EIGHT_BITS>
struct Consumer {
    using Acc = typename Config::Acc;
    const Warpgroup<Config>& wg;
    Mainloop<Config> mainloop;
    const Store& store;

    // The largest magnitudes in rows g and g + 8 of this lane. row_absmax: [row_blocks * 64]. W never changes, so that
    // the read-only path may load it.
    __device__ float2 absmax_of(const float* row_absmax, int tile) const {
        row_absmax = wg.p.row_absmax(row_absmax, tile, wg.row_block) + 16 * wg.warp + wg.lane / 4;
        return {__ldg(&row_absmax[0]), __ldg(&row_absmax[8])};
    }

    __device__ void run(const TileScheduler& first, const float* row_absmax,
                        Workspace<Config::MAX_PARTIALS>* workspace) const {
        const Levels<Config> levels;
        TileScheduler scheduler(first);
        u32 stages = 0;
        WorkTile s, next;
        bool more = scheduler.fetch(next);
        for (float2 absmax = absmax_of(row_absmax, next.tile); more;) {
            s = next;
            const u32 before = stages;
            stages += wg.p.end_stage(s) - wg.p.first_stage(s);
            Acc acc = {};
            const RowExponent<Config> row_exponent(absmax);
            mainloop.run(acc, s, before, levels, ScaleLoader<Config>(row_exponent));
            more = !Config::SINGLE_TILE && scheduler.fetch(next);
            if (more) absmax = absmax_of(row_absmax, next.tile);  // loaded while this tile is stored
            finish_tile(wg, store, acc, s.tile, first.template peers<Config::EPI_TILES>(s), workspace, row_exponent);
            // Lanes diverged in the store. Without __syncwarp ptxas treats addresses and conditions of the next work
            // tile as divergent and computes them per lane, some of them in every stage.
            __syncwarp();
        }
    }
};

// address: of Smem, in shared memory. A reference would tell ptxas its alignment, and ptxas would then move address
// arithmetic from before the waits for stages to after them. tiles, row_absmax: of the first row of W. x: its tensor
// map, or EightBitX.
template <class Config, class X, class Store>
__device__ __forceinline__ void run_prefill(u32 address, const Problem<Config>& problem, const X& x,
                                            const typename Config::Tile* tiles, const float* row_absmax,
                                            Workspace<Config::MAX_PARTIALS>* workspace, const Store& store) {
    Smem<Config>& smem = *static_cast<Smem<Config>*>(__cvta_shared_to_generic(address));
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), warpgroup = warp / 4;
    if (warp == Config::WARP_INIT) {
        if (elect_sync()) smem.init();
        __syncwarp();
        init_arrive<Config>();
    }
    const int work_units = (problem.k_blocks + Config::WORK_UNIT - 1) / Config::WORK_UNIT;
    if (warpgroup == Config::CONSUMERS) {
        setmaxnreg_dec<Config::PRODUCER_REGISTERS>();
        Producer<Config> producer = {smem, problem, TileScheduler(problem.stream_k, work_units)};
        if (warp == Config::WARP_LOAD_W) producer.load_w(tiles);
        if (warp == Config::WARP_LOAD_X) load_x(producer, x);
        if (warp == Config::WARP_INIT) {
            init_arrived<Config>();
            lead_x(x, smem);
        }
    } else {
        fill_table<typename Config::TileFormat, half, Config::CONSUMER_THREADS>(Config::TileFormat::CODE_EXPONENT);
        setmaxnreg_inc<Config::CONSUMER_REGISTERS>();
        init_wait<Config>();
        prepare_x(x, smem, warp);
        const int wg_k = Config::WG_SPLIT_K > 1 ? warpgroup / Config::ROW_BLOCKS : 0,
                  row_block = Config::ROW_BLOCKS > 1 ? warpgroup % Config::ROW_BLOCKS : 0;
        const int lane = opaque(threadIdx.x % 32);  // opaque: ptxas would recompute it at every use
        const Warpgroup<Config> wg = {smem,     problem, wg_k, row_block, int(threadIdx.x % WARPGROUP_THREADS),
                                      warp % 4, lane};
        const Consumer<Config, Store> consumer = {
            wg, {wg, smem.weights[row_block], wgmma_descriptor_low(shared_address(smem.x))}, store};
        consumer.run(TileScheduler(problem.stream_k, work_units), row_absmax, workspace);
    }
}

}  // namespace qgemm
