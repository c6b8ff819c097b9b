// fused_a8: y [m, n] = x @ W [n, k].T for few tokens from x's q8_1 blocks [m, k / 32], integer dots by dp4a.
//
// Per block, with the weight's scale dw and minimum mw, the activation's scale da and sum sa, and sumi the dot product
// of the codes (unsigned but for q8):   sum += dw * (da * sumi - ZERO * sa) + mw * sa,   sa counted once, by lanes
// t = 0. Where 16 weights share a scale, bytes are levels and there is no sa; each half of a block:   dw * da * sumi.
// A CTA owns a strip of tiles, shared out as in fused.cu.  Template: Format, Out (float, half, bf16), TOKENS, SPLITS.
#include "q8_1_block.cuh"
#include "strip.cuh"
#include "tile.cuh"

// Columns 2t, 2t + 8, 2t + 1, 2t + 9 of a 16-wide step, the order of Format::bytes.
__device__ inline u32 load_step(const signed char* q) {
    const u32 near = *reinterpret_cast<const u16*>(q), far = *reinterpret_cast<const u16*>(q + 8);
    return __byte_perm(near, far, 0x5140);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    fused_a8(const Tile* __restrict__ tiles, const q8_1_block* __restrict__ x, Out* __restrict__ y, i64 n, i64 k,
             int m) {
    static_assert(Format::GROUP == 32 || (Format::ZERO == 0 && !Format::HAS_MINIMUM),
                  "a q8_1 block of x has a sum for 32 weights, none for fewer");
    constexpr int BLOCKS = SPAN_COLUMNS / 32, SCALES = 32 / Format::GROUP;  // of a block of x
    const Place at;
    const i64 along = (k + TILE_COLUMNS - 1) / TILE_COLUMNS;
    float sums[2][TOKENS] = {};

    for (i64 i = at.split * SPANS; i < along * SPANS; i = next_span(i)) {
        const Tile& tile = tiles[blockIdx.x * along + i / SPANS];
        const auto codes = tile.spans[i % SPANS].codes(at.warp, at.lane);
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            if (i * SPAN_COLUMNS + block * 32 >= k) break;  // the padding block of a ragged row
            const Bytes first = Format::bytes(codes, 2 * block), second = Format::bytes(codes, 2 * block + 1);
            const int index = (i % SPANS * BLOCKS + block) * SCALES;
            const float2 scale = tile.fields.scale(at.warp, at.g, index);
            const float2 last_scale = SCALES == 1 ? scale : tile.fields.scale(at.warp, at.g, index + SCALES - 1);
            const float2 minimum = tile.fields.minimum(at.warp, at.g, index);
#pragma unroll
            for (int token = 0; token < TOKENS; ++token) {
                if (token >= m) break;
                const q8_1_block& a = x[token * (k / 32) + i * BLOCKS + block];
                const float da = __half2float(a.d), sa = at.t == 0 ? __half2float(a.s) : 0.0f;
                const u32 near = load_step(a.qs + 2 * at.t), far = load_step(a.qs + 16 + 2 * at.t);
#pragma unroll
                for (int row = 0; row < 2; ++row) {
                    const float dw = row ? scale.y : scale.x, mw = row ? minimum.y : minimum.x;
                    int sumi = __dp4a(int(first.row[row]), int(near), 0);
                    if constexpr (SCALES == 2) {
                        sums[row][token] += dw * (da * sumi);
                        sumi = 0;
                    }
                    sumi = __dp4a(int(second.row[row]), int(far), sumi);
                    float dot = da * sumi;
                    if constexpr (Format::ZERO != 0) dot -= Format::ZERO * sa;
                    sums[row][token] += (SCALES == 1 ? dw : row ? last_scale.y : last_scale.x) * dot;
                    if constexpr (Format::HAS_MINIMUM) sums[row][token] += mw * sa;
                }
            }
        }
    }
    reduce_and_store(sums, y, i64(blockIdx.x) * TILE_ROWS, n, m);
}
