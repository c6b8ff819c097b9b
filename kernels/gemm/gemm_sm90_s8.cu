// gemm_sm90_s8: y [m, n] = x [m, k] @ W [n, k].T on tensor cores from bytes with scales: int8 or e4m3 (sm_90a).
//
//   y[m, n] = sum over groups g of 256 columns:  s_w[n, g] * s_x[m, g] * sum(q_w * q_x)
//
// SS-form wgmma: both operands are in shared memory. W is requantized to bytes in a global workspace, by a separate
// launch (requantize.cu) or by otherwise idle warps of this kernel (sm90/requantizer.cuh), so the mainloop only
// multiplies and rescales. A consumer warpgroup owns 64 rows of W and all tokens of a tile. It computes the sums of one
// stage for ACC_TOKENS tokens, then adds them scaled to the accumulators while the other warpgroup uses the tensor
// cores. With requantizer warps, the consumer warps may quantize x first (sm90/quantize_x_by_warp.cuh).
// Config: see sm90/s8_gemm.cuh.
#include "ptx/setmaxnreg.cuh"
#include "ptx/wgmma_e4m3.cuh"
#include "ptx/wgmma_s8.cuh"
#include "gemm/sm90/quantize_x_by_warp.cuh"
#include "gemm/sm90/requantizer.cuh"
#include "gemm/sum_of.cuh"

namespace qgemm {

using Gemm = S8Gemm<Config>;

template <class Config>
struct S8Consumer {
    using Acc = typename Config::Acc;
    using Sums = typename SumOf<Config::E4M3>::Type[Config::ACC_TOKENS / 2];
    Smem<Config>& smem;
    int row_block, warp, lane;

    // acc += W @ x over all stages of a tile of PASSES passes. before: stages of W that earlier tiles used. Pipeline
    // states start anew with each tile: ptxas does not see that states carried from tile to tile are equal in all
    // threads, and moves wgmma's descriptors through vector registers (144 us instead of 135).
    template <int PASSES>
    __device__ __forceinline__ void run(Acc& acc, int stages, u32 before) const {
        auto w_state = CountedPipelineState<Config::W_STAGES>::after(before);
        auto x_state = CountedPipelineState<Config::X_STAGES>::after(before * Config::PASSES);
        for (int j = 0; j < stages; ++j, w_state.advance()) {
            mbarrier_wait_parity(shared_address(&smem.w_full[w_state.stage()]), w_state.parity());
            const float* scales = &smem.w_scales[w_state.stage()][row_block][16 * warp + lane / 4];
            const float2 w_scale = {scales[0], scales[8]};
            const u32 w = wgmma_descriptor_low(shared_address(smem.w[w_state.stage()][row_block]));
#pragma unroll
            for (int pass = 0; pass < PASSES; ++pass, x_state.advance()) {
                mbarrier_wait_parity(shared_address(&smem.x_full[x_state.stage()]), x_state.parity());
                const u32 x = wgmma_descriptor_low(shared_address(smem.x[x_state.stage()]));
                Sums sums;
                multiply(sums, w, x);
                add(acc, sums, pass, smem.x_scales[x_state.stage()], w_scale);
                release(smem.x_empty[x_state.stage()], true);
            }
            release(smem.w_empty[w_state.stage()], false);
        }
    }

private:
    // Strides of boxes in descriptors.
    static constexpr u32 W_BOX = TILE_ROWS * Config::BOX / 16, X_BOX = Config::ACC_TOKENS * Config::BOX / 16;

    // sums = W @ x over a stage.
    __device__ __forceinline__ static void multiply(Sums& sums, u32 w, u32 x) {
        constexpr int STEPS = Config::BOX / 32;
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < Config::BOXES * STEPS; ++i) {
            const unsigned long long a = wgmma_descriptor(w + i / STEPS * W_BOX + i % STEPS * 2),
                                     b = wgmma_descriptor(x + i / STEPS * X_BOX + i % STEPS * 2);
            if (i == 0)
                wgmma_shared<Config::ACC_TOKENS, 0>(sums, a, b);
            else
                wgmma_shared<Config::ACC_TOKENS, 1>(sums, a, b);
        }
        wgmma_commit();
        wgmma_wait<0>();
    }
    // Adds scaled sums: a lane has rows g and g + 8 of tokens 8 i + 2t and 8 i + 2t + 1. The scales of four tokens of a
    // lane are adjacent.
    __device__ __forceinline__ void add(Acc& acc, const Sums& sums, int pass, const float* x_scales, float2 w) const {
        const float4* lane_scales = reinterpret_cast<const float4*>(x_scales) + lane % 4;
#pragma unroll
        for (int i = 0; i < Config::ACC_TOKENS / 16; ++i) {
            const float4 four = lane_scales[4 * i];
            const float x[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                float& total = acc[pass * (Config::ACC_TOKENS / 2) + 8 * i + j];
                total = __fmaf_rn(float(sums[8 * i + j]), x[j / 4 * 2 + j % 2] * (j / 2 % 2 ? w.y : w.x), total);
            }
        }
    }
    // Releases a stage that this warp has read. in_both_ctas: both CTAs of the cluster load it.
    __device__ __forceinline__ void release(unsigned long long& empty, bool in_both_ctas) const {
        __syncwarp();
        if (lane >= Config::ARRIVALS) return;
        mbarrier_arrive(shared_address(&empty));
        if (in_both_ctas) mbarrier_arrive_peer(shared_address(&empty));
    }
};

}  // namespace qgemm

