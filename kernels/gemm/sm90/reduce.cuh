// Reductions of prefill_sm90's accumulators over K: over the warpgroups of a CTA through shared memory, over the two
// CTAs of a cluster through DSMEM, over the CTAs of a tile through global memory (stream-K fix-up). All add in a fixed
// order.
//
// Config: Sm90 of config.cuh. epi_tiles: a mask of epilogue tiles.
#pragma once

#include "ptx/cluster.cuh"
#include "ptx/flag.cuh"
#include "warpgroup.cuh"

namespace qgemm {

template <int SIZE>
__device__ inline float4 quad(const float (&acc)[SIZE], int i) {
    return {acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]};
}
template <int SIZE>
__device__ inline void add_quad(float (&acc)[SIZE], int i, const float4& terms) {
    acc[4 * i] += terms.x, acc[4 * i + 1] += terms.y, acc[4 * i + 2] += terms.z, acc[4 * i + 3] += terms.w;
}

// Split-K inside a CTA: warpgroups store their partials of the epilogue tiles that they do not own, and owners add
// them.
template <class Config>
struct SplitKReduction {
    using Acc = typename Config::Acc;
    static constexpr int EPI_TILES = Config::EPI_TILES, EPI_QUADS = Config::EPI_QUADS, WG_SPLIT_K = Config::WG_SPLIT_K;
    static constexpr bool SINGLE_TILE = Config::SINGLE_TILE;
    const Warpgroup<Config>& wg;

    __device__ __forceinline__ void reduce(Acc& acc) const {
        wg.smem.alias_x_stages();
        if constexpr (WG_SPLIT_K > 1) {
#pragma unroll
            for (int epi_tile = 0; epi_tile < EPI_TILES; ++epi_tile) {
                if constexpr (!SINGLE_TILE) wg.row_block_barrier();  // the partials before have been read
                store_partial(acc, epi_tile);
                if constexpr (!SINGLE_TILE) wg.row_block_barrier(), add_partials(acc, epi_tile);
            }
            if constexpr (SINGLE_TILE) {
                wg.row_block_barrier();
#pragma unroll
                for (int epi_tile = 0; epi_tile < EPI_TILES; ++epi_tile) add_partials(acc, epi_tile);
            }
        }
    }

private:
    __device__ __forceinline__ void store_partial(const Acc& acc, int epi_tile) const {
        if (wg.owns(epi_tile)) return;
        auto& partial = wg.smem.partial(wg.row_block, epi_tile)[wg.wg_k - (wg.wg_k > Smem<Config>::owner(epi_tile))];
#pragma unroll
        for (int i = 0; i < EPI_QUADS; ++i) partial[i][wg.thread] = quad(acc, epi_tile * EPI_QUADS + i);
    }
    __device__ __forceinline__ void add_partials(Acc& acc, int epi_tile) const {
        if (!wg.owns(epi_tile)) return;
#pragma unroll
        for (int other = 0; other < WG_SPLIT_K - 1; ++other)
#pragma unroll
            for (int i = 0; i < EPI_QUADS; ++i)
                add_quad(acc, epi_tile * EPI_QUADS + i, wg.smem.partial(wg.row_block, epi_tile)[other][i][wg.thread]);
    }
};

// Split-K over a 2-CTA cluster: each CTA sends the epilogue tiles that its peer reduces, and adds those of its peer.
template <class Config>
struct ClusterReduction {
    using Acc = typename Config::Acc;
    static constexpr int EPI_QUADS = Config::EPI_QUADS, HALF_QUADS = (Config::EPI_TILES + 1) / 2 * EPI_QUADS;
    const Warpgroup<Config>& wg;
    u32 epi_tiles;  // number of epilogue tiles that this CTA reduces

    __device__ u32 received() const { return shared_address(&wg.smem.received[wg.row_block][wg.wg_k]); }
    // Tells the peer that this warpgroup has read all stages, and the mbarrier how many bytes it will receive.
    __device__ __forceinline__ void open_inbox() const {
        int count = 0;
#pragma unroll
        for (int epi_tile = 0; epi_tile < Config::EPI_TILES; ++epi_tile) count += wg.owns(epi_tile, epi_tiles);
        if (wg.thread == 0) mbarrier_arrive_expect_tx(received(), count * EPI_QUADS * sizeof(wg.smem.peer_inbox[0][0]));
        __syncwarp();
        barrier_cluster_arrive();
    }
    // Called after barrier_cluster_wait().
    __device__ __forceinline__ void reduce(Acc& acc) const {
        const int start = epi_tiles & 1 ? 0 : HALF_QUADS, peer_start = HALF_QUADS - start;
        auto& inbox = wg.smem.peer_inbox[wg.row_block];
        const u32 to = mapa_peer(shared_address(&inbox[0][wg.thread])), barrier = mapa_peer(received());
#pragma unroll
        for (int i = 0; i < Config::ACC_SIZE / 4; ++i)
            if (wg.owns(i / EPI_QUADS, ~epi_tiles))
                st_async_peer(to + (i - peer_start) * sizeof(inbox[0]), quad(acc, i), barrier);
        mbarrier_wait_parity_cluster(received(), 0);
#pragma unroll
        for (int i = 0; i < Config::ACC_SIZE / 4; ++i)
            if (wg.owns(i / EPI_QUADS, epi_tiles)) add_quad(acc, i, inbox[i - start][wg.thread]);
    }
};

