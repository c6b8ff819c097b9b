// Grouped product of experts: rows of x are sorted by expert, and each tile of y has those of one expert.
//
// moe_sort lists the token tiles, TOKENS sorted rows of an expert at most. GATED: a tile has row_blocks of the gate,
// each followed by the same one of what it gates.
// Config: Sm90 of config.cuh with GROUPED, GATED, GATE (a GateCode).
#pragma once

#include "consumer.cuh"
#include "token_tiles.cuh"

namespace qgemm {

template <class Base>
struct Grouped : Sm90<Base> {
    static constexpr bool GROUPED = true;
    static constexpr int SIDES = Base::GATED ? 2 : 1;  // matrices of W: the gate and what it gates
    static constexpr int Y_ROW_BLOCKS = Base::ROW_BLOCKS / SIDES;
    static_assert(Base::ROW_BLOCKS % SIDES == 0, "each row_block of the gate has one that it gates");
    static_assert(!Base::SINGLE_TILE, "the number of tiles is known on the device alone");
};

template <class Config>
struct Problem<Config, true> : KStages<Config> {
    static constexpr int SIDES = Config::SIDES;
    const GroupedProducts& all;
    i64 n;  // rows of W
    int m;  // rows of the buffer of x, TOKENS more than there can be of sorted ones
    const StreamK& stream_k;
    TokenTileMap map;

    __device__ TileCoord at(int tile) const { return map.at(tile); }
    __device__ int first_token(int tile) const { return at(tile).tokens->row; }
    __device__ int first_loaded(int tile) const { return first_token(tile); }
    __device__ int end_token(int tile) const {
        const TokenTile* tokens = at(tile).tokens;
        return tokens->row + tokens->rows;
    }
    __device__ int first_row_block(int tile) const { return at(tile).row_tile * Config::Y_ROW_BLOCKS; }
    __device__ i64 row_block(int tile, int number) const { return first_row_block(tile) + number / SIDES; }
    __device__ const float* row_absmax(const float*, int tile, int number) const {
        const void* first = all.row_absmax[number % SIDES];
        const i64 row = min(row_block(tile, number), (n - 1) / TILE_ROWS) * TILE_ROWS;
        return reinterpret_cast<const float*>(of_expert(first, at(tile).tokens->expert)) + row;
    }
    __device__ const char* of_expert(const void* first, int expert) const {
        return static_cast<const char*>(first) + expert * all.expert_bytes;
    }
};

template <class Config>
struct Source<Config, true> {
    using Tile = typename Config::Tile;
    const Tile* tiles;
    int tiles_along_k, row_blocks, token;
    i64 to_gated;  // bytes from a tile of the gate to the one of what it gates

    __device__ Source(const Problem<Config>& p, const Tile*, const WorkTile& s)
        : tiles_along_k(p.k_blocks / Config::K_BLOCKS) {
        const auto at = p.at(s.tile);
        const int first = at.row_tile * Config::Y_ROW_BLOCKS, of_w = int((p.n + TILE_ROWS - 1) / TILE_ROWS);
        row_blocks = Config::SIDES * min(Config::Y_ROW_BLOCKS, of_w - first);
        token = at.tokens->row;
        to_gated = static_cast<const char*>(p.all.tiles[1]) - static_cast<const char*>(p.all.tiles[0]);
        tiles =
            reinterpret_cast<const Tile*>(p.of_expert(p.all.tiles[0], at.tokens->expert)) + i64(first) * tiles_along_k;
    }
    __device__ const Tile* beside(const Tile* first, int row_block) const {
        constexpr int SIDES = Config::SIDES;
        const Tile* at = first + min(row_block, row_blocks - 1) / SIDES * tiles_along_k;
        return reinterpret_cast<const Tile*>(reinterpret_cast<const char*>(at) + row_block % SIDES * to_gated);
    }
};

// The gate of a tile's values: the warpgroups of a row_block of the gate and of what it gates send each other half of
// the epilogue tiles, as registers hold them, and each makes and stores the other half.
template <class Config>
struct GatedStore {
    static constexpr int EPI_TILES = Config::EPI_TILES, EPI_QUADS = Config::EPI_QUADS;
    using Acc = typename Config::Acc;
    const Warpgroup<Config>& wg;
    const int side = wg.row_block % Config::SIDES;

    // Replaces values by what the gate makes of them, in the epilogue tiles of the mask that it returns.
    __device__ __forceinline__ u32 exchange(Acc& acc) const {
#pragma unroll
        for (int pair = 0; pair < EPI_TILES; pair += 2) {
#pragma unroll
            for (int epi_tile = pair; epi_tile < pair + 2 && epi_tile < EPI_TILES; ++epi_tile)
                if (epi_tile % 2 != side) send(acc, epi_tile);
            barrier();
#pragma unroll
            for (int epi_tile = pair; epi_tile < pair + 2 && epi_tile < EPI_TILES; ++epi_tile)
                if (epi_tile % 2 == side) receive(acc, epi_tile);
            barrier();  // what was sent is read
        }
        return side ? 0xaaaaaaaa : 0x55555555;
    }

private:
    // Waits for the first warpgroup along K of each of the two row_blocks.
    __device__ void barrier() const {
        constexpr int FIRST = FIRST_ROW_BLOCK_BARRIER + Config::ROW_BLOCKS + Config::CONSUMERS;
        static_assert(FIRST + Config::Y_ROW_BLOCKS <= INIT_BARRIER, "an SM has 16 barriers");
        bar_sync(FIRST + wg.row_block / Config::SIDES, Config::SIDES * WARPGROUP_THREADS);
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
            const float got[4] = {quad.x, quad.y, quad.z, quad.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float& own = acc[4 * (epi_tile * EPI_QUADS + i) + j];
                own = side ? gated<logistic_16>(Config::GATE, got[j], own)
                           : gated<logistic_16>(Config::GATE, own, got[j]);
            }
        }
    }
};

// Epilogue of a consumer warpgroup: sorted rows of y; GATED: of what the gate makes of both products and their biases.
template <class Config>
struct StoreGrouped {
    const GroupedProducts& all;
    const Epilogue epilogue = {all.epilogue};

    __device__ __forceinline__ void operator()(const Warpgroup<Config>& wg, typename Config::Acc& acc, int tile,
                                               u32 epi_tiles, const RowExponent<Config>& row_exponent) const {
        if constexpr (Config::GATED) {
            add_biases(wg, acc, tile, row_exponent);
            epi_tiles &= GatedStore<Config>{wg}.exchange(acc);
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
        const int side = wg.row_block % Config::SIDES;
        const i64 row = wg.p.row_block(tile, wg.row_block) * TILE_ROWS + 16 * wg.warp + wg.lane / 4;
        const void* biases = all.biases[side];
        const int type = all.bias_types[side];
        float bias[2];
#pragma unroll
        for (int r = 0; r < 2; ++r)
            bias[r] = type && row + 8 * r < wg.p.n
                          ? load_as(biases, type, wg.p.at(tile).tokens->expert * all.expert_rows + row + 8 * r)
                          : 0;
#pragma unroll
        for (int i = 0; i < Config::ACC_SIZE; ++i) acc[i] = acc[i] * row_exponent.acc(i / 2 % 2) + bias[i / 2 % 2];
    }
};

}  // namespace qgemm
