// gate_products: y = gate(first) * second, for two products that kernels for many tokens have stored in float32.
//
// A thread computes four values. The arrays of products are aligned to 16 bytes.
#include "gemm/epilogue.cuh"
#include "ptx/griddepcontrol.cuh"

extern "C" __global__ void __launch_bounds__(256)
    gate_products(const float* __restrict__ first, const float* __restrict__ second, void* __restrict__ y,
                  qgemm::i64 count, int y_type, int gate) {
    using namespace qgemm;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const i64 start = 4 * (i64(blockIdx.x) * blockDim.x + threadIdx.x);
    const auto value = [&](float x, float product) {
        return y_type == FLOAT32 ? gated(gate, x, product) : gated<logistic_16>(gate, x, product);
    };
    if (start + 4 <= count && reinterpret_cast<i64>(y) % 16 == 0) {
        const FourValues x(first, FLOAT32, start), products(second, FLOAT32, start);
        float values[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i] = value(x[i], products[i]);
        store_as_four(y, y_type, start, values);
    } else {
        for (i64 i = start; i < min(start + 4, count); ++i) store_as(y, y_type, i, value(first[i], second[i]));
    }
}
