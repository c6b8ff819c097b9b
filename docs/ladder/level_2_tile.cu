// Level 2, tiles and tensor cores: a warp per 16 rows of W, a CTA per row_block of 64 rows.
//
// The tile has the order of operand A of mma.sync: a lane reads its 32 codes in one 16-byte load, and a warp reads 512
// contiguous bytes. Eight tokens share each decoded weight. Codes become levels q - 8 by conversion: shift, mask,
// convert to float, subtract, convert to half.
#include "ladder.cuh"

namespace qgemm {

// Levels of rows g and g + 8, columns 2t, 2t + 1, 2t + 8, 2t + 9: the bytes of a word hold columns 2t, 2t + 8, 2t + 1,
// 2t + 9, each with row g in its low nibble.
__device__ inline Fragment converted(u32 word) {
    half level[2][4];
    for (int byte = 0; byte < 4; ++byte)
        for (int row = 0; row < 2; ++row) level[row][byte] = __float2half(float(word >> (8 * byte + 4 * row) & 15) - 8);
    return {__halves2half2(level[0][0], level[0][2]), __halves2half2(level[1][0], level[1][2]),
            __halves2half2(level[0][1], level[0][3]), __halves2half2(level[1][1], level[1][3])};
}

}  // namespace qgemm

extern "C" __global__ void level_2_tile(const qgemm::LadderTile* w, const half* x, float* y, int n, int k, int m) {
    using namespace qgemm;
    const int group = threadIdx.x / 32, lane = threadIdx.x % 32, tiles = k / TILE_COLUMNS;
    Acc sums = {};
    for (int i = 0; i < tiles; ++i) {
        const LadderTile& tile = w[i64(blockIdx.x) * tiles + i];
        for (int block = 0; block < 2; ++block) {
            Acc dots = {};
            for (int step = BLOCK_STEPS * block; step < BLOCK_STEPS * (block + 1); ++step) {
                u32 b[2];
                load_x(b, x, k, m, TILE_COLUMNS * i + STEP_COLUMNS * step);
                mma_m16n8k16<half>(dots, converted(tile.codes[group][lane][step]), b);
            }
            const half(&d)[2] = tile.d[group][lane / 4][block];
            add_scaled(sums, dots, __half2float(d[0]), __half2float(d[1]));
        }
    }
    store_y(y, sums, 64 * blockIdx.x + 16 * group, n, m);
}
