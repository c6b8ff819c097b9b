// prefill_sm90 with GROUPED 1: products by experts W [E, n, k] of rows of x that moe_sort has sorted by expert.
//
//   y [rows, n] = x @ W[expert of the row].T
//   GATED: gate(x @ W0[expert].T + bias0, x @ W1[expert].T + bias1), W0 being the weights of the gate
//
// A tile of y has rows of one expert: a token tile of at most BLOCK_TOKENS rows, from the list of moe_sort. GATED: a
// tile has row_blocks of the gate, each followed by the row_block that it gates.
// Config: Sm90 of config.cuh with GROUPED.
#pragma once

#include "consumer.cuh"
#include "moe/token_tiles.cuh"

namespace qgemm {

template <class Config>
struct Problem<Config, true> : KStages<Config> {
    static constexpr int MATRICES = Config::MATRICES;
    const GroupedProducts& product;
    i64 n;  // rows of W
    int m;  // rows of the buffer of x: BLOCK_TOKENS more than the largest number of sorted rows
    const StreamK& stream_k;
    TokenTileMap map;

    __device__ TileCoord coord(int tile) const { return map.coord(tile); }
    __device__ int first_token(int tile) const { return coord(tile).tokens->row; }
    __device__ int first_loaded(int tile) const { return first_token(tile); }
    __device__ int end_token(int tile) const {
        const TokenTile* tokens = coord(tile).tokens;
        return tokens->row + tokens->rows;
    }
    __device__ int first_row_block(int tile) const { return coord(tile).row_tile * Config::Y_ROW_BLOCKS; }
    __device__ i64 row_block(int tile, int number) const { return first_row_block(tile) + number / MATRICES; }
    __device__ const float* row_absmax(const float*, int tile, int number) const {
        const void* first = product.row_absmax[number % MATRICES];
        const i64 row = min(row_block(tile, number), (n - 1) / TILE_ROWS) * TILE_ROWS;
        return reinterpret_cast<const float*>(expert_data(first, coord(tile).tokens->expert)) + row;
    }
    // first: data of expert 0.
    __device__ const char* expert_data(const void* first, int expert) const {
        return static_cast<const char*>(first) + expert * product.expert_bytes;
    }
};

template <class Config>
struct Source<Config, true> {
    using Tile = typename Config::Tile;
    static constexpr int MATRICES = Config::MATRICES;
    const Tile* tiles;
    int tiles_along_k, row_blocks, token;
    i64 matrix_bytes;  // from a tile of the gate to the same tile of the matrix that it gates

    __device__ Source(const Problem<Config>& p, const Tile*, const WorkTile& s)
        : tiles_along_k(p.k_blocks / Config::K_BLOCKS) {
        const auto coord = p.coord(s.tile);
        const int first = coord.row_tile * Config::Y_ROW_BLOCKS, w_row_blocks = int((p.n + TILE_ROWS - 1) / TILE_ROWS);
        row_blocks = MATRICES * min(Config::Y_ROW_BLOCKS, w_row_blocks - first);
        token = coord.tokens->row;
        matrix_bytes = static_cast<const char*>(p.product.tiles[1]) - static_cast<const char*>(p.product.tiles[0]);
        const char* expert = p.expert_data(p.product.tiles[0], coord.tokens->expert);
        tiles = reinterpret_cast<const Tile*>(expert) + i64(first) * tiles_along_k;
    }
    __device__ const Tile* beside(const Tile* first, int row_block) const {
        const Tile* tile = first + min(row_block, row_blocks - 1) / MATRICES * tiles_along_k;
        return reinterpret_cast<const Tile*>(reinterpret_cast<const char*>(tile) + row_block % MATRICES * matrix_bytes);
    }
};

// Gating of a tile. The two warpgroups of a row_block, of the gate and of the product that it gates, exchange half of
// their epilogue tiles through shared memory. Each computes and stores the gated values of the other half.
template <class Config>
struct GatedExchange {
    static constexpr int EPI_TILES = Config::EPI_TILES, EPI_QUADS = Config::EPI_QUADS;
    using Acc = typename Config::Acc;
    const Warpgroup<Config>& wg;
    const int matrix = wg.row_block % Config::MATRICES;

