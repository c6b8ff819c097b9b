// Grouping of decode: products by experts W [E, n, k] with few tokens each, of rows that moe_sort has sorted by expert.
//
//   y [rows, n] = x @ W[expert of the row].T
//   GATED: of two products by the same expert the first is the gate of the second, biases added to both.
// A CTA has some rows of W and a token tile, TOKENS sorted rows at most. The grid is as large as any ids may need: CTAs
// after the last token tile, whose number only the device knows, exit.
// Config: Decode of config.cuh with PREFETCH = 0.
#pragma once

#include "coord.cuh"
#include "policies.cuh"
#include "reduce.cuh"

namespace qgemm {

template <class Config>
struct ExpertTileCoord : WarpCoord<Config> {
    const TokenTile tokens;

    __device__ ExpertTileCoord(const ExpertTileProducts& all)
        : WarpCoord<Config>(all.products), tokens(static_cast<const TokenTile*>(all.token_tiles)[blockIdx.y]) {
        const char* first = reinterpret_cast<const char*>(this->tiles);
        this->tiles = reinterpret_cast<const typename Config::Tile*>(first + tokens.expert * all.expert_bytes);
    }
};

template <class Config>
struct StoreExpertTile {
    const ExpertTileProducts& all;
    const ExpertTileCoord<Config>& coord;

    __device__ void begin() const {}
    template <class Sums>
    __device__ void operator()(int token, i64 row, Sums sums) const {
        const EpilogueArguments to = epilogue_of(0);
        float y = sums(0) + bias(0, row);
        if constexpr (Config::GATED) y = gated(to.types.gate, y, sums(1) + bias(1, row));
        store_as(to.arrays.y, to.types.y, (coord.tokens.row + token) * all.products.of[0].n + row, y);
    }

private:
    __device__ float bias(int product, i64 row) const {
        const EpilogueArguments epilogue = epilogue_of(product);
        return load_as(epilogue.arrays.bias, epilogue.types.bias, coord.tokens.expert * all.expert_rows + row);
    }
    __device__ EpilogueArguments epilogue_of(int product) const {
        return {all.products.arrays[product].outputs, all.products.of[product].types};
    }
};

struct ExpertTiles {
    using Arguments = ExpertTileProducts;

    template <class Config>
    static __device__ __forceinline__ void run(const ExpertTileProducts& all, unsigned char* memory,
                                               unsigned long long (&mbarriers)[Config::WARP_SPLIT_K][Config::STAGES]) {
        static_assert(Config::PREFETCH == 0 && !Config::SUMMED, "prefetching begins before the expert is known");
        // The first product of a layer follows the sort. The second follows the first, which has waited for the sort.
        if (!all.tiles_are_known) griddepcontrol_wait();
        if (int(blockIdx.y) >= static_cast<const TokenTiles*>(all.counts)->count) return;
        const ExpertTileCoord<Config> coord(all);
        const auto* x = static_cast<const typename Config::In*>(all.products.x) + coord.tokens.row * all.products.k;
        Config::Mainloop::template run<Config>(coord, x, coord.tokens.rows, memory, mbarriers,
                                               StoreExpertTile<Config>{all, coord});
    }
};

}  // namespace qgemm
