// add_epilogue: y [m, n] = sum + bias + residual or, with a gate, y = gate(residual) * (sum + bias), of float32 sums
// [m, n] that another kernel or library has stored. Types and gate are those of gemm/epilogue.cuh.
//
// A thread computes four values, which are loaded and stored together where all arrays are aligned to 16 bytes. sums
// always are.
// Config: THREADS.
#include "gemm/epilogue.cuh"
#include "ptx/griddepcontrol.cuh"

extern "C" __global__ void __launch_bounds__(qgemm::Config::THREADS)
    add_epilogue(const float* __restrict__ sums, void* y, const void* bias, const void* residual, qgemm::i64 n,
                 qgemm::i64 count, int y_type, int bias_type, int residual_type, int gate) {
    using namespace qgemm;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const i64 start = 4 * (i64(blockIdx.x) * Config::THREADS + threadIdx.x);
    const auto value = [&](float sum, float added_bias, float added) {
        if (bias_type) sum += added_bias;
        if (!residual_type) return sum;
        if (!gate) return sum + added;
        return y_type == FLOAT32 ? gated(gate, added, sum) : gated<logistic_16>(gate, added, sum);
    };
    const i64 addresses = reinterpret_cast<i64>(y) | reinterpret_cast<i64>(bias) | reinterpret_cast<i64>(residual);
    if (start + 4 <= count && addresses % 16 == 0 && !(bias_type && n % 4)) {
        const FourValues sum(sums, FLOAT32, start), biases(bias, bias_type, bias_type ? start % n : 0),
            residuals(residual, residual_type, start);
        float values[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i] = value(sum[i], biases[i], residuals[i]);
        store_as_four(y, y_type, start, values);
    } else {
        for (i64 i = start; i < min(start + 4, count); ++i)
            store_as(y, y_type, i,
                     value(sums[i], load_as(bias, bias_type, i % n), load_as(residual, residual_type, i)));
    }
}