// Global memory of the fix-up: a ready flag for each stored partial sum, then the partials. Flags are zero before and
// after every kernel: the CTA that awaits a flag clears it.
template <int MAX_PARTIALS>
struct alignas(16) Workspace {
    u32 flags[MAX_PARTIALS];
    __device__ float4* partials() { return reinterpret_cast<float4*>(this + 1); }
};

__device__ inline void raise_flag(u32* flag) {
    fence_acq_rel_gpu();
    st_relaxed_gpu(flag, 1);
}

__device__ inline void await_flag(u32* flag) {
    while (!ld_acquire_gpu(flag)) {
    }
    *flag = 0;
}

// Stream-K fix-up: all CTAs of a tile except the finalizer store their partials and raise a flag for each epilogue
// tile. The finalizer adds them in the order of the CTAs. In a cluster each CTA does so for half of the epilogue tiles.
template <class Config>
struct StreamKFixUp {
    using Acc = typename Config::Acc;
    using Peers = TilePeers<Config::EPI_TILES>;
    static constexpr int EPI_TILES = Config::EPI_TILES, EPI_QUADS = Config::EPI_QUADS, QUADS = Config::ACC_SIZE / 4;
    const Warpgroup<Config>& wg;
    Workspace<Config::MAX_PARTIALS>* workspace;

    __device__ __forceinline__ void reduce(Acc& acc, const Peers& peers, u32 epi_tiles) const {
        const int own_cta = blockIdx.x, step = peers.step(), first = peers.first + own_cta % step;
        if (!peers.is_finalizer(own_cta)) return store_partials(acc, own_cta, epi_tiles);
        for (int i = wg.thread; i < EPI_TILES * peers.count; i += WARPGROUP_THREADS) {
            const int cta = first + i / EPI_TILES * step, epi_tile = i % EPI_TILES;
            if (cta < own_cta && wg.owns(epi_tile, epi_tiles)) await_flag(flag(cta, epi_tile));
        }
        wg.warpgroup_barrier();
        if (epi_tiles == Peers::ALL) return add_partials<Peers::ALL>(acc, first, step);
        if (epi_tiles == Peers::FIRST_HALF) return add_partials<Peers::FIRST_HALF>(acc, first, step);
        add_partials<Peers::ALL & ~Peers::FIRST_HALF>(acc, first, step);
    }

private:
    __device__ float4* partials(int cta) const {
        return workspace->partials() + (i64(cta) * Config::ROW_BLOCKS + wg.row_block) * QUADS * WARPGROUP_THREADS +
               wg.thread;
    }
    __device__ u32* flag(int cta, int epi_tile) const {
        return &workspace->flags[(cta * Config::ROW_BLOCKS + wg.row_block) * EPI_TILES + epi_tile];
    }
    __device__ __forceinline__ void store_partials(const Acc& acc, int own_cta, u32 epi_tiles) const {
        float4* partial = partials(own_cta);
#pragma unroll
        for (int i = 0; i < QUADS; ++i)
            if (wg.owns(i / EPI_QUADS, epi_tiles)) partial[i * WARPGROUP_THREADS] = quad(acc, i);
        wg.warpgroup_barrier();
        if (wg.thread < EPI_TILES && wg.owns(wg.thread, epi_tiles)) raise_flag(flag(own_cta, wg.thread));
    }
    // ADDED: mask of epilogue tiles, at compile time so that all loads are in flight together.
    template <u32 ADDED>
    __device__ __forceinline__ void add_partials(Acc& acc, int first, int step) const {
        for (int cta = first; cta < int(blockIdx.x); cta += step) {
            const float4* partial = partials(cta);
            float4 terms[QUADS];
#pragma unroll
            for (int i = 0; i < QUADS; ++i)
                if (ADDED >> i / EPI_QUADS & 1)
                    terms[i] = wg.owns(i / EPI_QUADS) ? __ldcg(partial + i * WARPGROUP_THREADS) : float4{};
#pragma unroll
            for (int i = 0; i < QUADS; ++i)
                if (ADDED >> i / EPI_QUADS & 1) add_quad(acc, i, terms[i]);
        }
    }
};

}  // namespace qgemm
