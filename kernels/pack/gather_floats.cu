// gather_floats: rows of W [n, k], a matrix of floats, by their index -> y [count, k], rounded once to Out.
//
// An index out of range traps, as in PyTorch.
// Config: Weight (type of W), Out (float, half, bf16), THREADS.
#include "ptx/trap.cuh"
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(qgemm::Config::THREADS)
    gather_floats(const qgemm::Config::Weight* __restrict__ w, const qgemm::i64* __restrict__ index,
                  qgemm::Config::Out* __restrict__ y, qgemm::i64 n, qgemm::i64 k) {
    using namespace qgemm;
    const i64 row = index[blockIdx.x], stride = i64(gridDim.y) * Config::THREADS;
    if (row < 0 || row >= n) trap();
    for (i64 column = i64(blockIdx.y) * Config::THREADS + threadIdx.x; column < k; column += stride)
        y[blockIdx.x * k + column] = from_float<Config::Out>(to_float(w[row * k + column]));
}
