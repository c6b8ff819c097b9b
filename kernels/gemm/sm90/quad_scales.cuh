// The scales of a lane's rows g and g + 8, k_block by k_block. A quad of lanes shares two rows: where it is faster each
// lane decodes a quarter of the scales of a stage, and __shfl broadcasts them.
//
// Config: TileConfig with In, TOKENS, K_BLOCKS_PER_STAGE and what row_exponent.cuh needs. Pipeline: has
// fields(stage, k_block, tile), as WeightPipeline of smem.cuh.
#pragma once

#include "gemm/row_exponent.cuh"
#include "tile_config.cuh"

namespace qgemm {

// Lanes that decode scales for each other. Scales of bf16 take twice the registers.
template <class Config>
constexpr int SCALE_LANES =
    Config::K_BLOCKS > 1 || Config::TileFormat::SCALES_ONCE || (Config::TOKENS <= 16 && IS_HALF<typename Config::In>)
        ? 4
        : 1;

template <class Config, int LANES = SCALE_LANES<Config>>
struct QuadScales;

template <class Config>
struct QuadScales<Config, 1> {
    const ScaleLoader<Config>& load;
    const typename Config::TileFormat* fields;

    __device__ explicit QuadScales(const ScaleLoader<Config>& load) : load(load) {}
    // k_block: of the stage; of_tile: the same, of its tile; tile: its number.
    template <class Pipeline>
    __device__ void begin(const Pipeline& pipeline, int stage, int k_block, int, u32 tile, int, int) {
        fields = &pipeline.fields(stage, k_block, tile);
    }
    __device__ ScaleOf<Config> operator()(int warp, int lane, int, int of_tile, int step) const {
        ScaleOf<Config> group = load(*fields, warp, lane / 4, Config::scale_index(of_tile, step));
        fold_zero<Config>(group);
        return group;
    }
};

template <class Config>
struct QuadScales<Config, 4> {
    static constexpr int K_BLOCKS = Config::K_BLOCKS, K_BLOCKS_PER_STAGE = Config::K_BLOCKS_PER_STAGE;
    // A batch of scales is decoded at once: those of a stage; of a tile, if a stage would leave lanes idle or end
    // within a group.
    static constexpr bool OF_TILE =
        K_BLOCKS > 1 && (K_BLOCKS_PER_STAGE == 1 || K_BLOCKS_PER_STAGE % Config::K_BLOCKS_PER_SCALE != 0);
    static constexpr int BATCH_K_BLOCKS = OF_TILE ? K_BLOCKS : K_BLOCKS_PER_STAGE;
    static constexpr int BATCH = BATCH_K_BLOCKS / Config::K_BLOCKS_PER_SCALE * Config::K_BLOCK_SCALES;
    static constexpr int EACH = OF_TILE ? Config::K_BLOCK_SCALES : (BATCH + 3) / 4;  // scales per lane
    static_assert(BATCH <= 4 * EACH, "a quad of lanes holds a batch");

    const ScaleLoader<Config>& load;
    u32 number = ~0u;  // tile whose scales are decoded
    ScaleOf<Config> mine[EACH];

    __device__ explicit QuadScales(const ScaleLoader<Config>& load) : load(load) {}
    // Scales beyond the end of K are decoded, and not used.
    template <class Pipeline>
    __device__ void begin(const Pipeline& pipeline, int stage, int k_block, int of_tile, u32 tile, int warp, int lane) {
        if (OF_TILE ? tile == number : k_block % BATCH_K_BLOCKS != 0) return;
        number = tile;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const u32 at = (lane % 4u * EACH + i) % BATCH;
            const auto& fields = pipeline.fields(stage, k_block + at / Config::TILE_SCALES * K_BLOCKS, tile);
            const int first = OF_TILE ? 0 : Config::scale_index(of_tile, 0);
            mine[i] = load(fields, warp, lane / 4, (first + at) % Config::TILE_SCALES);
        }
    }
    __device__ ScaleOf<Config> operator()(int, int, int k_block, int of_tile, int step) const {
        const int index = step / Config::SCALE_STEPS, at = Config::scale_index(k_block, step);
        ScaleOf<Config> group;
        if constexpr (OF_TILE)
            group = broadcast(mine[index], of_tile / Config::K_BLOCKS_PER_SCALE);
        else
            group = broadcast(mine[at % EACH], at / EACH);
        fold_zero<Config>(group);
        return group;
    }

private:
    __device__ static ScaleOf<Config> broadcast(const ScaleOf<Config>& group, int lane) {
        return shfl_quad<Config::TileFormat::HAS_MINIMUM>(group, lane);
    }
};

}  // namespace qgemm
