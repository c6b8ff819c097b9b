// prefill_sm90: y [m, n] = x [m, k] @ W [n, k].T for many tokens on tensor cores, from packed weights (sm_90a).
//
// A tile of y is ROW_BLOCKS row_blocks of 64 rows of W by TOKENS tokens. Warp-specialized pipeline: one producer warp
// loads W (cp.async.bulk), one loads x (TMA), stages of K_BLOCKS_PER_STAGE k_blocks each (sm90/producer.cuh).
// ROW_BLOCKS * WG_SPLIT_K consumer warpgroups dequantize W into registers as operand A and multiply
// (sm90/mainloop.cuh), reduce over K (sm90/reduce.cuh) and store y (sm90/store.cuh). Weights of each row are brought
// into the range of half by a power of two (row_exponent.cuh). The grid is persistent, with stream-K (schedule.cuh).
// Config: see sm90/config.cuh.
#include "ptx/opaque.cuh"
#include "ptx/setmaxnreg.cuh"
#include "sm90/mainloop.cuh"
#include "sm90/producer.cuh"
#include "sm90/reduce.cuh"
#include "sm90/store.cuh"

namespace qgemm {

// A consumer warpgroup: mainloop, reduction and epilogue of one work tile after the other.
template <class Config>
struct Consumer {
    using Acc = typename Config::Acc;
    const Warpgroup<Config>& wg;
    Mainloop<Config> mainloop;

    // Largest magnitudes of the weights of this lane's rows g and g + 8. row_absmax: [row_blocks * 64]
    __device__ float2 absmax_of(const float* row_absmax, int tile) const {
        const i64 row_block = min(i64(wg.p.first_row_block(tile) + wg.row_block), (wg.p.n - 1) / TILE_ROWS);
        row_absmax += row_block * TILE_ROWS + 16 * wg.warp + wg.lane / 4;
        return {row_absmax[0], row_absmax[8]};
    }

    __device__ void run(const TileScheduler& first, const float* row_absmax, Workspace<Config::MAX_PARTIALS>* workspace,
                        const Epilogue& epilogue) const {
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
            finish(acc, s.tile, first.template peers<Config::EPI_TILES>(s), workspace, epilogue, row_exponent);
            // Lanes diverged in there. Without this ptxas takes nothing of the next work tile for uniform, neither
            // addresses nor conditions, and computes them lane by lane, some of them in every stage.
            __syncwarp();
        }
    }

    // Reduction and epilogue.
    __device__ __forceinline__ void finish(Acc& acc, int tile, const TilePeers<Config::EPI_TILES>& peers,
                                           Workspace<Config::MAX_PARTIALS>* workspace, const Epilogue& epilogue,
                                           const RowExponent<Config>& row_exponent) const {
        const u32 epi_tiles = peers.epi_tiles_of(blockIdx.x);
        const ClusterReduction<Config> cluster = {wg, epi_tiles};
        if (peers.clustered) cluster.open_inbox();
        SplitKReduction<Config>{wg}.reduce(acc);
        if (peers.clustered) barrier_cluster_wait();
        if (!Config::SINGLE_TILE && wg.wg_k != 0) return;
        if (peers.clustered) cluster.reduce(acc);
        if (peers.count > peers.step()) StreamKFixUp<Config>{wg, workspace}.reduce(acc, peers, epi_tiles);
        if (peers.is_finalizer(blockIdx.x))
            EpilogueStore<Config>{wg, row_exponent, epi_tiles}.store(acc, tile, epilogue);
    }
};

// address: of Smem, in shared memory. Not a reference: its alignment, once known, moves address arithmetic behind the
// waits for stages.
template <class Config>
__device__ __forceinline__ void prefill(u32 address, const TensorMap* x, const typename Config::Tile* tiles,
                                        const Epilogue& epilogue, Workspace<Config::MAX_PARTIALS>* workspace, i64 n,
                                        i64 k, int m, const StreamK& stream_k) {
    Smem<Config>& smem = *static_cast<Smem<Config>*>(__cvta_shared_to_generic(address));
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), warpgroup = warp / 4;
    if (warp == Config::WARP_INIT) {
        if (elect_sync()) smem.init();
        __syncwarp();
        init_arrive<Config>();
    }
    const int row_blocks = int((n + TILE_ROWS - 1) / TILE_ROWS);
    const int row_tiles = (row_blocks + Config::ROW_BLOCKS - 1) / Config::ROW_BLOCKS;
    const int k_blocks = int((k + Config::TILE_COLUMNS - 1) / Config::TILE_COLUMNS) * Config::K_BLOCKS;
    const Problem<Config> problem = {n, k, m, row_tiles, k_blocks, stream_k};
    const int work_units = (k_blocks + Config::WORK_UNIT - 1) / Config::WORK_UNIT;
    if (warpgroup == Config::CONSUMERS) {
        setmaxnreg_dec<Config::PRODUCER_REGISTERS>();
        Producer<Config> producer = {smem, problem, TileScheduler(stream_k, work_units)};
        if (warp == Config::WARP_LOAD_W) producer.load_w(tiles);
        if (warp == Config::WARP_LOAD_X) producer.load_x(x);
    } else {
        fill_table<typename Config::TileFormat, half, Config::CONSUMER_THREADS>(Config::TileFormat::CODE_EXPONENT);
        setmaxnreg_inc<Config::CONSUMER_REGISTERS>();
        init_wait<Config>();
        const int wg_k = Config::WG_SPLIT_K > 1 ? warpgroup / Config::ROW_BLOCKS : 0,
                  row_block = Config::ROW_BLOCKS > 1 ? warpgroup % Config::ROW_BLOCKS : 0;
        const int lane = opaque(threadIdx.x % 32);  // the compiler does not compute it anew for every use
        const Warpgroup<Config> wg = {smem,     problem, wg_k, row_block, int(threadIdx.x % WARPGROUP_THREADS),
                                      warp % 4, lane};
        const Consumer<Config> consumer = {wg,
                                           {wg, smem.weights[row_block], wgmma_descriptor_low(shared_address(smem.x))}};
        // The rows' absmax follow all tiles.
        const auto* row_absmax =
            reinterpret_cast<const float*>(tiles + i64(row_blocks) * (k_blocks / Config::K_BLOCKS));
        consumer.run(TileScheduler(stream_k, work_units), row_absmax, workspace, epilogue);
    }
}

using Prefill = Sm90<Config>;

}  // namespace qgemm

extern "C" __global__ void __launch_bounds__(qgemm::Prefill::THREADS, 1)
    prefill_sm90(const __grid_constant__ qgemm::TensorMap x, const qgemm::Prefill::Tile* __restrict__ tiles,
                 const __grid_constant__ qgemm::Epilogue epilogue,
                 qgemm::Workspace<qgemm::Prefill::MAX_PARTIALS>* workspace, qgemm::i64 n, qgemm::i64 k, int m,
                 const __grid_constant__ qgemm::StreamK stream_k) {
    using namespace qgemm;
    static_assert(Prefill::TileFormat::TABLE_BYTES + sizeof(Smem<Prefill>) == Prefill::SMEM_BYTES,
                  "shared memory differs from what the host asks for");
    extern __shared__ __align__(1024) unsigned char bytes[];
    // The shuffle keeps ptxas from computing the address anew for every use.
    const u32 address = __shfl_sync(~0u, shared_address(bytes), 0) + Prefill::TileFormat::TABLE_BYTES;
    prefill<Prefill>(address, &x, tiles, epilogue, workspace, n, k, m, stream_k);
}
