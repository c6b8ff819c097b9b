// encode_groups: values [count * WEIGHTS] -> blocks [count] as they lie in a file, byte for byte as NumPy encodes them,
// for formats whose scales are searched or whose blocks have several groups of weights.
//
// importance, if WEIGHTED: values for `period` blocks, which repeat; not negative.
// A lane owns a group (codes/group_encoder.cuh), neighbouring lanes own a block; a work item of a warp is
// BLOCKS_PER_WARP blocks. Lanes exchange codes through shared memory, which also collects blocks; they are stored as
// chunks of 16 bytes: the array `blocks` has space for a whole number of work items. Each CTA stores its EncodeStats
// (encode_stats.cuh).
// Config: Format, Blocks, Block; WEIGHTED, THREADS, BLOCKS_PER_WARP.
#include "codes/group_encoder.cuh"
#include "codes/quantize.cuh"
#include "quantize/encode_stats.cuh"

namespace qgemm {

// Errors and powers are summed eight values at a time.
template <class Encoder, int SIZE>
__device__ inline void add_stats(EncodeStats& stats, const Encoder& encoder, const float (&x)[SIZE],
                                 const u32 (&codes)[SIZE], i64 block) {
    bool finite = true;
#pragma unroll
    for (int first = 0; first < SIZE; first += 8) {
        float values[8], errors[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) values[j] = x[first + j], errors[j] = encoder.decode(codes[first + j]) - values[j];
        const double power = squares(values);
        stats.error += squares(errors), stats.power += power;
        finite &= !isnan(power) && !isinf(power);
    }
    if (!finite || !encoder.holds()) stats.refused = min(stats.refused, block);
}

template <class Config>
__device__ __forceinline__ void encode_groups(const float* __restrict__ x, const float* __restrict__ importance,
                                              i64 period, uint4* __restrict__ blocks, EncodeStats* __restrict__ stats,
                                              i64 count) {
    using Encoder = typename Config::template Format<WARPS>::template GroupEncoder<Config::WEIGHTED>;
    using Block = typename Config::Block;
    using Blocks = typename Config::Blocks;
    constexpr int CTA_WARPS = Config::THREADS / 32, BLOCKS_PER_WARP = Config::BLOCKS_PER_WARP;
    constexpr int GROUPS = Encoder::GROUPS, SIZE = Encoder::SIZE, AT_ONCE = 32 / GROUPS;
    constexpr int CHUNKS = BLOCKS_PER_WARP * Blocks::BYTES / sizeof(uint4);  // in a work item
    static_assert(GROUPS * SIZE == Blocks::WEIGHTS, "each lane owns a group");
    static_assert(sizeof(Block) == Blocks::BYTES, "the block differs from its dtype");
    static_assert(BLOCKS_PER_WARP % AT_ONCE == 0 && BLOCKS_PER_WARP % sizeof(uint4) == 0,
                  "a work item is whole chunks");
    __shared__ uint4 staged[CTA_WARPS][CHUNKS];
    __shared__ u32 codes_of_warps[CTA_WARPS][32][SIZE / 4];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane % GROUPS;
    Block* const own_blocks = reinterpret_cast<Block*>(staged[warp]);
    EncodeStats own = {0, 0, count};

    for (i64 first = (i64(blockIdx.x) * CTA_WARPS + warp) * BLOCKS_PER_WARP; first < count;
         first += i64(gridDim.x) * CTA_WARPS * BLOCKS_PER_WARP) {
#pragma unroll 1
        for (int i = lane / GROUPS; i < BLOCKS_PER_WARP; i += AT_ONCE) {
            const i64 block = first + i;
            float values[SIZE] = {}, weights[SIZE] = {};
            u32 codes[SIZE];
#pragma unroll
            for (int j = 0; j < SIZE; j += 8) {
                if (block >= count) continue;
                load_eight(reinterpret_cast<float (&)[8]>(values[j]), x + block * Blocks::WEIGHTS + group * SIZE + j);
                if constexpr (Config::WEIGHTED)
                    load_eight(reinterpret_cast<float (&)[8]>(weights[j]),
                               importance + block % period * Blocks::WEIGHTS + group * SIZE + j);
            }
            const Encoder encoder(values, weights);
#pragma unroll
            for (int j = 0; j < SIZE; ++j) codes[j] = encoder.code(j, values[j]);
            __syncwarp();  // all lanes have read the previous codes
#pragma unroll
            for (int j = 0; j < SIZE; j += 4)
                codes_of_warps[warp][lane][j / 4] =
                    codes[j] | codes[j + 1] << 8 | codes[j + 2] << 16 | codes[j + 3] << 24;
            __syncwarp();
            encoder.write(own_blocks[i], reinterpret_cast<const u8*>(codes_of_warps[warp][lane - group]));
            add_stats(own, encoder, values, codes, block);
        }
        __syncwarp();
        for (int i = lane; i < CHUNKS; i += 32) blocks[first / BLOCKS_PER_WARP * CHUNKS + i] = staged[warp][i];
        __syncwarp();
    }
    store_stats<CTA_WARPS>(stats, own);
}

}  // namespace qgemm

extern "C" __global__ void __launch_bounds__(qgemm::Config::THREADS, 1)
    encode_groups(const float* __restrict__ x, const float* __restrict__ importance, qgemm::i64 period,
                  uint4* __restrict__ blocks, qgemm::EncodeStats* __restrict__ stats, qgemm::i64 count) {
    qgemm::encode_groups<qgemm::Config>(x, importance, period, blocks, stats, count);
}
