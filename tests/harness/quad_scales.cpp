// QuadScales of prefill_sm90 on the host: the scales that lanes of a warpgroup get from each other, stage by stage,
// compared with the scales that each lane loads itself.
#include "cta.h"
#include "gemm/sm90/quad_scales.cuh"

using namespace qgemm;
constexpr int K_BLOCKS = Config::K_BLOCKS;

template <int N, int TOKENS>
struct Base : Config {
    static constexpr int K_BLOCKS_PER_STAGE = N, BLOCK_TOKENS = TOKENS;
    static constexpr int ROW_SCALE_HEADROOM = 0, ROW_SCALE_MIN = -8, ROW_SCALE_MAX = 8;
};

// The fields of tiles along K; the kernel has them in shared memory.
template <class Config>
struct Fields {
    const typename Config::Tile* tiles;
    const auto& fields(int stage, int k_block, u32 tile) const {
        return tiles[Config::K_BLOCKS_PER_STAGE % Config::K_BLOCKS
                         ? tile
                         : (stage * Config::K_BLOCKS_PER_STAGE + k_block) / Config::K_BLOCKS]
            .fields;
    }
};

// Counts the scales and minimums of all steps that differ; -1 if neither a stage holds whole tiles nor a tile whole
// stages.
template <int N, int TOKENS>
int differences(const void* tiles, int k_blocks, int wg_split_k) {
    if constexpr (N % K_BLOCKS != 0 && K_BLOCKS % N != 0) return -1;
    using Stages = TileConfig<Base<N, TOKENS>>;
    const Fields<Stages> pipeline = {static_cast<const typename Stages::Tile*>(tiles)};
    int different = 0;
    const auto warpgroup = [&] {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const ScaleLoader<Stages> load(RowExponent<Stages>({1.0f, 2.0f}));
        for (int wg_k = 0; wg_k < wg_split_k; ++wg_k) {
            QuadScales<Stages> scales(load);
            for (int stage = wg_k; stage < k_blocks / N; stage += wg_split_k)
                for (int k_block = 0; k_block < N; ++k_block) {
                    const int along = stage * N + k_block, tile_k_block = along % K_BLOCKS;
                    scales.begin(pipeline, stage, k_block, tile_k_block, along / K_BLOCKS, warp, lane);
                    for (int step = 0; step < Stages::K_BLOCK_STEPS; step += min(Stages::SCALE_STEPS, 4)) {
                        const auto group = scales(warp, lane, k_block, tile_k_block, step);
                        auto own = load(pipeline.tiles[along / K_BLOCKS].fields, warp, lane / 4,
                                        Stages::scale_index(tile_k_block, step));
                        fold_zero<Stages>(own);
                        constexpr bool MINIMUM = ONE_FMA<Stages> || Stages::TileFormat::HAS_MINIMUM;
                        different += memcmp(&group.scale, &own.scale, sizeof(own.scale)) != 0;
                        different += MINIMUM && memcmp(&group.minimum, &own.minimum, sizeof(own.minimum)) != 0;
                    }
                }
        }
    };
    Fibers fibers;
    Cta(fibers, {1, 1, 1}, {0, 0, 0}, 128, false, warpgroup);
    return different;
}

// tiles: of one row_block, along K. few_tokens: 16 tokens, with which lanes of more formats share scales.
extern "C" int quad_scales(const void* tiles, int k_blocks, int wg_split_k, int stage, int few_tokens) {
    const auto run = few_tokens ? (stage == 1   ? differences<1, 16>
                                   : stage == 2 ? differences<2, 16>
                                                : differences<4, 16>)
                                : (stage == 1   ? differences<1, 64>
                                   : stage == 2 ? differences<2, 64>
                                                : differences<4, 64>);
    return run(tiles, k_blocks, wg_split_k);
}
