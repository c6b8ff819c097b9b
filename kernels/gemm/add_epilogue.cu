// add_epilogue: y [m, n] = sum + bias + residual or, with a gate, y = gate(residual) * (sum + bias), of float32 sums
// [m, n] that another library has stored. Types and gate are those of gemm/epilogue.cuh.
// Config: THREADS.
#include "gemm/epilogue.cuh"

extern "C" __global__ void __launch_bounds__(qgemm::Config::THREADS)
    add_epilogue(const float* __restrict__ sums, void* y, const void* bias, const void* residual, qgemm::i64 n,
                 qgemm::i64 count, int y_type, int bias_type, int residual_type, int gate) {
    using namespace qgemm;
    Epilogue epilogue;
    epilogue.arrays = {y, const_cast<void*>(bias), const_cast<void*>(residual)};
    epilogue.types = {y_type, bias_type, residual_type, gate};
    const i64 stride = i64(gridDim.x) * Config::THREADS;
    for (i64 i = i64(blockIdx.x) * Config::THREADS + threadIdx.x; i < count; i += stride) {
        const i64 row = i % n;
        epilogue.store(i - row, row, sums[i]);
    }
}