// w: the workspace of W: codes as requantize.cu writes them, their scales, then the WorkQueue of the requantizers.
// packed: tiles of the same rows of W, for the requantizers. x, x_scales: see S8Operands. raw_x: x in floats, which
// this kernel quantizes into the bytes after x_queue; null: the bytes are ready.
extern "C" __global__ void __launch_bounds__(qgemm::Gemm::THREADS, 1)
    gemm_sm90_s8(const __grid_constant__ qgemm::TensorMap x, signed char* w, const void* __restrict__ packed,
                 const float* __restrict__ x_scales, const void* __restrict__ raw_x, qgemm::WorkQueue* x_queue,
                 const __grid_constant__ qgemm::Epilogue epilogue, const __grid_constant__ qgemm::S8Sizes size) {
    using namespace qgemm;
    static_assert(sizeof(Smem<Gemm>) == Gemm::SMEM_BYTES, "shared memory differs from the host's SMEM_BYTES");
    extern __shared__ __align__(1024) unsigned char bytes[];
    auto& smem = *reinterpret_cast<Smem<Gemm>*>(bytes);
    auto* w_queue = reinterpret_cast<WorkQueue*>(w + size.workspace_bytes);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) smem.init();
    __syncthreads();
    barrier_cluster_arrive_release();
    barrier_cluster_wait();
    const QuantizeXByWarp<Gemm::E4M3> quantize(raw_x, size.x_type, x_queue, size.x_rows, size.k, size.m);
    const bool quantizes_x = Gemm::REQUANTIZERS && raw_x;
    const int tiles = ClusterTile::count(size);
    const RoundRobin scheduler = {int(blockIdx.x / Gemm::CLUSTER), int(gridDim.x / Gemm::CLUSTER)};
    if (warp >= Gemm::WARP_LOAD) {
        setmaxnreg_dec<Gemm::PRODUCER_REGISTERS>();
        const i64 codes = i64(size.row_tiles) * Gemm::CLUSTER * Gemm::ROWS * size.stages * EIGHT_BIT_COLUMNS;
        float* w_scales = reinterpret_cast<float*>(w + codes);
        if (warp == Gemm::WARP_LOAD) {
            const u32 epoch = Gemm::REQUANTIZERS ? w_queue->ready_epoch() : 0;
            const S8Operands operands = {w, w_scales, &x, x_scales, w_queue, epoch, size.x_rows, size.stages};
            const S8Producer<Gemm> producer = {smem, operands};
            griddepcontrol_wait();
            if (quantizes_x) quantize.await();
            CountedPipelineState<Gemm::W_STAGES> w_state;
            CountedPipelineState<Gemm::X_STAGES> x_state;
            for (int tile = scheduler.next; tile < tiles; tile += scheduler.workers)
                producer.load(S8CtaTile<Gemm>(size, tile), w_state, x_state);
            if (Gemm::REQUANTIZERS && elect_sync()) smem.exit(*w_queue);
            if (quantizes_x) {
                mbarrier_wait_parity(shared_address(&smem.x_quantized), 0);
                if (elect_sync()) quantize.exit(gridDim.x);
            }
        } else if (warp < Gemm::WARP_REQUANTIZE + Gemm::REQUANTIZERS) {
            run_requantizer<Gemm>(smem, w_queue, {packed, w, w_scales}, size, warp - Gemm::WARP_REQUANTIZE, lane);
        }
    } else {
        setmaxnreg_inc<Gemm::CONSUMER_REGISTERS>();
        const int row_block = warp / 4;
        const S8Consumer<Gemm> consumer = {smem, row_block, warp % 4, lane};
        if (quantizes_x) {
            griddepcontrol_wait();
            quantize.run(lane);
            if (elect_sync()) mbarrier_arrive(shared_address(&smem.x_quantized));
        }
        u32 before = 0;
        for (int number = scheduler.next; number < tiles; number += scheduler.workers, before += size.stages) {
            const S8CtaTile<Gemm> tile(size, number);
            Gemm::Acc acc = {};
            if (tile.passes == Gemm::PASSES)
                consumer.run<Gemm::PASSES>(acc, size.stages, before);
            else
                consumer.run<1>(acc, size.stages, before);
            const Warpgroup<Gemm> wg = {smem, tile, 0, row_block, int(threadIdx.x % WARPGROUP_THREADS), warp % 4, lane};
            const u32 epi_tiles = (1u << tile.passes * Gemm::ACC_TOKENS / Gemm::EPI_TOKENS) - 1;
            EpilogueStore<Gemm, NoRowFactor>{wg, NoRowFactor(), epi_tiles}.store(acc, number, epilogue);
            __syncwarp();
        }
        // The next launch may start only when W's bytes are read and w_queue is reset: its requantizers do not wait for
        // this kernel, nor does requantize.cu.
        if (Gemm::REQUANTIZERS) mbarrier_wait_parity(shared_address(&smem.queue_exited), 0);
        griddepcontrol_launch_dependents();
    }
    barrier_cluster_arrive();
    barrier_cluster_wait();  // the peer sends nothing more
}
