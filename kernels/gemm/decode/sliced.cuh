// Products of codes of W and one token of x in slices of eight bits (x_slices.cuh). Tensor cores multiply integers and
// sum them exactly. Sums are scaled in float once for each scale or, in a super-block, once a tile.
//
// Columns 0 to 3 of an accumulator are the slices of x for the even step of a pair, columns 4 to 7 for the odd step. A
// lane has rows g and g + 8 and slices 2 (t % 2) and 2 (t % 2) + 1, of even steps if t < 2, of odd steps otherwise. So
// one mma serves two steps even if each has its own scale, as in groups of 16.
// Config: Decode of config.cuh.
#pragma once

#include "operand.cuh"
#include "pipeline.cuh"
#include "scales.cuh"
#include "x_slices.cuh"

namespace qgemm {

// SUB_SHIFT of a super-block, whose integer scales come times 2^SUB_SHIFT (fragment.cuh); 0 for other formats.
template <class Format>
__device__ constexpr int sub_shift() {
    if constexpr (Format::SUPER_BLOCK)
        return Format::SUB_SHIFT;
    else
        return 0;
}

template <class Config, int COLUMNS>
struct SlicedProducts {
    using Format = typename Config::Fields;
    using Pipeline = SmemPipeline<Config, void>;
    static constexpr int PAIRS = 2 * Config::K_BLOCKS;  // pairs of steps in a tile
    static constexpr bool SUPER = Format::SUPER_BLOCK;
    static constexpr int SPAN = SUPER ? PAIRS : Config::GROUP_SIZE / 32;  // pairs of steps that share a sum
    static constexpr int HIGH_ROW = 1 << Format::HIGH_ROW_SHIFT;
    static_assert(SUPER || (Config::GROUP_SIZE % 32 == 0 && PAIRS % SPAN == 0), "a scale for both steps of an mma");

    typename Config::WarpAcc& acc;
    const Pipeline& pipeline;
    const XSlices<COLUMNS>& x;
    const int lane, g, t;

    __device__ SlicedProducts(typename Config::WarpAcc& acc, const Pipeline& pipeline, const XSlices<COLUMNS>& x,
                              int lane)
        : acc(acc), pipeline(pipeline), x(x), lane(lane), g(lane / 4), t(lane % 4) {}

