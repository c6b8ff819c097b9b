// encode_groups: values [count * WEIGHTS] -> blocks [count] as they lie in a file, byte for byte as NumPy encodes them,
// of formats whose scales are searched or whose blocks have several groups of weights.
//
// importance, if WEIGHTED: of the values of `period` blocks, after which it begins anew; not negative.
// A lane owns a group of a block (codes/group_encoder.cuh), neighbouring lanes a block; a warp takes BLOCKS_PER_WARP
// blocks at a time. Codes meet in shared memory, where the lanes of a block put it together; blocks leave as chunks of
// 16 bytes: `blocks` has room for a whole number of turns. Each CTA stores what it found (found.cuh).
// Config: Format, Blocks, Block; WEIGHTED, THREADS, BLOCKS_PER_WARP.
#include "codes/group_encoder.cuh"
#include "codes/quantize.cuh"
#include "quantize/found.cuh"

namespace qgemm {

// Errors and powers are summed eight values at a time.
template <class Encoder, int SIZE>
__device__ inline void find(Found& found, const Encoder& encoder, const float (&x)[SIZE], const u32 (&codes)[SIZE],
                            i64 block) {
    bool finite = true;
#pragma unroll
    for (int first = 0; first < SIZE; first += 8) {
        float values[8], errors[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) values[j] = x[first + j], errors[j] = encoder.decode(codes[first + j]) - values[j];
        const double power = squares(values);
        found.error += squares(errors), found.power += power;
        finite &= !isnan(power) && !isinf(power);
    }
    if (!finite || !encoder.holds()) found.refused = min(found.refused, block);
}

template <class Config>
__device__ __forceinline__ void encode_groups(const float* __restrict__ x, const float* __restrict__ importance,
                                              i64 period, uint4* __restrict__ blocks, Found* __restrict__ found,
                                              i64 count) {
    using Encoder = typename Config::template Format<WARPS>::template GroupEncoder<Config::WEIGHTED>;
    using Block = typename Config::Block;
    using Blocks = typename Config::Blocks;
    constexpr int CTA_WARPS = Config::THREADS / 32, BLOCKS_PER_WARP = Config::BLOCKS_PER_WARP;
    constexpr int GROUPS = Encoder::GROUPS, SIZE = Encoder::SIZE, AT_ONCE = 32 / GROUPS;
    constexpr int CHUNKS = BLOCKS_PER_WARP * Blocks::BYTES / sizeof(uint4);  // of a turn
    static_assert(GROUPS * SIZE == Blocks::WEIGHTS, "each lane owns a group");
    static_assert(sizeof(Block) == Blocks::BYTES, "the block differs from its dtype");
    static_assert(BLOCKS_PER_WARP % AT_ONCE == 0 && BLOCKS_PER_WARP % sizeof(uint4) == 0, "a turn is whole chunks");
    __shared__ uint4 staged[CTA_WARPS][CHUNKS];
    __shared__ u32 codes_of_warps[CTA_WARPS][32][SIZE / 4];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane % GROUPS;
    Block* const turn = reinterpret_cast<Block*>(staged[warp]);
    Found mine = {0, 0, count};

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
            __syncwarp();  // the codes before these have been read
#pragma unroll
            for (int j = 0; j < SIZE; j += 4)
                codes_of_warps[warp][lane][j / 4] =
                    codes[j] | codes[j + 1] << 8 | codes[j + 2] << 16 | codes[j + 3] << 24;
            __syncwarp();
            encoder.write(turn[i], reinterpret_cast<const u8*>(codes_of_warps[warp][lane - group]));
            find(mine, encoder, values, codes, block);
        }
        __syncwarp();
        for (int i = lane; i < CHUNKS; i += 32) blocks[first / BLOCKS_PER_WARP * CHUNKS + i] = staged[warp][i];
        __syncwarp();
    }
    store_found<CTA_WARPS>(found, mine);
}

}  // namespace qgemm

extern "C" __global__ void __launch_bounds__(qgemm::Config::THREADS, 1)
    encode_groups(const float* __restrict__ x, const float* __restrict__ importance, qgemm::i64 period,
                  uint4* __restrict__ blocks, qgemm::Found* __restrict__ found, qgemm::i64 count) {
    qgemm::encode_groups<qgemm::Config>(x, importance, period, blocks, found, count);
}
