// encode: values [count * 32] -> blocks [count] as they lie in a file, byte for byte as NumPy encodes them.
//
// Each CTA stores its EncodeStats: sums of squares of the error and of the values, and the first block that cannot
// store its scales.
//
// A work item of a warp is BLOCKS_PER_WARP blocks, eight at a time; a lane owns eight values, four lanes own a block
// (codes/encoder.cuh). Shared memory collects blocks, which are stored as Blocks::BYTES chunks of 16 bytes: the array
// `blocks` has space for a whole number of work items.
// Config: Format, Blocks, Block; In (float, half, bf16), THREADS, BLOCKS_PER_WARP.
#include "codes/encoder.cuh"
#include "quantize/encode_stats.cuh"

namespace qgemm {

// A lane's share of block number `index`.
template <class Encoder, class Block>
__device__ inline void encode_block(LaneValues x, i64 index, Block& block, EncodeStats& stats) {
    const Encoder encoder(x);
    float errors[LANE_VALUES];
    u32 codes[LANE_VALUES / 4] = {};
#pragma unroll
    for (int j = 0; j < LANE_VALUES; ++j) {
        const u32 code = encoder.code(x[j]);
        codes[j / 4] |= (code & 0xff) << 8 * (j % 4);
        errors[j] = encoder.decode(code) - x[j];
    }
    encoder.write(block, codes);
    const double power = squares(x);  // NaN if a value is
    stats.error += squares(errors);
    stats.power += power;
    if (isnan(power) || !encoder.holds()) stats.refused = min(stats.refused, index);
}

template <class Config>
__device__ __forceinline__ void encode(const typename Config::In* __restrict__ x, uint4* __restrict__ blocks,
                                       EncodeStats* __restrict__ stats, i64 count) {
    using Encoder = typename Config::template Format<WARPS>::Encoder;
    using Block = typename Config::Block;
    using Blocks = typename Config::Blocks;
    constexpr int CTA_WARPS = Config::THREADS / 32, AT_ONCE = 32 / BLOCK_LANES;
    constexpr int BLOCKS_PER_WARP = Config::BLOCKS_PER_WARP;
    static_assert(Blocks::WEIGHTS == LANE_VALUES * BLOCK_LANES, "four lanes own a block");
    static_assert(sizeof(Block) == Blocks::BYTES, "the block differs from its dtype");
    static_assert(BLOCKS_PER_WARP == sizeof(uint4), "a work item is as many chunks as a block has bytes");
    __shared__ uint4 staged[CTA_WARPS][Blocks::BYTES];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Block* const lane_blocks = reinterpret_cast<Block*>(staged[warp]) + lane / BLOCK_LANES;
    EncodeStats own = {0, 0, count};

    for (i64 first = (i64(blockIdx.x) * CTA_WARPS + warp) * BLOCKS_PER_WARP; first < count;
         first += i64(gridDim.x) * CTA_WARPS * BLOCKS_PER_WARP) {
        const i64 block = first + lane / BLOCK_LANES;
        float values[BLOCKS_PER_WARP / AT_ONCE][LANE_VALUES] = {};
#pragma unroll
        for (int i = 0; i < BLOCKS_PER_WARP / AT_ONCE; ++i)
            if (block + i * AT_ONCE < count)
                load_eight(values[i], x + (block + i * AT_ONCE) * Blocks::WEIGHTS + LANE_VALUES * block_lane());
#pragma unroll
        for (int i = 0; i < BLOCKS_PER_WARP / AT_ONCE; ++i)
            encode_block<Encoder>(values[i], block + i * AT_ONCE, lane_blocks[i * AT_ONCE], own);
        __syncwarp();
        for (int i = lane; i < Blocks::BYTES; i += 32)
            blocks[first / BLOCKS_PER_WARP * Blocks::BYTES + i] = staged[warp][i];
        __syncwarp();
    }

    store_stats<CTA_WARPS>(stats, own);
}

}  // namespace qgemm

extern "C" __global__ void __launch_bounds__(qgemm::Config::THREADS)
    encode(const qgemm::Config::In* __restrict__ x, uint4* __restrict__ blocks, qgemm::EncodeStats* __restrict__ stats,
           qgemm::i64 count) {
    qgemm::encode<qgemm::Config>(x, blocks, stats, count);
}
