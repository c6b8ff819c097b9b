// prefill_sm90_eight_bits: y [m, n] = x [m, k] @ W [n, k].T for many tokens on int8 tensor cores (sm_90a).
//
//   y[m, n] = sum over groups g of 256 columns:  s_w[n, g] * s_x[m, g] * sum(q_w * q_x)
//
// x is signed bytes with a scale for each token and group. Weights become signed bytes in registers, with a scale for
// each row and 256 columns that follows from the scales of the packed format (eight_bit_scales.cuh). Warp roles,
// pipeline, reductions and epilogue are those of prefill_sm90. Sums are integers within a group.
// Config: see sm90/config.cuh and sm90/eight_bits.cuh.
#include "gemm/sm90/dense.cuh"
#include "gemm/sm90/eight_bit_mainloop.cuh"

namespace qgemm {

using Prefill = EightBits<Config>;

}  // namespace qgemm

// x: tensor map of the bytes; x_scales: [groups along K][x_rows]. raw_x: x in floats of x_type, which this kernel
// quantizes into the bytes after x_queue; null: the bytes are ready.
extern "C" __global__ void __launch_bounds__(qgemm::Prefill::THREADS, 1)
    prefill_sm90_eight_bits(const __grid_constant__ qgemm::TensorMap x, const qgemm::Prefill::Tile* __restrict__ tiles,
                            const float* __restrict__ x_scales, const void* __restrict__ raw_x,
                            qgemm::WorkQueue* x_queue, const __grid_constant__ qgemm::Epilogue epilogue,
                            qgemm::Workspace<qgemm::Prefill::MAX_PARTIALS>* workspace, qgemm::i64 n, qgemm::i64 k,
                            int m, int x_rows, int x_type, const __grid_constant__ qgemm::StreamK stream_k) {
    using namespace qgemm;
    extern __shared__ __align__(1024) unsigned char bytes[];
    const Extent<Prefill> extent(n, k);
    const Problem<Prefill> problem = {{extent.k_blocks}, n, k, m, extent.row_tiles, stream_k};
    const QuantizeXByCta<Prefill> raw(raw_x, x_type, x_queue, x_rows, k, m);
    run_prefill<Prefill>(smem_address<Prefill>(bytes), problem, EightBitX<Prefill>{&x, x_scales, x_rows, raw}, tiles,
                         nullptr, workspace, StoreDense<Prefill>{epilogue, {}});
}
