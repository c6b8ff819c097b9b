// round_activations: x [m, k] -> d * q [m, k], x quantized to blocks of codes and decoded.
//
// A thread owns eight values.
// Config: In (float, half, bf16), Out (float, half).
#include "ptx/griddepcontrol.cuh"
#include "codes/quantize.cuh"

extern "C" __global__ void __launch_bounds__(128)
    round_activations(const qgemm::Config::In* __restrict__ x, qgemm::Config::Out* __restrict__ rounded, qgemm::i64 k,
                      int m) {
    using namespace qgemm;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const i64 first = 8 * (i64(blockIdx.x) * blockDim.x + threadIdx.x);
    const bool inside = first < m * k;
    float values[8] = {};
    if (inside) load_eight(values, x + first);
    const QuantizedShare share(values);
    for (int i = 0; i < 8; ++i) values[i] = share.value(i);
    if (inside) store_eight(rounded + first, values);
}