    // Replaces accumulators by gated values in the epilogue tiles of the mask that it returns.
    __device__ __forceinline__ u32 exchange(Acc& acc) const {
#pragma unroll
        for (int pair = 0; pair < EPI_TILES; pair += 2) {
#pragma unroll
            for (int epi_tile = pair; epi_tile < pair + 2 && epi_tile < EPI_TILES; ++epi_tile)
                if (epi_tile % 2 != matrix) send(acc, epi_tile);
            barrier();
#pragma unroll
            for (int epi_tile = pair; epi_tile < pair + 2 && epi_tile < EPI_TILES; ++epi_tile)
                if (epi_tile % 2 == matrix) receive(acc, epi_tile);
            barrier();  // the partials are read
        }
        return matrix ? 0xaaaaaaaa : 0x55555555;
    }

private:
    // Waits for the first warpgroup along K of both row_blocks.
    __device__ void barrier() const {
        constexpr int FIRST = FIRST_ROW_BLOCK_BARRIER + Config::ROW_BLOCKS + Config::CONSUMERS;
        static_assert(FIRST + Config::Y_ROW_BLOCKS <= INIT_BARRIER, "an SM has 16 barriers");
        bar_sync(FIRST + wg.row_block / Config::MATRICES, Config::MATRICES * WARPGROUP_THREADS);
    }
    __device__ __forceinline__ void send(const Acc& acc, int epi_tile) const {
        auto& to = wg.smem.partial(wg.row_block, epi_tile)[0];
#pragma unroll
        for (int i = 0; i < EPI_QUADS; ++i) to[i][wg.thread] = quad(acc, epi_tile * EPI_QUADS + i);
    }
    __device__ __forceinline__ void receive(Acc& acc, int epi_tile) const {
        auto& from = wg.smem.partial(wg.row_block ^ 1, epi_tile)[0];
#pragma unroll
        for (int i = 0; i < EPI_QUADS; ++i) {
            const float4 quad = from[i][wg.thread];
            const float other[4] = {quad.x, quad.y, quad.z, quad.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float& own = acc[4 * (epi_tile * EPI_QUADS + i) + j];
                own = matrix ? gated<logistic_16>(Config::GATE, other[j], own)
                             : gated<logistic_16>(Config::GATE, own, other[j]);
            }
        }
    }
};

// Epilogue of a consumer warpgroup: stores sorted rows of y.
template <class Config>
struct StoreGrouped {
    const GroupedProducts& product;
    const Epilogue epilogue = {product.epilogue};

    __device__ __forceinline__ void operator()(const Warpgroup<Config>& wg, typename Config::Acc& acc, int tile,
                                               u32 epi_tiles, const RowExponent<Config>& row_exponent) const {
        apply_x_factors(wg, acc, tile, {product.x_pitch == product.k ? nullptr : product.x, product.k});
        if constexpr (Config::GATED) {
            add_biases(wg, acc, tile, row_exponent);
            epi_tiles &= GatedExchange<Config>{wg}.exchange(acc);
            RowExponent<Config> none = row_exponent;
            none.weight[0] = none.weight[1] = 0;
            EpilogueStore<Config>{wg, none, epi_tiles}.store(acc, tile, epilogue);
        } else {
            EpilogueStore<Config>{wg, row_exponent, epi_tiles}.store(acc, tile, epilogue);
        }
    }

private:
    __device__ __forceinline__ void add_biases(const Warpgroup<Config>& wg, typename Config::Acc& acc, int tile,
                                               const RowExponent<Config>& row_exponent) const {
        const int matrix = wg.row_block % Config::MATRICES;
        const i64 row = wg.p.row_block(tile, wg.row_block) * TILE_ROWS + 16 * wg.warp + wg.lane / 4;
        const void* biases = product.biases[matrix];
        const int type = product.bias_types[matrix];
        float bias[2];
#pragma unroll
        for (int r = 0; r < 2; ++r)
            bias[r] = type && row + 8 * r < wg.p.n
                          ? load_as(biases, type, wg.p.coord(tile).tokens->expert * product.expert_rows + row + 8 * r)
                          : 0;
#pragma unroll
        for (int i = 0; i < Config::ACC_SIZE; ++i) acc[i] = acc[i] * row_exponent.acc(i / 2 % 2) + bias[i / 2 % 2];
    }
};

// smem: address of Smem in shared memory. Only the device knows the number of token tiles, so every CTA computes the
// schedule of the persistent grid.
template <class Config>
__device__ __forceinline__ void multiply(u32 smem, const TensorMap* x, const GroupedProducts& product) {
    __shared__ GroupedSchedule schedule;
    const Extent<Config> extent(product.n, product.k);
    // The first product of a layer follows the sort and must wait for it. The second follows a kernel that has waited:
    // W loads while that kernel runs, and nothing is stored, partials included, before x is there.
    if (!product.tiles_are_known) griddepcontrol_wait();
    const int token_tiles = static_cast<const TokenTiles*>(product.counts)->count;
    if (token_tiles == 0) return;
    if (threadIdx.x == 0) schedule.init(product.stream_k, token_tiles * extent.row_tiles, extent.work_units());
    __syncthreads();
    const TokenTileMap map = {static_cast<const TokenTile*>(product.token_tiles), schedule.stream_k.row_tiles,
                              extent.row_tiles, token_tiles - 1};
    const Problem<Config> problem = {{extent.k_blocks}, product, product.n, product.rows_of_x, schedule.stream_k, map};
    auto* workspace = static_cast<Workspace<Config::MAX_PARTIALS>*>(product.partials);
    run_prefill<Config>(smem, problem, x, nullptr, nullptr, workspace, StoreGrouped<Config>{product});
}

}  // namespace qgemm
