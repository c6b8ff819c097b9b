// gemv_dp4a: y [m, n] = x @ W [n, k].T for few tokens from x's blocks of codes, k_block by k_block [along][m], integer
// dots by dp4a.
//
// Per block, with the weight's scale dw and minimum mw, the activation's scale da and sum sa, and sumi the dot product
// of the codes (unsigned but for q8):   sum += dw * (da * sumi - ZERO * sa) + mw * sa,   sa counted once, by lanes
// t = 0. Where 16 weights share a scale, bytes are levels and there is no sa; each half of a block:   dw * da * sumi.
// A CTA owns a row_block of tiles, shared out as in gemv_simt.cu.
// Config: that of row_block.cuh.
#include "activations.cuh"
#include "fragment.cuh"
#include "row_block.cuh"

namespace qgemm {

template <class Config>
__device__ __forceinline__ void gemv_dp4a(const typename Config::Tile* __restrict__ tiles,
                                          const Activations* __restrict__ x, typename Config::Out* __restrict__ y,
                                          i64 n, i64 k, int m) {
    using Format = typename Config::TileFormat;
    using Tile = typename Config::Tile;
    constexpr int TOKENS = Config::TOKENS, K_BLOCKS = Config::K_BLOCKS;
    static_assert(Format::GROUP_SIZE % 32 == 0 || (Format::ZERO == 0 && !Format::HAS_MINIMUM),
                  "a block of x has a sum for 32 weights, none for fewer");
    constexpr int BLOCKS = K_BLOCK / 32, SCALES = Format::GROUP_SIZE < 32 ? 2 : 1;  // of a block of x
    const ThreadCoord coord;
    const i64 along = (k + Config::TILE_COLUMNS - 1) / Config::TILE_COLUMNS;
    float acc[2][TOKENS] = {};

    for (i64 i = coord.warp_k * K_BLOCKS; i < along * K_BLOCKS; i = next_k_block<Config>(i)) {
        const Tile& tile = tiles[blockIdx.x * along + i / K_BLOCKS];
        const auto codes = tile.k_blocks[i % K_BLOCKS].codes(coord.warp, coord.lane);
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            if (i * K_BLOCK + block * 32 >= k) break;  // the padding block of a ragged row
            const Bytes first = Format::bytes(codes, 2 * block), second = Format::bytes(codes, 2 * block + 1);
            const int index = Config::scale_index(i % K_BLOCKS, 2 * block);
            const float2 scale = tile.fields.scale(coord.warp, coord.g, index);
            const float2 last_scale = SCALES == 1 ? scale : tile.fields.scale(coord.warp, coord.g, index + SCALES - 1);
            const float2 minimum = tile.fields.minimum(coord.warp, coord.g, index);
#pragma unroll
            for (int token = 0; token < TOKENS; ++token) {
                if (token >= m) break;
                const Activations& a = x[i * m + token];
                const float2 ds = a.ds[block];
                const float da = ds.x, sa = coord.t == 0 ? ds.y : 0.0f;
                const uint2 q = *reinterpret_cast<const uint2*>(a.q + 32 * block + 8 * coord.t);
#pragma unroll
                for (int row = 0; row < 2; ++row) {
                    const float dw = row ? scale.y : scale.x, mw = row ? minimum.y : minimum.x;
                    int sumi = __dp4a(int(first.row[row]), int(q.x), 0);
                    if constexpr (SCALES == 2) {
                        acc[row][token] += dw * (da * sumi);
                        sumi = 0;
                    }
                    sumi = __dp4a(int(second.row[row]), int(q.y), sumi);
                    float dot = da * sumi;
                    if constexpr (Format::ZERO != 0) dot -= Format::ZERO * sa;
                    acc[row][token] += (SCALES == 1 ? dw : row ? last_scale.y : last_scale.x) * dot;
                    if constexpr (Format::HAS_MINIMUM) acc[row][token] += mw * sa;
                }
            }
        }
    }
    reduce_and_store<Config>(acc, y, i64(blockIdx.x) * TILE_ROWS, n, m, ACTIVATION_UNIT);
}

using GemvConfig = RowBlockConfig<Config>;

}  // namespace qgemm

extern "C" __global__ void __launch_bounds__(qgemm::GemvConfig::THREADS)
    gemv_dp4a(const qgemm::GemvConfig::Tile* __restrict__ tiles, const qgemm::Activations* __restrict__ x,
              qgemm::Config::Out* __restrict__ y, qgemm::i64 n, qgemm::i64 k, int m) {
    qgemm::gemv_dp4a<qgemm::GemvConfig>(tiles, x, y, n, k, m);
}
