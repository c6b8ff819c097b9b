// ExpertCoord: the expert, the rows and the tiles along K of a warp in products by experts W [E, n, k].
//
// A slot is an element of ids [T, top_k]. Not SUMMED: a CTA has rows of the expert of slot blockIdx.y. SUMMED: it has
// the same rows of all experts of token blockIdx.y, end to end along K; x has K numbers for each of them. Config:
// Decode of config.cuh, TOKENS = 1, SUMMED.
#pragma once

#include "ptx/vote_ballot.cuh"
#include "coord.cuh"

namespace qgemm {

template <class Config>
struct ExpertCoord : WarpCoord<Config> {
    // Without bulk copies x would be a cp.async group ahead of its W, and groups complete in order.
    static constexpr bool X_FIRST = !Config::SUMMED && Config::BULK;
    const ExpertProducts& all;
    const int (&shared)[32];  // experts of the token's slots, or of the one slot, for all warps
    i64 slot;                 // slot of the CTA, or the first slot of its token
    int expert;               // expert of the slot, or of slot + lane; -1: none
    int stand_in;  // SUMMED: the expert that is read for a slot without one; -1: no slot of the token has one

    // The ids must be written. One warp loads them to shared memory: loads by all warps would queue at one bank of the
    // L2 cache.
    __device__ ExpertCoord(const ExpertProducts& all, int (&shared)[32])
        : WarpCoord<Config>(all.products),
          all(all),
          shared(shared),
          slot(Config::SUMMED ? i64(blockIdx.y) * all.top_k : blockIdx.y) {
        static_assert(Config::TOKENS == 1, "a CTA has one token: tokens have different experts");
        if (this->warp_k == 0)
            shared[this->lane] = this->lane < (Config::SUMMED ? all.top_k : 1) ? expert_of(slot + this->lane) : -1;
        __syncthreads();
        if constexpr (Config::SUMMED) {
            expert = shared[this->lane];
            const u32 valid = vote_ballot(expert >= 0);
            stand_in = valid ? __shfl_sync(~0u, expert, __ffs(valid) - 1) : -1;
            const i64 tiles = this->tiles_along * all.top_k;
            this->count = int(tiles - this->share + Config::SPLIT_K - 1) / Config::SPLIT_K * Config::STAGES_OF_TILE;
        } else {
            expert = shared[0];
            this->tiles = of_expert(this->tiles, expert);
        }
    }
    // -1 for an id that is no expert. Loads from the L2 cache, since griddepcontrol.wait may still follow.
    __device__ int expert_of(i64 slot) const {
        const i64 id = all.wide_ids ? __ldcg(static_cast<const i64*>(all.ids) + slot)
                                    : __ldcg(static_cast<const int*>(all.ids) + slot);
        return id >= 0 && id < all.experts ? int(id) : -1;
    }
    // A tile of expert 0 -> the same tile of an expert; expert -1 keeps the valid address of expert 0.
    __device__ const typename Config::Tile* of_expert(const typename Config::Tile* tile, int expert) const {
        const char* first = reinterpret_cast<const char*>(tile);
        return reinterpret_cast<const typename Config::Tile*>(first + max(expert, 0) * all.expert_bytes);
    }
    __device__ float weight(i64 slot) const { return all.weights ? load_as(all.weights, all.weights_type, slot) : 1; }
};

// The k_blocks of a warp through all experts of a token, one expert after the other.
template <class Config>
struct KTileIterator<Config, true> {
    const ExpertCoord<Config>& coord;
    const typename Config::Tile* tile;
    i64 along = coord.share;  // tiles of the row_block before `tile`
    int number = 0;           // number of the expert in the token
    int k_block = 0, count = 0;

    __device__ KTileIterator(const ExpertCoord<Config>& coord) : coord(coord) { enter_expert(); }

    __device__ const typename Config::Tile& of(int row_block) const {
        const char* first = reinterpret_cast<const char*>(tile);
        return *reinterpret_cast<const typename Config::Tile*>(first + row_block * coord.next_row_block);
    }
    // All lanes of the warp call it.
    __device__ void advance() {
        if (!Config::WHOLE_TILES && ++k_block < Config::K_BLOCKS) return;
        k_block = 0, ++count, along += Config::SPLIT_K;
        enter_expert();
    }
    __device__ void enter_expert() {
        while (along >= coord.tiles_along) along -= coord.tiles_along, ++number;
        const int expert = __shfl_sync(~0u, coord.expert, number % 32);  // after the last tile: any, it is not read
        tile = coord.of_expert(coord.tiles - coord.share + along, expert < 0 ? coord.stand_in : expert);
    }
};

}  // namespace qgemm
