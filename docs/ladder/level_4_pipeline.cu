// Level 4, a pipeline per warp: each warp copies its own row groups to shared memory STAGES - 1 tiles ahead.
//
// cp.async needs no registers while a copy is in flight, so a warp keeps STAGES - 1 tiles on their way, which hides the
// memory's latency. The stages are private: a warp waits for its own copies and never for another warp.
#include "ladder_pipeline.cuh"

extern "C" __global__ void level_4_pipeline(const qgemm::LadderTile* w, const half* x, float* y, int n, int k, int m) {
    using namespace qgemm;
    __shared__ __align__(16) Stage stages[4][STAGES];
    const int group = threadIdx.x / 32, lane = threadIdx.x % 32, tiles = k / TILE_COLUMNS;
    const LadderTile* row_block = w + i64(blockIdx.x) * tiles;
    for (int i = 0; i < STAGES - 1; ++i) copy_row_group(stages[group][i], row_block + i, group, i < tiles);
    Acc sums = {};
    for (int i = 0; i < tiles; ++i) {
        cp_async_wait<STAGES - 2>();  // tile i has arrived
        __syncwarp();                 // the copies of the other lanes too, and all lanes have read tile i - 1
        const int ahead = i + STAGES - 1;
        copy_row_group(stages[group][ahead % STAGES], row_block + ahead, group, ahead < tiles);
        const Stage& stage = stages[group][i % STAGES];
        multiply_row_group(sums, stage.codes[lane], stage.d[lane / 4], x, k, m, TILE_COLUMNS * i);
    }
    store_y(y, sums, 64 * blockIdx.x + 16 * group, n, m);
}
