// scale_rows: x [m, k] of bf16 -> ScaledRows (scaled_rows.cuh). A CTA owns a row.
//
// Config: THREADS.
#include "ptx/griddepcontrol.cuh"
#include "quantize/scaled_rows.cuh"

extern "C" __global__ void __launch_bounds__(qgemm::Config::THREADS)
    scale_rows(const uint4* __restrict__ x, void* __restrict__ rows, qgemm::i64 k, int) {
    using namespace qgemm;
    constexpr int WARPS = Config::THREADS / 32;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    __shared__ u32 largest[WARPS];
    const auto largest_of = [&](u32 value) {
        value = redux_sync_max(value);
        if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = value;
        __syncthreads();
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) value = max(value, largest[warp]);
        return value;
    };
    const i64 row = blockIdx.x;
    ScaledRows{rows, k}.scale<Config::THREADS, 4>(x + row * (k / 8), row, threadIdx.x, largest_of);
}
