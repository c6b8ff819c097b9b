// moe_gather: rows of x [T, k], or of [T, top_k, k], in the order in which moe_sort has sorted them by expert.
//
// A warp copies a row, 16 bytes a lane at a time.
// Config: THREADS.
#include "host.cuh"
#include "ptx/griddepcontrol.cuh"

// chunks: of 16 bytes, of a row. slots_of_x: slots of ids that share a row of x.
extern "C" __global__ void __launch_bounds__(qgemm::Config::THREADS)
    moe_gather(const uint4* x, const qgemm::TokenTiles* counts, const int* slots_of_rows, uint4* sorted, int chunks,
               int slots_of_x) {
    using namespace qgemm;
    constexpr int WARPS_OF_CTA = Config::THREADS / 32;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const int row = blockIdx.x * WARPS_OF_CTA + threadIdx.x / 32;
    if (row >= counts->rows) return;
    const uint4* from = x + i64(slots_of_rows[row] / slots_of_x) * chunks;
    uint4* to = sorted + i64(row) * chunks;
#pragma unroll 4
    for (int chunk = threadIdx.x % 32; chunk < chunks; chunk += 32) to[chunk] = from[chunk];
}
