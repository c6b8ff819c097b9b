// gemv: y [m, n] = x [m, k] @ W [n, k].T for few rows of x, without tensor cores; sums in float32.
//
// A CTA owns a row_block of tiles. Its groups of four warps share the tiles along K round-robin; a warp owns 16 rows.
// The type of x chooses the policy:
//   float, half, bf16   FloatLevels: levels of a group are multiplied by x, then by the scale
//   Activations         IntegerDots: dot products of codes by dp4a; x lies by k_blocks, [k_blocks][m]
// Config: that of row_block.cuh, and In.
#include "activations.cuh"
#include "fragment.cuh"
#include "gemm/row_block.cuh"

namespace qgemm {

// Columns 2t, 2t + 1, 2t + 8, 2t + 9 of a step of 16 columns of a row of x.
template <class In>
__device__ inline float4 load_step(const In* x) {
    return {to_float(x[0]), to_float(x[1]), to_float(x[8]), to_float(x[9])};
}

// acc += d * (q . x) + m * sum(x) for each group, with its scale d, its minimum m and its levels q.
struct FloatLevels {
    static constexpr float UNIT = 1;  // multiplies the sums

    // i: number of the k_block in the row_block.
    template <class Config, class Codes>
    static __device__ __forceinline__ void add(float (&acc)[2][Config::TOKENS], const typename Config::Tile& tile,
                                               const Codes& codes, const ThreadCoord& coord,
                                               const typename Config::In* __restrict__ x, i64 i, i64 k, int m) {
        using Format = typename Config::TileFormat;
        constexpr int TOKENS = Config::TOKENS, K_BLOCKS = Config::K_BLOCKS, K_BLOCK_STEPS = Config::K_BLOCK_STEPS;
        constexpr int SCALE_STEPS = Config::SCALE_STEPS;
        constexpr int STEPS = SCALE_STEPS < K_BLOCK_STEPS ? SCALE_STEPS : K_BLOCK_STEPS;  // steps of a scale
#pragma unroll
        for (int part = 0; part < K_BLOCK_STEPS / STEPS; ++part) {
            const i64 column = i * K_BLOCK + part * STEPS * 16;
            if (column >= k) break;  // the padding block of a ragged row
            FloatFragment levels[STEPS];
#pragma unroll
            for (int step = 0; step < STEPS; ++step) levels[step] = float_levels<Format>(codes, STEPS * part + step);
            const int index = Config::scale_index(i % K_BLOCKS, STEPS * part);
            const float2 scale = tile.fields.scale(coord.warp, coord.g, index);
            const float2 minimum = tile.fields.minimum(coord.warp, coord.g, index);
#pragma unroll
            for (int token = 0; token < TOKENS; ++token) {
                if (token >= m) break;
                float dots[2] = {}, total = 0;
#pragma unroll
                for (int step = 0; step < STEPS; ++step) {
                    const float4 v = load_step(x + token * k + column + 16 * step + 2 * coord.t);
                    total += v.x + v.y + v.z + v.w;
#pragma unroll
                    for (int row = 0; row < 2; ++row) {
                        const float2 near = levels[step].a[row];
                        const float2 far = levels[step].a[row + 2];
                        dots[row] += near.x * v.x + near.y * v.y + far.x * v.z + far.y * v.w;
                    }
                }
                acc[0][token] += scale.x * dots[0];
                acc[1][token] += scale.y * dots[1];
                if constexpr (Format::HAS_MINIMUM) {
                    acc[0][token] += minimum.x * total;
                    acc[1][token] += minimum.y * total;
                }
            }
        }
    }
};

// Per block of 32, with the weight's scale dw and minimum mw, the activation's scale da and sum sa, and the dot product
// sumi of the codes (unsigned but for q8):   acc += dw * (da * sumi - ZERO * sa) + mw * sa.   Lanes t = 0 count sa.
// If 16 weights share a scale, bytes are levels or there is a minimum; then each half of a block:
// acc += dw * da * sumi + mw * sa.   Here sa is da times the sum of the half's codes of x; each lane counts its part.
struct IntegerDots {
    static constexpr float UNIT = ACTIVATION_UNIT;

    // i: number of the k_block in the row_block.
    template <class Config, class Codes>
    static __device__ __forceinline__ void add(float (&acc)[2][Config::TOKENS], const typename Config::Tile& tile,
                                               const Codes& codes, const ThreadCoord& coord,
                                               const Activations* __restrict__ x, i64 i, i64 k, int m) {
        using Format = typename Config::TileFormat;
        constexpr int TOKENS = Config::TOKENS, K_BLOCKS = Config::K_BLOCKS;
        static_assert(Format::GROUP_SIZE % 32 == 0 || Format::ZERO == 0, "a group of 16 takes its zero from the codes");
        constexpr int BLOCKS = K_BLOCK / 32;
        constexpr int SCALES = Format::GROUP_SIZE < 32 ? 2 : 1;  // weight scales of a block of x
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
                float sums[SCALES] = {sa};  // over this lane's x
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
};

template <class In>
struct GemvPolicy {
    using Type = FloatLevels;
};
template <>
struct GemvPolicy<Activations> {
    using Type = IntegerDots;
};

template <class Config>
__device__ __forceinline__ void run_gemv(const typename Config::Tile* __restrict__ tiles,
                                         const typename Config::In* __restrict__ x,
                                         typename Config::Out* __restrict__ y, i64 n, i64 k, int m) {
    using Policy = typename GemvPolicy<typename Config::In>::Type;
    using Tile = typename Config::Tile;
    constexpr int K_BLOCKS = Config::K_BLOCKS;
    const ThreadCoord coord;
    const i64 along = (k + Config::TILE_COLUMNS - 1) / Config::TILE_COLUMNS;
    float acc[2][Config::TOKENS] = {};

    for (i64 i = coord.warp_k * K_BLOCKS; i < along * K_BLOCKS; i = next_k_block<Config>(i)) {
        const Tile& tile = tiles[blockIdx.x * along + i / K_BLOCKS];
        const auto codes = tile.k_blocks[i % K_BLOCKS].codes(coord.warp, coord.lane);
        Policy::template add<Config>(acc, tile, codes, coord, x, i, k, m);
    }
    reduce_and_store<Config>(acc, y, i64(blockIdx.x) * TILE_ROWS, n, m, Policy::UNIT);
}

using GemvConfig = RowBlockConfig<Config>;

}  // namespace qgemm

extern "C" __global__ void __launch_bounds__(qgemm::GemvConfig::THREADS)
    gemv(const qgemm::GemvConfig::Tile* __restrict__ tiles, const qgemm::Config::In* __restrict__ x,
         qgemm::Config::Out* __restrict__ y, qgemm::i64 n, qgemm::i64 k, int m) {
    qgemm::run_gemv<qgemm::GemvConfig>(tiles, x, y, n, k, m);
}
