// Level 3, decoding is masking: the four bits of code q, alone in a half, are the subnormal number q * 2^-24.
//
// Tensor cores multiply subnormal halves exactly, so a mask replaces the conversion: 5 instructions a word of eight
// weights. The codes of row g + 8 stand four bits higher and count 2^-20. A second mma of the constant -8 subtracts the
// zero, and the scale d carries 2^24 or 2^20.
#include "ladder_masked.cuh"

extern "C" __global__ void level_3_subnormal(const qgemm::LadderTile* w, const half* x, float* y, int n, int k, int m) {
    using namespace qgemm;
    const int group = threadIdx.x / 32, lane = threadIdx.x % 32, tiles = k / TILE_COLUMNS;
    Acc sums = {};
    for (int i = 0; i < tiles; ++i) {
        const LadderTile& tile = w[i64(blockIdx.x) * tiles + i];
        multiply_row_group(sums, tile.codes[group][lane], tile.d[group][lane / 4], x, k, m, TILE_COLUMNS * i);
    }
    store_y(y, sums, 64 * blockIdx.x + 16 * group, n, m);
}
