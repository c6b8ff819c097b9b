// Level 5, split-K within a CTA: a CTA owns 16 rows, and its SPLIT_K warps share K, every warp a pipeline of its own.
//
// Level 4 has a warp per 16 rows: 256 warps for 4096 rows, too few to keep the memory of 132 SMs busy. Here there are
// SPLIT_K times as many. Partial sums meet once, at the end, in shared memory, and are added in the order of the warps.
#include "ladder_pipeline.cuh"

namespace qgemm {

constexpr int SPLIT_K = 8;  // warps of a CTA

}  // namespace qgemm

extern "C" __global__ void level_5_split_k(const qgemm::LadderTile* w, const half* x, float* y, int n, int k, int m) {
    using namespace qgemm;
    __shared__ __align__(16) Stage stages[SPLIT_K][STAGES];
    __shared__ Acc partials[SPLIT_K][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tiles = k / TILE_COLUMNS;
    const int group = blockIdx.x % 4;
    const int count = (tiles - warp + SPLIT_K - 1) / SPLIT_K;  // tiles warp, warp + SPLIT_K, ... are this warp's
    const LadderTile* first = w + i64(blockIdx.x / 4) * tiles + warp;
    for (int i = 0; i < STAGES - 1; ++i) copy_row_group(stages[warp][i], first + SPLIT_K * i, group, i < count);
    Acc sums = {};
    for (int i = 0; i < count; ++i) {
        cp_async_wait<STAGES - 2>();
        __syncwarp();
        const int ahead = i + STAGES - 1;
        copy_row_group(stages[warp][ahead % STAGES], first + SPLIT_K * ahead, group, ahead < count);
        const Stage& stage = stages[warp][i % STAGES];
        multiply_row_group(sums, stage.codes[lane], stage.d[lane / 4], x, k, m, TILE_COLUMNS * (SPLIT_K * i + warp));
    }
    partials[warp][lane] = sums;
    __syncthreads();
    if (warp > 0) return;
    for (int other = 1; other < SPLIT_K; ++other)
        for (int i = 0; i < 4; ++i) sums.sum[i] += partials[other][lane].sum[i];
    store_y(y, sums, 16 * blockIdx.x, n, m);
}
