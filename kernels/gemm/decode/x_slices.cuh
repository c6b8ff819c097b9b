// One token of x as slices of eight bits (Ozaki's scheme): x = unit * (s0 + 2^8 s1 + 2^16 s2 + 2^24 s3), where each
// slice is a signed byte. The eight columns of an integer operand B hold the four slices for each of two steps.
//
// SLICE_BLOCK columns share a unit, which follows from their largest magnitude: the error is at most 2^-30 of it.
#pragma once

#include "codes/quantize.cuh"
#include "ptx/prmt.cuh"
#include "ptx/redux_sync.cuh"

namespace qgemm {

constexpr int SLICE_BLOCK = 256, SLICES = 4;
constexpr int FIXED_BITS = 29;  // a magnitude in units has these bits, and one more if a step is shifted

// Whether a lane has whole points of a grid. Lane t has columns 8 (t / 2) to 8 (t / 2) + 7 of step t % 2 of a pair, in
// the order of codes/grid.cuh.
template <class Format>
constexpr bool POINTS = Format::OWNS_COLUMNS;

template <int COLUMNS>
struct XSlices {
    static_assert(COLUMNS % SLICE_BLOCK == 0, "x is sliced by blocks");
    // Operand B of each pair of steps: 16 words of the first step, [slice][t] or for points [slice][t / 2][2], then 16
    // words of the second.
    u32 words[COLUMNS / 32][32];
    float sums[COLUMNS / 16];  // sum of x over each step
    float units[COLUMNS / SLICE_BLOCK];

    // A lane's eight columns of x -> words. x of a step is divided by 2^slice_shift(step), the factor in the format's
    // bytes of that step (place_bytes in fragment.cuh).
    template <class Format>
    __device__ void store(const float (&values)[8], int block, int lane) {
        u32 largest = 0;
#pragma unroll
        for (float value : values) largest = max(largest, magnitude_bits(value));
        largest = redux_sync_max(largest);
        // Every magnitude is below 2^e; for e from -96 on the unit is a normal number.
        const int e = max(int(largest >> 23) - 126, -96), step = lane / 2, upper = lane % 2;
        const float factor = two_to(FIXED_BITS - e - Format::slice_shift(step % 4));
        u32 slices[8];
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            // The number in digits from -128 to 127: + 128 carries into the next byte, ^ 128 removes the offset.
            slices[i] = (u32(__float2int_rn(values[i] * factor)) + 0x00808080) ^ 0x00808080;
            sum += values[i];
        }
        sum += __shfl_xor_sync(~0u, sum, 1);
        u32 four[2][4];  // values by byte of two words: for t = 2 upper and 2 upper + 1, or of a point
        if constexpr (POINTS<Format>) {
#pragma unroll
            for (int i = 0; i < 8; ++i) four[i % 2][i / 4 + i / 2 % 2 * 2] = slices[i];
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const u32 other = __shfl_xor_sync(~0u, upper ? slices[i] : slices[4 + i], 1);
                four[i / 2][2 * (i % 2)] = upper ? other : slices[i];
                four[i / 2][2 * (i % 2) + 1] = upper ? slices[4 + i] : other;
            }
        }
        u32 by_slice[2][SLICES];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const u32 low[2] = {prmt(four[j][0], four[j][1], 0x5140), prmt(four[j][2], four[j][3], 0x5140)};
            const u32 high[2] = {prmt(four[j][0], four[j][1], 0x7362), prmt(four[j][2], four[j][3], 0x7362)};
            by_slice[j][0] = prmt(low[0], low[1], 0x5410), by_slice[j][1] = prmt(low[0], low[1], 0x7632);
            by_slice[j][2] = prmt(high[0], high[1], 0x5410), by_slice[j][3] = prmt(high[0], high[1], 0x7632);
        }
        u32* to = words[SLICE_BLOCK / 32 * block + step / 2] + 16 * (step % 2) + 2 * upper;
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice)
            *reinterpret_cast<uint2*>(to + 4 * slice) = {by_slice[0][slice], by_slice[1][slice]};
        if (upper == 0) sums[SLICE_BLOCK / 16 * block + step] = sum;
        if (lane == 0) units[block] = largest < 0x7f800000 ? two_to(e - FIXED_BITS) : __int_as_float(0x7fffffff);
    }

    // Slices `columns` columns of x [k] from `first` on, zeros beyond k, by all warps of the CTA. A warp has up to four
    // blocks in flight.
    template <class Format, int WARP_COUNT, class In>
    __device__ void load(const In* x, i64 first, i64 k, int columns, int lane) {
        constexpr int COUNT = COLUMNS / SLICE_BLOCK, PER_WARP = (COUNT + WARP_COUNT - 1) / WARP_COUNT;
        constexpr int AT_ONCE = PER_WARP < 4 ? PER_WARP : 4;
        for (int from = threadIdx.x / 32; from * SLICE_BLOCK < columns; from += AT_ONCE * WARP_COUNT) {
            float values[AT_ONCE][8] = {};
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int block = from + i * WARP_COUNT;
                const i64 column = first + block * SLICE_BLOCK + 8 * lane;
                if (block < COUNT && column < k) load_eight(values[i], x + column);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int block = from + i * WARP_COUNT;
                if (COUNT % (AT_ONCE * WARP_COUNT) == 0 || block < COUNT) store<Format>(values[i], block, lane);
            }
        }
    }
    // Operand B of a pair of steps: columns 0 to 3 have the slices of the first step and zeros for the second, columns
    // 4 to 7 the slices of the second and zeros for the first.
    template <class Format>
    __device__ uint2 operand(int pair, int lane) const {
        if constexpr (POINTS<Format>) {
            const uint2 point = *reinterpret_cast<const uint2*>(&words[pair][lane / 4 * 4 + lane % 4 / 2 * 2]);
            const bool own = lane % 2 == lane / 16;
            return {own ? point.x : 0, own ? point.y : 0};
        } else {
            const u32 word = words[pair][lane];
            return {lane < 16 ? word : 0, lane < 16 ? 0 : word};
        }
    }
};

}  // namespace qgemm