    // acc += W @ x for the warp's tile number i. tile: its number among the tiles whose columns of x are in slices.
    // wait() waits for the next stage and returns it; release(stage) frees a stage that the warp has read.
    template <class Wait, class Release>
    __device__ void add(int i, int tile, Wait wait, Release release) const {
        const float unit = x.units[tile * Config::TILE_COLUMNS / SLICE_BLOCK] * (t % 2 ? 0x1p16f : 1.0f);
        int sums[Config::ROW_BLOCKS * Config::M16_TILES][4] = {}, stage = 0;
#pragma unroll
        for (int k_block = 0; k_block < Config::K_BLOCKS; ++k_block) {
            const int in_stage = k_block % Config::STAGE_K_BLOCKS;
            if (in_stage == 0) stage = wait();
            uint2 b[2];
            int starts[2][4] = {};
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                b[pair] = x.template operand<Format>(tile * PAIRS + 2 * k_block + pair, lane);
                if constexpr (SUPER && Format::CODE_BIAS != 0) {
                    constexpr u32 ZERO = 0x01010101u * (256 - Format::CODE_BIAS),
                                  HIGH = 0x01010101u * (256 - Format::CODE_BIAS * HIGH_ROW);
                    static_assert(Format::CODE_BIAS * HIGH_ROW <= 128 && Format::slice_shift(1) == 0, "a signed byte");
                    mma_m16n8k32(starts[pair], Bytes{ZERO, HIGH}, Bytes{ZERO, HIGH}, b[pair]);
                }
            }
#pragma unroll
            for (int m16 = 0; m16 < Config::ROW_BLOCKS * Config::M16_TILES; ++m16) {
                const int row_block = m16 / Config::M16_TILES, m16_in_block = m16 % Config::M16_TILES;
                const Format& fields = pipeline.fields(i * Config::STAGES_OF_TILE, stage, row_block);
                const auto codes = Format::placed_codes(pipeline.codes(stage, row_block, in_stage), m16_in_block, lane);
                u32 scales = 0;  // a byte for each pair of steps and row
                if constexpr (SUPER) scales = fields.sub_scale_bytes(m16_in_block, g, k_block, t / 2);
#pragma unroll
                for (int pair = 0; pair < 2; ++pair) {
                    const int number = 2 * k_block + pair;
                    Bytes first, second;
                    Format::place_bytes(first, second, codes, pair);
                    if constexpr (SUPER) {
                        int dots[4];
#pragma unroll
                        for (int j = 0; j < 4; ++j) dots[j] = starts[pair][j];
                        multiply(dots, first, second, b[pair]);
                        const int row_scales[2] = {signed_byte(scales, pair), signed_byte(scales, 2 + pair)};
#pragma unroll
                        for (int j = 0; j < 4; ++j) sums[m16][j] += row_scales[j / 2] * dots[j];
                    } else {
                        multiply(sums[m16], first, second, b[pair]);
                    }
                    if ((number + 1) % SPAN == 0)
                        flush(acc[row_block][m16_in_block][0], sums[m16], fields, m16_in_block, tile, number + 1 - SPAN,
                              unit);
                }
            }
            if constexpr (Config::SHARED_MINIMUM)
                if (k_block == Config::K_BLOCKS - 1) add_shared_minimums(i, tile, stage);
            if (in_stage == Config::STAGE_K_BLOCKS - 1) release(stage);
        }
    }

private:
    static __device__ void multiply(int (&dots)[4], const Bytes& first, const Bytes& second, const uint2& b) {
        if constexpr (POINTS<Format>)
            mma_m16n8k32(dots, first, second, b);
        else
            mma_m16n8k32_u8(dots, first, second, b);
    }
    // Byte number `byte` of a word, sign-extended.
    static __device__ int signed_byte(u32 word, u32 byte) { return int(prmt(word, 0, byte | 0x1110 * (byte | 8))); }
    // low + 256 * high, in integers if 32 bits hold it: a sum has 16 products for each pair of steps, of bytes of W
    // below 256 and slices up to 128.
    static __device__ float both_slices(int low, int high) {
        if constexpr (SUPER) return float(low) + 256.0f * float(high);
        static_assert(SUPER || i64(SPAN) * 16 * 255 * 128 * (256 + 1) < i64(1) << 31, "sums of 32 bits");
        return float(low + 256 * high);
    }
    // The sum of x over SPAN pairs of steps in lane t = 0 of a row, 0 in the other lanes: it is added once.
    __device__ float x_sum(int tile, int first_pair) const {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 2 * SPAN; ++i) sum += x.sums[2 * (tile * PAIRS + first_pair) + i];
        return t == 0 ? sum : 0.0f;
    }
    // Scales the sums of SPAN pairs of steps from `first_pair` on, adds them to the accumulators and clears them.
    __device__ void flush(Acc& to, int (&sums)[4], const Format& fields, int m16, int tile, int first_pair,
                          float unit) const {
        const int index = Config::scale_index(first_pair / 2, first_pair % 2 * 2);
        float2 d;
        if constexpr (SUPER)
            d = __half22float2(fields.half_scale(m16, g, 0));
        else
            d = fields.scale(m16, g, index);
        const float2 m = Config::SHARED_MINIMUM ? float2{} : fields.minimum(m16, g, index);
        constexpr float SUB_UNIT = 1.0f / (1 << sub_shift<Format>());
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            float dot = SUB_UNIT * unit * both_slices(sums[2 * row], sums[2 * row + 1]);
            constexpr bool ZEROED = !SUPER && Format::CODE_BIAS != 0, MINIMUM = Format::HAS_MINIMUM && !SUPER;
            const float x_sum = ZEROED || MINIMUM ? (row ? HIGH_ROW : 1) * this->x_sum(tile, first_pair) : 0.0f;
            if constexpr (ZEROED) dot -= Format::CODE_BIAS * x_sum;
            to.sum[2 * row] += (row ? d.y : d.x) * dot;
            if constexpr (MINIMUM) to.sum[2 * row] += (row ? m.y : m.x) * x_sum;
            sums[2 * row] = sums[2 * row + 1] = 0;
        }
    }
    // Adds minimum * sum of x for the groups of a tile. Only column 0 has sums of x, so that one lane of a row adds the
    // products.
    __device__ void add_shared_minimums(int i, int tile, int stage) const {
        constexpr int GROUP_STEPS = Config::GROUP_SIZE / 16;
        XSums<Config> x_sums = {};
#pragma unroll
        for (int pair = 0; pair < Config::MINIMUM_PAIRS; ++pair) {
            const float* from = x.sums + tile * 2 * PAIRS + 4 * t + 2 * GROUP_STEPS * pair;
            float2 sums = {};
#pragma unroll
            for (int step = 0; step < GROUP_STEPS; ++step) sums.x += from[step], sums.y += from[GROUP_STEPS + step];
            if (g == 0) x_sums.sums[0][pair] = sums;
        }
        for (int row_block = 0; row_block < Config::ROW_BLOCKS; ++row_block)
            add_minimums<Config, 3>(acc[row_block], x_sums,
                                    pipeline.fields(i * Config::STAGES_OF_TILE, stage, row_block), {1, HIGH_ROW}, lane);
    }
};

}  // namespace qgemm
