// gemm_sm90_s8: y [m, n] = x [m, k] @ W [n, k].T of bytes with scales on tensor cores (sm_90a): int8, or e4m3 floats.
//
//   y[m, n] = sum over groups g of X_GROUP columns:  s_w[n, g] * s_x[m, g] * sum(q_w * q_x)
//
// The product of prefill_sm90_eight_bits, of weights as bytes in a workspace: what is left is wgmma and the scaling of
// its sums. requantize has made the bytes before, or makers, warps that would be idle, make them meanwhile. A consumer
// warpgroup has 64 rows of W and all tokens of a tile. It has the sums of one group and HALF of the tokens at a time,
// which it scales and adds to the accumulators while the other warpgroup has the tensor cores. Where makers make W, the
// consumer warps may quantize x before they multiply (quantize_within.cuh).
// Config: see sm90/s8_gemm.cuh.
#include "ptx/setmaxnreg.cuh"
#include "ptx/wgmma_e4m3.cuh"
#include "ptx/wgmma_s8.cuh"
#include "gemm/sm90/maker.cuh"
#include "gemm/sm90/quantize_within.cuh"
#include "gemm/sum_of.cuh"

namespace qgemm {

using Gemm = S8Gemm<Config>;

template <class Config>
struct S8Consumer {
    using Acc = typename Config::Acc;
    using Sums = typename SumOf<Config::E4M3>::Type[Config::HALF / 2];
    Smem<Config>& smem;
    int row_block, warp, lane;

    // acc += W @ x of a tile, or of a half of it. before: stages of W that whole tiles have used before. Rings begin
    // anew with each tile: of rings that are carried from tile to tile ptxas does not know that all threads have the
    // same, and wgmma's descriptors go through vector registers (144 us for 135).
    template <int HALVES>
    __device__ __forceinline__ void run(Acc& acc, int stages, u32 before) const {
        Ring<Config::W_STAGES> w_ring = {before};
        Ring<Config::X_STAGES> x_ring = {before * Config::HALVES};
        for (int j = 0; j < stages; ++j, w_ring.advance()) {
            mbarrier_wait_parity(shared_address(&smem.w_full[w_ring.stage()]), w_ring.phase());
            const float* scales = &smem.w_scales[w_ring.stage()][row_block][16 * warp + lane / 4];
            const float2 w_scale = {scales[0], scales[8]};
            const u32 w = wgmma_descriptor_low(shared_address(smem.w[w_ring.stage()][row_block]));
#pragma unroll
            for (int half = 0; half < HALVES; ++half, x_ring.advance()) {
                mbarrier_wait_parity(shared_address(&smem.x_full[x_ring.stage()]), x_ring.phase());
                const u32 x = wgmma_descriptor_low(shared_address(smem.x[x_ring.stage()]));
#pragma unroll
                for (int group = 0; group < Config::GROUPS; ++group) {
                    Sums sums;
                    multiply(sums, w + group * Config::GROUP_BOXES * W_BOX, x + group * Config::GROUP_BOXES * X_BOX);
                    add(acc, sums, half, smem.x_scales[x_ring.stage()][group], w_scale);
                }
                release(smem.x_empty[x_ring.stage()], true);
            }
            release(smem.w_empty[w_ring.stage()], false);
        }
    }

private:
    // Strides of boxes in descriptors.
    static constexpr u32 W_BOX = TILE_ROWS * Config::BOX / 16, X_BOX = Config::HALF * Config::BOX / 16;

    // sums = W @ x of a group of columns.
    __device__ __forceinline__ static void multiply(Sums& sums, u32 w, u32 x) {
        constexpr int STEPS = Config::BOX / 32;
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < Config::GROUP_BOXES * STEPS; ++i) {
            const unsigned long long a = wgmma_descriptor(w + i / STEPS * W_BOX + i % STEPS * 2),
                                     b = wgmma_descriptor(x + i / STEPS * X_BOX + i % STEPS * 2);
            if (i == 0)
                wgmma_shared<Config::HALF, 0>(sums, a, b);
            else
                wgmma_shared<Config::HALF, 1>(sums, a, b);
        }
        wgmma_commit();
        wgmma_wait<0>();
    }
    // Of tokens 8 i + 2t and 8 i + 2t + 1, of rows g and g + 8. The scales of four tokens of a lane lie together.
    __device__ __forceinline__ void add(Acc& acc, const Sums& sums, int half, const float* x_scales, float2 w) const {
        const float4* by = reinterpret_cast<const float4*>(x_scales) + lane % 4;
#pragma unroll
        for (int i = 0; i < Config::HALF / 16; ++i) {
            const float4 four = by[4 * i];
            const float x[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                float& to = acc[half * (Config::HALF / 2) + 8 * i + j];
                to = __fmaf_rn(float(sums[8 * i + j]), x[j / 4 * 2 + j % 2] * (j / 2 % 2 ? w.y : w.x), to);
            }
        }
    }
    // This warp has read a stage, which both CTAs of a cluster load or this one.
    __device__ __forceinline__ void release(unsigned long long& empty, bool of_cluster) const {
        __syncwarp();
        if (lane >= Config::ARRIVALS) return;
        mbarrier_arrive(shared_address(&empty));
        if (of_cluster) mbarrier_arrive_peer(shared_address(&empty));
    }
};

}  // namespace qgemm

