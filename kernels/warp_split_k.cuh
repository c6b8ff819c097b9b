// A CTA that owns M16_TILES groups of 16 rows of a row_block, or ROW_BLOCKS whole row_blocks: its WARP_SPLIT_K warps
// take the tiles along K in turn, each k_block by k_block through a pipeline of its own that no other warp waits for,
// and their sums meet at the end, in a fixed order.
#pragma once

#include "epilogue.cuh"
#include "ptx/mma.cuh"
#include "ptx/griddepcontrol.cuh"
#include "pipeline.cuh"
#include "tile.cuh"

constexpr int THREADS = WARP_SPLIT_K * 32;
constexpr int ROWS = 16 * M16_TILES * ROW_BLOCKS;
constexpr int COLUMN_TILES = (TOKENS + 7) / 8;
constexpr int TOKEN_STRIDE = TOKENS > 1;  // from a token of x to the next: a single one is all eight of its tile
static_assert(ROW_BLOCKS == 1 || M16_TILES == WARPS, "several row_blocks are whole");

using KBlock = KBlockOf<M16_TILES>;
using Fields = FormatOf<M16_TILES>;
using WarpAcc = Acc[ROW_BLOCKS][M16_TILES][COLUMN_TILES];

// Where this warp stands: its product, rows and first tile, and how many k_blocks it takes of its share of K.
struct WarpCoord {
    const Products& products;
    int index;  // of its product
    int warp_k, lane;
    i64 first_row;
    int first_m16;   // of the row_block
    int row_blocks;  // that there are for this CTA
    const Tile* tiles;
    i64 along;  // tiles of a row_block
    int count;

    __device__ WarpCoord(const Products& products) : products(products), index(0) {
        while (blockIdx.x >= products.of[index].end) ++index;
        warp_k = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
        along = (products.k + TILE_COLUMNS - 1) / TILE_COLUMNS;
        first_row = (blockIdx.x - (index ? products.of[index - 1].end : 0)) * ROWS;
        first_m16 = first_row % TILE_ROWS / 16;
        row_blocks = int(min(i64(ROW_BLOCKS), (products.of[index].n - first_row + TILE_ROWS - 1) / TILE_ROWS));
        tiles = static_cast<const Tile*>(products.arrays[index].tiles) + first_row / TILE_ROWS * along + warp_k;
        count = int(along - warp_k + WARP_SPLIT_K - 1) / WARP_SPLIT_K * K_BLOCKS;
    }
};

// A walk along the k_blocks of a warp.
struct KTileIterator {
    const WarpCoord& coord;
    const Tile* tile = coord.tiles;  // of the first row_block
    int k_block = 0;                 // of the tile
    int count = 0;                   // tiles before it

    __device__ void advance() {
        if (K_BLOCKS == 1 || ++k_block == K_BLOCKS) tile += WARP_SPLIT_K, ++count, k_block = 0;
    }
};

// A stage of a pipeline: weights, and their share of x, an X, unless that is void.
template <class Weights, class X>
struct StageOf : Weights {
    X x;
};
template <class Weights>
struct StageOf<Weights, void> : Weights {};

struct Codes {
    KBlock codes[ROW_BLOCKS];
};
struct CodesAndFields {
    struct {
        KBlock codes;
        Fields fields;
    } row_blocks[ROW_BLOCKS];
};

// STAGES k_blocks of a warp. The fields of a tile come with its first k_block and stay until its last.
template <class X, int K_BLOCKS>
struct SmemPipeline {
    static constexpr int TILES = 1 + (STAGES - 1 + K_BLOCKS - 1) / K_BLOCKS;  // that STAGES k_blocks may belong to
    using Stage = StageOf<Codes, X>;
    Stage stages[STAGES];
    Fields tile_fields[TILES][ROW_BLOCKS];

    // Of number i of the warp's k_blocks, which is in this stage.
    __device__ const KBlock& codes(int stage, int row_block) const { return stages[stage].codes[row_block]; }
    __device__ const Fields& fields(int i, int, int row_block) const {
        return tile_fields[i / K_BLOCKS % TILES][row_block];
    }
    static __device__ u32 bytes(const KTileIterator& k_tiles) {
        return k_tiles.coord.row_blocks * (sizeof(KBlock) + (k_tiles.k_block == 0 ? sizeof(Fields) : 0));
    }
    template <class Copy>
    __device__ void load(const KTileIterator& k_tiles, int stage, Copy copy) {
#pragma unroll
        for (int row_block = 0; row_block < ROW_BLOCKS; ++row_block) {
            if (row_block >= k_tiles.coord.row_blocks) break;
            const Tile& tile = k_tiles.tile[row_block * k_tiles.coord.along];
            stages[stage].codes[row_block].copy_from(tile.k_blocks[k_tiles.k_block], k_tiles.coord.first_m16, copy);
            if (k_tiles.k_block == 0)
                tile_fields[k_tiles.count % TILES][row_block].copy_from(tile.fields, k_tiles.coord.first_m16, copy);
        }
    }
};

