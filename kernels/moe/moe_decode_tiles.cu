// moe_decode_tiles: products by experts W [E, n, k] that few tokens each have, of rows that moe_sort has sorted by
// expert, at the speed of memory.
//
//   y [rows, n] = x @ W[expert of the row].T
//   GATED: of two products by the same expert, of which one is the gate of the other, biases added to both.
// decode's pipeline with the expert looked up by each CTA, which has some rows of W and the TOKENS sorted rows of a
// token tile at most; CTAs behind the last tile, whose number is known on the device alone, have none.
// Config: that of decode with PREFETCH = 0; CTAS (of an SM, at least).
#include "gemm/decode/a16.cuh"

namespace qgemm {

struct TileDecode : Decode<Config> {
    static_assert(Config::PREFETCH == 0, "what is prefetched may belong to no tile");
};

struct TileDecodeCoord : WarpCoord<TileDecode> {
    const TokenTile tokens;

    __device__ TileDecodeCoord(const ExpertTileProducts& all)
        : WarpCoord(all.products), tokens(static_cast<const TokenTile*>(all.token_tiles)[blockIdx.y]) {
        const char* first = reinterpret_cast<const char*>(tiles);
        tiles = reinterpret_cast<const TileDecode::Tile*>(first + tokens.expert * all.expert_bytes);
    }
};

struct StoreTile {
    const ExpertTileProducts& all;
    const TileDecodeCoord& coord;

    __device__ void begin() const {}
    template <class Sums>
    __device__ void operator()(int token, i64 row, Sums sums) const {
        const EpilogueArguments to = epilogue_of(0);
        float made = sums(0) + bias(0, row);
        if constexpr (Config::GATED) made = gated(to.types.gate, made, sums(1) + bias(1, row));
        store_as(to.arrays.y, to.types.y, (coord.tokens.row + token) * all.products.of[0].n + row, made);
    }

private:
    __device__ float bias(int product, i64 row) const {
        const EpilogueArguments of = epilogue_of(product);
        return load_as(of.arrays.bias, of.types.bias, coord.tokens.expert * all.expert_rows + row);
    }
    __device__ EpilogueArguments epilogue_of(int product) const {
        return {all.products.arrays[product].outputs, all.products.of[product].types};
    }
};

}  // namespace qgemm

extern "C" __global__ void __launch_bounds__(qgemm::TileDecode::THREADS, qgemm::Config::CTAS)
    moe_decode_tiles(const __grid_constant__ qgemm::ExpertTileProducts all) {
    using namespace qgemm;
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ unsigned long long words[TileDecode::WARP_SPLIT_K][TileDecode::STAGES];
    // The kernel before the first product of a layer reads what the sort wrote; that before the second has done so.
    if (!all.tiles_are_known) griddepcontrol_wait();
    if (int(blockIdx.y) >= static_cast<const TokenTiles*>(all.counts)->count) return;
    const TileDecodeCoord coord(all);
    const auto* x = static_cast<const Config::In*>(all.products.x) + coord.tokens.row * all.products.k;
    run_decode<TileDecode>(coord, x, coord.tokens.rows, memory, words, StoreTile{all, coord});
}
