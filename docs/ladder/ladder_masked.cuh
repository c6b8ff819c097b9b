// The products of level 3, which levels 4 and 5 keep: codes as subnormal halves.
#pragma once

#include "ladder.cuh"

namespace qgemm {

// A step: codes of the word as subnormal halves, less the zero 8, in units of 2^-24 (row g) and 2^-20.
__device__ inline void multiply_codes(Acc& dots, u32 word, const u32 (&b)[2]) {
    const u32 high = word >> 8;
    mma_m16n8k16<half>(dots, as_fragment(word & 0x000f000f, word & 0x00f000f0, high & 0x000f000f, high & 0x00f000f0),
                       b);
    mma_m16n8k16<half>(dots, constant_f16(-8, 4), b);
}

// A row group of a tile: four steps, two scales. column: the first column of the tile.
__device__ inline void multiply_row_group(Acc& sums, const u32 (&words)[4], const half (&d)[2][2], const half* x, int k,
                                          int m, int column) {
    for (int block = 0; block < 2; ++block) {
        Acc dots = {};
        for (int step = BLOCK_STEPS * block; step < BLOCK_STEPS * (block + 1); ++step) {
            u32 b[2];
            load_x(b, x, k, m, column + STEP_COLUMNS * step);
            multiply_codes(dots, words[step], b);
        }
        add_scaled(sums, dots, __half2float(d[block][0]) * 0x1p24f, __half2float(d[block][1]) * 0x1p20f);
    }
}

}  // namespace qgemm
