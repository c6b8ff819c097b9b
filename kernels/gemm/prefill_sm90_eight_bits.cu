// prefill_sm90_eight_bits: y [m, n] = x [m, k] @ W [n, k].T for many tokens on int8 tensor cores (sm_90a).
//
//   y[m, n] = sum over groups g of 128 columns:  s_w[n, g / 2] * s_x[m, g] * sum(q_w * q_x)
//
// x comes as signed bytes with a scale a token and group; weights are brought to signed bytes in registers, with a
// scale a row and 256 columns that follows from the scales of the packed format (eight_bit_scales.cuh). The roles of
// the warps, the pipeline, reductions and the epilogue are those of prefill_sm90; sums are integers within a group.
// Config: see sm90/config.cuh and sm90/eight_bits.cuh.
#include "gemm/sm90/eight_bit_mainloop.cuh"

namespace qgemm {

using Prefill = EightBits<Config>;

struct StoreProduct {
    const Epilogue& epilogue;

    __device__ __forceinline__ void operator()(const Warpgroup<Prefill>& wg, const Prefill::Acc& acc, int tile,
                                               u32 epi_tiles, const NoRowFactor& factor) const {
        EpilogueStore<Prefill, NoRowFactor>{wg, factor, epi_tiles}.store(acc, tile, epilogue);
    }
};

}  // namespace qgemm

// x: the map of its bytes; x_scales: [groups along K][x_rows]. given: x of x_type that is quantized first, into the
// bytes behind x_units; null where those of the map are there.
extern "C" __global__ void __launch_bounds__(qgemm::Prefill::THREADS, 1)
    prefill_sm90_eight_bits(const __grid_constant__ qgemm::TensorMap x, const qgemm::Prefill::Tile* __restrict__ tiles,
                            const float* __restrict__ x_scales, const void* __restrict__ given, qgemm::XUnits* x_units,
                            const __grid_constant__ qgemm::Epilogue epilogue,
                            qgemm::Workspace<qgemm::Prefill::MAX_PARTIALS>* workspace, qgemm::i64 n, qgemm::i64 k,
                            int m, int x_rows, int x_type, const __grid_constant__ qgemm::StreamK stream_k) {
    using namespace qgemm;
    extern __shared__ __align__(1024) unsigned char bytes[];
    const Extent<Prefill> extent(n, k);
    const Problem<Prefill> problem = {{extent.k_blocks}, n, k, m, extent.row_tiles, stream_k};
    const QuantizeByTurns<Prefill> from(given, x_type, x_units, x_rows, k, m);
    run_prefill<Prefill>(smem_address<Prefill>(bytes), problem, EightBitX<Prefill>{&x, x_scales, x_rows, from}, tiles,
                         nullptr, workspace, StoreProduct{epilogue});
}
