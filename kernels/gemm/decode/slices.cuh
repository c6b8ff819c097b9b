// Mainloop of decode for one token and codes of few bits (W4A16): integer products on tensor cores, at half the
// instructions of a16.cuh, which multiplies codes as halves.
//
// One token would fill one of the eight columns of an mma. Here all columns hold x, in slices of eight bits, into which
// the threads of the CTA split SLICED columns of x at a time.
// Config: Decode of config.cuh.
#pragma once

#include "policies.cuh"
#include "reduce.cuh"
#include "sliced.cuh"

namespace qgemm {

struct MainloopSlices {
    // The work of a CTA, with the arguments of MainloopA16::run.
    template <class Config, class Coord, class Store>
    static __device__ __forceinline__ void run(const Coord& coord, const typename Config::In* x, int m,
                                               unsigned char* memory,
                                               unsigned long long (&mbarriers)[Config::WARP_SPLIT_K][Config::STAGES],
                                               Store store) {
        using Format = typename Config::Fields;
        using Pipeline = SmemPipeline<Config, void>;
        using X = XSlices<Config::SLICED>;
        constexpr int STAGES = Config::STAGES, SPLIT_K = Config::WARP_SPLIT_K;
        // Tiles of a warp whose columns of x are in slices at a time.
        constexpr int ROUNDS = Config::SLICED / (SPLIT_K * Config::TILE_COLUMNS);
        static_assert(Config::TOKENS == 1 && Config::CLUSTER_SPLIT_K == 1 && ROUNDS > 0, "one token, no cluster");
        static_assert(sizeof(Pipeline) == Config::WARP_BYTES, "shared memory of a warp differs from the host's");
        static_assert(sizeof(X) == Config::SLICES_BYTES, "shared memory of x differs from the host's");
        X& slices = *reinterpret_cast<X*>(memory + Config::POINTS_BYTES);
        Pipeline& pipeline =
            reinterpret_cast<Pipeline*>(memory + Config::POINTS_BYTES + Config::SLICES_BYTES)[coord.warp_k];
        const StageBarriers<STAGES, false, Config::BULK> barriers(mbarriers[coord.warp_k]);

        typename Config::WarpAcc acc = {};
        KTileIterator<Config> k_tiles = {coord};
        const auto load_w = [&](int stage) {
            barriers.first_copy(stage, pipeline.bytes(k_tiles),
                                [&](auto copy) { pipeline.load(k_tiles, stage, copy); });
            k_tiles.advance();
        };
        for (int stage = 0; stage < STAGES; ++stage) {
            if (stage < coord.count) load_w(stage);
            barriers.close(stage);
        }
        if constexpr (Config::POINTS_BYTES != 0) {
            static_assert(Format::POINTS_BYTES == Config::POINTS_BYTES, "the table differs from the host's");
            Format::template fill_points<Config::THREADS>();
            __syncthreads();
        }
        griddepcontrol_launch_dependents();
        griddepcontrol_wait();
        const SlicedProducts<Config, Config::SLICED> sliced(acc, pipeline, slices, coord.lane);
        // ahead: number of stages whose copies have begun; count: number of tiles that the warp has multiplied.
        int stage = 0, phase = 0, ahead = STAGES, count = 0;
        const auto wait = [&] {
            barriers.wait(stage, phase);
            const int full = stage;
            if (++stage == STAGES) stage = 0, ++phase;
            return full;
        };
        const auto release = [&](int stage) {
            __syncwarp();  // every lane has read it
            if (ahead++ < coord.count) load_w(stage);
            barriers.close(stage);
        };
        for (int i = 0; i < coord.tiles_along; i += ROUNDS * SPLIT_K) {
            const int columns = int(min(i64(ROUNDS * SPLIT_K), coord.tiles_along - i)) * Config::TILE_COLUMNS;
            if (i) __syncthreads();  // every warp has read the previous columns
            slices.template load<Format, SPLIT_K>(x, i64(i) * Config::TILE_COLUMNS, coord.products.k, columns,
                                                  coord.lane);
            __syncthreads();
            for (int tile = coord.warp_k; tile * Config::TILE_COLUMNS < columns; tile += SPLIT_K)
                sliced.add(count++, tile, wait, release);
        }
        // Adds the sums of a row over slices, and over even and odd steps.
#pragma unroll
        for (auto& row_block : acc)
#pragma unroll
            for (auto& m16 : row_block)
#pragma unroll
                for (int row = 0; row < 2; ++row)
#pragma unroll
                    for (int apart = 1; apart < 4; apart *= 2)
                        m16[0].sum[2 * row] += __shfl_xor_sync(~0u, m16[0].sum[2 * row], apart);
        __syncthreads();  // every warp has read its stages: the reduction aliases them
        reduce_and_store<Config>(acc, {1.0f, 1.0f / (1 << Format::HIGH_ROW_SHIFT)}, memory, coord, 1, store);
    }
};

}  // namespace qgemm