// A tile of one k_block comes in one piece, if the CTA takes all its rows.
template <class X>
struct SmemPipeline<X, 1> {
    using Stage = StageOf<CodesAndFields, X>;
    Stage stages[STAGES];

    __device__ const KBlock& codes(int stage, int row_block) const { return stages[stage].row_blocks[row_block].codes; }
    __device__ const Fields& fields(int, int stage, int row_block) const {
        return stages[stage].row_blocks[row_block].fields;
    }
    static __device__ u32 bytes(const KTileIterator& k_tiles) {
        return k_tiles.coord.row_blocks * sizeof(CodesAndFields::row_blocks[0]);
    }
    template <class Copy>
    __device__ void load(const KTileIterator& k_tiles, int stage, Copy copy) {
#pragma unroll
        for (int row_block = 0; row_block < ROW_BLOCKS; ++row_block) {
            if (row_block >= k_tiles.coord.row_blocks) break;
            const Tile& tile = k_tiles.tile[row_block * k_tiles.coord.along];
            auto& to = stages[stage].row_blocks[row_block];
            if constexpr (M16_TILES == WARPS) {
                copy(&to, &tile, sizeof(Tile));
            } else {
                to.codes.copy_from(tile.k_blocks[0], k_tiles.coord.first_m16, copy);
                to.fields.copy_from(tile.fields, k_tiles.coord.first_m16, copy);
            }
        }
    }
};

// Runs a warp's k_blocks through its pipeline. load_weights(stage) and load_x(stage) copy the next k_block into a
// stage, multiply(i, stage) adds the products of number i; prepare() is done while the first weights are on their way,
// prepare_x() as soon as x may be read.
template <class Arrivals, class LoadWeights, class Prepare, class PrepareX, class LoadX, class Multiply>
__device__ inline void stream(int count, const Arrivals& arrivals, LoadWeights load_weights, Prepare prepare,
                              PrepareX prepare_x, LoadX load_x, Multiply multiply) {
    for (int stage = 0; stage < min(STAGES, count); ++stage) load_weights(stage);
    prepare();
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();  // the weights never change, x and y may belong to the kernels before
    prepare_x();
    for (int stage = 0; stage < STAGES; ++stage) {
        if (stage < count) load_x(stage);
        arrivals.close(stage);
    }
    int stage = 0, phase = 0;
    for (int i = 0; i < count; ++i) {
        arrivals.wait(stage, phase);
        multiply(i, stage);
        __syncwarp();  // every lane has read the stage
        if (i + STAGES < count) {
            load_weights(stage);
            load_x(stage);
        }
        arrivals.close(stage);
        if (++stage == STAGES) stage = 0, ++phase;
    }
}

// The warps' sums times a unit, that of rows g and of rows g + 8, -> y. `partials` is shared memory of the whole CTA.
__device__ inline void reduce_and_store(const WarpAcc& acc, float2 unit, float* partials, const WarpCoord& coord,
                                        int m) {
    constexpr int STRIDE = ROWS + 4;  // rows of g and columns of t fall on different banks
    const int g = coord.lane / 4, t = coord.lane % 4;
#pragma unroll
    for (int m16 = 0; m16 < ROW_BLOCKS * M16_TILES; ++m16)
#pragma unroll
        for (int tokens = 0; tokens < COLUMN_TILES; ++tokens)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = 16 * m16 + g + 8 * (i / 2), token = 8 * tokens + 2 * t + i % 2;
                const float sum = (i < 2 ? unit.x : unit.y) * acc[m16 / M16_TILES][m16 % M16_TILES][tokens].sum[i];
                if (i % 2 < TOKENS && token < m) partials[(coord.warp_k * TOKENS + token) * STRIDE + row] = sum;
            }
    __syncthreads();
    const auto& product = coord.products.of[coord.index];
    const Epilogue epilogue = {{coord.products.arrays[coord.index].outputs, product.types}};
    for (int i = threadIdx.x; i < m * ROWS; i += THREADS) {
        const int row = i % ROWS, token = i / ROWS;
        float sum = 0;
#pragma unroll
        for (int s = 0; s < WARP_SPLIT_K; ++s) sum += partials[(s * TOKENS + token) * STRIDE + row];
        if (coord.first_row + row < product.n) epilogue.store(token * product.n, coord.first_row + row, sum);
    }
}
