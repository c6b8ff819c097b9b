// QuadScales: the scales of a lane's rows g and g + 8, k_block by k_block. A quad of lanes shares the two rows. If
// SCALE_LANES is 4, each lane of the quad decodes a quarter of the scales, and __shfl broadcasts them.
//
// Config: TileConfig with BLOCK_TOKENS, K_BLOCKS_PER_STAGE and the constants of row_exponent.cuh. Pipeline: has
// fields(stage, k_block, tile), as WeightPipeline of smem.cuh.
#pragma once

#include "gemm/row_exponent.cuh"
#include "tile_config.cuh"

namespace qgemm {

// Lanes that decode scales for each other, whichever is faster.
template <class Config>
constexpr int SCALE_LANES =
    Config::K_BLOCKS > 1 || Config::TileFormat::SCALES_ONCE || Config::BLOCK_TOKENS <= 16 ? 4 : 1;

template <class Config, int LANES = SCALE_LANES<Config>>
struct QuadScales;

template <class Config>
struct QuadScales<Config, 1> {
    const ScaleLoader<Config>& load;
    const typename Config::TileFormat* fields;

    __device__ explicit QuadScales(const ScaleLoader<Config>& load) : load(load) {}
    // k_block: number within the stage; tile_k_block: number within its tile; tile: number of the tile in this CTA.
    template <class Pipeline>
    __device__ void begin(const Pipeline& pipeline, int stage, int k_block, int, u32 tile, int, int) {
        fields = &pipeline.fields(stage, k_block, tile);
    }
    __device__ ScaleOf<Config> operator()(int warp, int lane, int, int tile_k_block, int step) const {
        ScaleOf<Config> group = load(*fields, warp, lane / 4, Config::scale_index(tile_k_block, step));
        fold_zero<Config>(group);
        return group;
    }
};

template <class Config>
struct QuadScales<Config, 4> {
    static constexpr int K_BLOCKS = Config::K_BLOCKS, K_BLOCKS_PER_STAGE = Config::K_BLOCKS_PER_STAGE;
    // A batch of scales is decoded together: the scales of a stage, or of a tile if a stage would leave lanes idle or
    // end inside a group.
    static constexpr bool TILE_BATCH =
        K_BLOCKS > 1 && (K_BLOCKS_PER_STAGE == 1 || K_BLOCKS_PER_STAGE % Config::K_BLOCKS_PER_SCALE != 0);
    static constexpr int BATCH_K_BLOCKS = TILE_BATCH ? K_BLOCKS : K_BLOCKS_PER_STAGE;
    static constexpr int BATCH = BATCH_K_BLOCKS / Config::K_BLOCKS_PER_SCALE * Config::K_BLOCK_SCALES;
    static constexpr int LANE_SCALES = TILE_BATCH ? Config::K_BLOCK_SCALES : (BATCH + 3) / 4;
    static_assert(BATCH <= 4 * LANE_SCALES, "a quad of lanes holds a batch");

    const ScaleLoader<Config>& load;
    u32 decoded_tile = ~0u;
    ScaleOf<Config> own[LANE_SCALES];

    __device__ explicit QuadScales(const ScaleLoader<Config>& load) : load(load) {}
    // Scales beyond the end of K are decoded but not used.
    template <class Pipeline>
    __device__ void begin(const Pipeline& pipeline, int stage, int k_block, int tile_k_block, u32 tile, int warp,
                          int lane) {
        if (TILE_BATCH ? tile == decoded_tile : k_block % BATCH_K_BLOCKS != 0) return;
        decoded_tile = tile;
#pragma unroll
        for (int i = 0; i < LANE_SCALES; ++i) {
            const u32 index = (lane % 4u * LANE_SCALES + i) % BATCH;
            const auto& fields = pipeline.fields(stage, k_block + index / Config::TILE_SCALES * K_BLOCKS, tile);
            const int first = TILE_BATCH ? 0 : Config::scale_index(tile_k_block, 0);
            own[i] = load(fields, warp, lane / 4, (first + index) % Config::TILE_SCALES);
        }
    }
    __device__ ScaleOf<Config> operator()(int, int, int k_block, int tile_k_block, int step) const {
        ScaleOf<Config> group;
        if constexpr (TILE_BATCH) {
            group = broadcast(own[step / Config::SCALE_STEPS], tile_k_block / Config::K_BLOCKS_PER_SCALE);
        } else {
            const int index = Config::scale_index(k_block, step);
            group = broadcast(own[index % LANE_SCALES], index / LANE_SCALES);
        }
        fold_zero<Config>(group);
        return group;
    }

private:
    __device__ static ScaleOf<Config> broadcast(const ScaleOf<Config>& group, int lane) {
        return shfl_quad<Config::TileFormat::HAS_MINIMUM>(group, lane);
    }
};

}  // namespace qgemm
