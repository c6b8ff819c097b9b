// gemm_sm80_s8: y [m, n] = x [m, k] @ W [n, k].T for many rows of x by mma.sync of int8 (sm_80 and later).
//
//   y[m, n] = sum over groups g of 256 columns:  s_w[n, g] * s_x[m, g] * sum(q_w * q_x)
//
// Operands and results have the bits of prefill_sm80_eight_bits. A warp owns M16_TILES groups of 16 rows and all tokens
// that the CTA has. It converts a group of its rows to bytes, which stay in registers while it goes through the tokens,
// 32 at a time: W is converted once for all of them, and only x is read from shared memory. It holds the integer sums
// for 16 tokens at a time, and adds them scaled to its accumulators. Two CTAs of four warps share an SM where memory
// has room, so that one multiplies while the other converts.
// Config: see sm80/s8_gemm.cuh.
#include "gemm/epilogue.cuh"
#include "gemm/sm80/s8_gemm.cuh"

namespace qgemm {

using Gemm = Sm80S8Gemm<Config>;

}  // namespace qgemm

// x: codes [x_rows, columns], then scales [groups along K][x_rows]: qgemm/cuda/layout/group_activations.py.
extern "C" __global__ void __launch_bounds__(qgemm::Gemm::THREADS, 256 / qgemm::Gemm::THREADS)
    gemm_sm80_s8(const qgemm::Gemm::Tile* __restrict__ tiles, const signed char* __restrict__ x,
                 const __grid_constant__ qgemm::Epilogue epilogue, float4* partials, qgemm::u32* counters, qgemm::i64 n,
                 qgemm::i64 k, int m, int x_rows, int split_k) {
    using namespace qgemm;
    extern __shared__ __align__(128) unsigned char memory[];
    static_assert(sizeof(S8Smem<Gemm>) == Gemm::SMEM_BYTES, "shared memory differs from the host's SMEM_BYTES");
    auto& smem = *reinterpret_cast<S8Smem<Gemm>*>(memory);
    const WarpCoord<Gemm> coord;
    if (threadIdx.x == 0) smem.tile = CtaTile<Gemm>(n, k, m, split_k);
    __syncthreads();
    const CtaTile<Gemm>& p = smem.tile;
    Gemm::WarpAcc acc = {};
    multiply_groups(acc, S8Loader<Gemm>{smem, tiles, x, x_rows}, coord);
    if (split_k > 1 && !SplitKReduction<Gemm>{partials, counters, split_k}.reduce(acc, p)) return;
    reduce<Gemm::ROWS>(acc, smem.reduce, p, coord, [&](int token, int row, auto total) {
        epilogue.store((p.first_token + token) * p.n, p.first_row + row, total(row));
    });
}
