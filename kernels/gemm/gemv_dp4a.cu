// gemv_dp4a: y [m, n] = x @ W [n, k].T for few tokens from x's blocks of codes, k_block by k_block [along][m], integer
// dots by dp4a.
//
// Per block, with the weight's scale dw and minimum mw, the activation's scale da and sum sa, and sumi the dot product
// of the codes (unsigned but for q8):   sum += dw * (da * sumi - ZERO * sa) + mw * sa,   sa counted once, by lanes
// t = 0. Where 16 weights share a scale, bytes are levels or there is a minimum; each half of a block:
// sum += dw * da * sumi + mw * sa,   sa = da times the sum of its codes of x, of which each lane has a part.
// A CTA owns a row_block of tiles, shared out as in gemv_simt.cu.
// Config: that of row_block.cuh.
#include "activations.cuh"
#include "fragment.cuh"
#include "gemm/row_block.cuh"

namespace qgemm {

template <class Config>
__device__ __forceinline__ void gemv_dp4a(const typename Config::Tile* __restrict__ tiles,
                                          const Activations* __restrict__ x, typename Config::Out* __restrict__ y,
                                          i64 n, i64 k, int m) {
    using Format = typename Config::TileFormat;
    using Tile = typename Config::Tile;
    constexpr int TOKENS = Config::TOKENS, K_BLOCKS = Config::K_BLOCKS;
    static_assert(Format::GROUP_SIZE % 32 == 0 || Format::ZERO == 0, "a group of 16 takes its zero from the codes");
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
            float2 scale[SCALES], minimum[SCALES];
#pragma unroll
            for (int part = 0; part < SCALES; ++part) {
                const int index = Config::scale_index(i % K_BLOCKS, 2 * block + part);
                scale[part] = tile.fields.scale(coord.warp, coord.g, index);
                minimum[part] = tile.fields.minimum(coord.warp, coord.g, index);
            }
#pragma unroll
            for (int token = 0; token < TOKENS; ++token) {
                if (token >= m) break;
                const Activations& a = x[i * m + token];
                const float2 ds = a.ds[block];
                const float da = ds.x, sa = coord.t == 0 ? ds.y : 0.0f;
                const uint2 q = *reinterpret_cast<const uint2*>(a.q + 32 * block + 8 * coord.t);
                float sums[SCALES] = {sa};  // of this lane's x
                if constexpr (SCALES > 1 && Format::HAS_MINIMUM)
                    sums[0] = da * __dp4a(0x01010101, int(q.x), 0), sums[1] = da * __dp4a(0x01010101, int(q.y), 0);
#pragma unroll
                for (int row = 0; row < 2; ++row)
#pragma unroll
                    for (int part = 0; part < SCALES; ++part) {
                        const float dw = row ? scale[part].y : scale[part].x;
                        const float mw = row ? minimum[part].y : minimum[part].x;
                        int sumi = __dp4a(int((part ? second : first).row[row]), int(part ? q.y : q.x), 0);
                        if constexpr (SCALES == 1) sumi = __dp4a(int(second.row[row]), int(q.y), sumi);
                        float dot = da * sumi;
                        if constexpr (Format::ZERO != 0) dot -= Format::ZERO * sa;
                        acc[row][token] += dw * dot;
                        if constexpr (Format::HAS_MINIMUM) acc[row][token] += mw * sums[part];
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