// w: codes as requantize writes them, scales behind them, and what makers know of each other at the end. packed: tiles
// of W, from those rows on, for makers. x, x_scales: see S8Operands. given: x that is quantized within, or null;
// x_units: before its bytes.
extern "C" __global__ void __launch_bounds__(qgemm::Gemm::THREADS, 1)
    gemm_sm90_s8(const __grid_constant__ qgemm::TensorMap x, signed char* w, const void* __restrict__ packed,
                 const float* __restrict__ x_scales, const void* __restrict__ given, qgemm::XUnits* x_units,
                 const __grid_constant__ qgemm::Epilogue epilogue, const __grid_constant__ qgemm::S8Sizes size) {
    using namespace qgemm;
    static_assert(sizeof(Smem<Gemm>) == Gemm::SMEM_BYTES, "shared memory differs from what the host asks for");
    extern __shared__ __align__(1024) unsigned char bytes[];
    auto& smem = *reinterpret_cast<Smem<Gemm>*>(bytes);
    Made* made = reinterpret_cast<Made*>(w + size.workspace_bytes);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) smem.init();
    __syncthreads();
    barrier_cluster_arrive_release();
    barrier_cluster_wait();
    const QuantizeWithin<Gemm::X_GROUP, Gemm::E4M3> quantize(given, size.x_type, x_units, size.x_rows, size.k, size.m);
    const bool within = Gemm::MAKERS && given;
    const int first = blockIdx.x / Gemm::CLUSTER, step = gridDim.x / Gemm::CLUSTER, tiles = S8Tile::count(size);
    if (warp >= Gemm::WARP_LOAD) {
        setmaxnreg_dec<Gemm::PRODUCER_REGISTERS>();
        const i64 codes = i64(size.row_tiles) * Gemm::CLUSTER * Gemm::ROWS * size.stages * EIGHT_BIT_COLUMNS;
        float* w_scales = reinterpret_cast<float*>(w + codes);
        if (warp == Gemm::WARP_LOAD) {
            const u32 epoch = Gemm::MAKERS ? made->next_epoch() : 0;
            const S8Operands operands = {w, w_scales, &x, x_scales, made, epoch, size.x_rows, size.stages};
            const S8Producer<Gemm> producer = {smem, operands};
            griddepcontrol_wait();
            if (within) quantize.await();
            Ring<Gemm::W_STAGES> w_ring = {};
            Ring<Gemm::X_STAGES> x_ring = {};
            for (int tile = first; tile < tiles; tile += step) producer.load(Problem<Gemm>(size, tile), w_ring, x_ring);
            if (Gemm::MAKERS && elect_sync()) smem.leave(*made);
            if (within) {
                mbarrier_wait_parity(shared_address(&smem.quantized), 0);
                if (elect_sync()) quantize.leave(gridDim.x);
            }
        } else if (warp <= Gemm::WARP_LOAD + Gemm::MAKERS) {
            make<Gemm>(smem, made, {packed, w, w_scales}, size, warp - Gemm::WARP_LOAD - 1, lane);
        }
    } else {
        setmaxnreg_inc<Gemm::CONSUMER_REGISTERS>();
        const int row_block = warp / 4;
        const S8Consumer<Gemm> consumer = {smem, row_block, warp % 4, lane};
        if (within) {
            griddepcontrol_wait();
            quantize.run(lane);
            if (elect_sync()) mbarrier_arrive(shared_address(&smem.quantized));
        }
        u32 before = 0;
        for (int tile = first; tile < tiles; tile += step, before += size.stages) {
            const Problem<Gemm> at(size, tile);
            Gemm::Acc acc = {};
            if (at.halves == Gemm::HALVES)
                consumer.run<Gemm::HALVES>(acc, size.stages, before);
            else
                consumer.run<1>(acc, size.stages, before);
            const Warpgroup<Gemm> wg = {smem, at, 0, row_block, int(threadIdx.x % WARPGROUP_THREADS), warp % 4, lane};
            const u32 epi_tiles = (1u << at.halves * Gemm::HALF / Gemm::EPI_TILE) - 1;
            EpilogueStore<Gemm, NoRowFactor>{wg, NoRowFactor(), epi_tiles}.store(acc, tile, epilogue);
            __syncwarp();
        }
        // Not before W is read and `made` is ready: the makers of the next launch do not wait, nor does requantize.
        if (Gemm::MAKERS) mbarrier_wait_parity(shared_address(&smem.left), 0);
        griddepcontrol_launch_dependents();
    }
    barrier_cluster_arrive();
    barrier_cluster_wait();  // the peer sends nothing more
}
