// Mainloop of prefill_sm90. A warpgroup owns a row_block and every WG_SPLIT_K-th stage. It dequantizes W into
// registers, operand A, and multiplies by x in shared memory, operand B. Operand A is double-buffered: one k_block is
// dequantized while wgmma reads the one before.
//
// Config: Sm90 of config.cuh.
#pragma once

#include "ptx/wgmma.cuh"
#include "quad_scales.cuh"
#include "warpgroup.cuh"

namespace qgemm {

// The stages of a work tile that a warpgroup consumes.
template <class Config>
struct StageCursor {
    static constexpr int K_BLOCKS = Config::K_BLOCKS, K_BLOCKS_PER_STAGE = Config::K_BLOCKS_PER_STAGE;
    static constexpr int STAGES = Config::STAGES, WG_SPLIT_K = Config::WG_SPLIT_K;
    static_assert(STAGES > WG_SPLIT_K, "each warpgroup along K may hold one stage while it waits for the next");
    static constexpr u32 X_STAGE = sizeof(XStages<Config>) / STAGES / 16;  // stride of operand B's descriptor
    const Warpgroup<Config>& wg;
    const u32 tile_offset;  // number of a tile of W in this CTA minus its number along K
    PipelineState<STAGES> state;
    int j;
    unsigned long long x;  // operand B of the stage
    int busy = -1;         // the stage before this one, while wgmma may read it

    // before: stages that the CTA used for earlier work tiles.
    __device__ __forceinline__ StageCursor(const Warpgroup<Config>& wg, const WorkTile& s, u32 before)
        : wg(wg),
          tile_offset(before * K_BLOCKS_PER_STAGE / K_BLOCKS - wg.p.first_stage(s) * K_BLOCKS_PER_STAGE / K_BLOCKS),
          state(PipelineState<STAGES>::after(before)),
          j(wg.p.first_stage(s)) {
        const int ahead = (wg.wg_k + WG_SPLIT_K - before % WG_SPLIT_K) % WG_SPLIT_K;
        j += ahead;
        state.advance(ahead);
    }
    // Waits until the stage is full (consumer_wait). The stage before is released later: releasing it here would make
    // every warp wait for wgmma even if this stage is already full.
    __device__ __forceinline__ void wait(const WeightPipeline<Config>& pipeline, u32 first_x) {
        x = wgmma_descriptor(first_x + state.stage * X_STAGE);
        mbarrier_wait_parity(wg.smem.full_barrier(state), wg.smem.full_parity(state));
        pipeline.wait_fields(tile());
    }
    __device__ __forceinline__ void advance() { busy = state.stage, state.advance(WG_SPLIT_K), j += WG_SPLIT_K; }
    // Number of the stage's first tile of W among those of the CTA.
    __device__ u32 tile() const { return tile_offset + j * K_BLOCKS_PER_STAGE / K_BLOCKS; }

    // Releases the stage before (consumer_release).
    __device__ __forceinline__ void release() {
        __syncwarp();
        if (busy >= 0 && (Config::ARRIVALS > 1 || wg.lane == 0)) mbarrier_arrive(shared_address(&wg.smem.empty[busy]));
        busy = -1;
    }
};

template <class Config>
struct Mainloop {
    static constexpr int K_BLOCKS = Config::K_BLOCKS, K_BLOCKS_PER_STAGE = Config::K_BLOCKS_PER_STAGE;
    static constexpr int K_BLOCK_STEPS = Config::K_BLOCK_STEPS;
    // k_blocks whose codes are loaded together, so that one wait covers them: a stage, or two k_blocks of formats with
    // super-blocks, whose scales take the other registers.
    static constexpr int TOGETHER = K_BLOCKS > 1 && K_BLOCKS_PER_STAGE > 2 ? 2 : K_BLOCKS_PER_STAGE;
    static constexpr u32 X_K_BLOCK = StageCursor<Config>::X_STAGE / K_BLOCKS_PER_STAGE;  // stride of the descriptor
    using Format = typename Config::TileFormat;
    using Acc = typename Config::Acc;
    using Codes = typename Format::Codes;
    using OperandA = u32[K_BLOCK_STEPS][4];  // a k_block's registers
    using Cursor = StageCursor<Config>;
    const Warpgroup<Config>& wg;
    const WeightPipeline<Config>& pipeline;  // W of this row_block
    u32 first_x;                             // operand B's descriptor (low word) in the first stage

    // acc += W @ x over this warpgroup's stages of a work tile. before: stages that the CTA used for earlier work
    // tiles.
    __device__ __forceinline__ void run(Acc& acc, const WorkTile& s, u32 before, const Levels<Config>& levels,
                                        const ScaleLoader<Config>& scale_loader) const {
        OperandA a[2];
        QuadScales<Config> scales(scale_loader);
        Cursor cursor(wg, s, before);
        const int end = wg.p.end_stage(s),
                  full_end = K_BLOCKS_PER_STAGE > 1 ? min(end, wg.p.k_blocks / K_BLOCKS_PER_STAGE) : end;
        while (cursor.j < full_end) {
            cursor.wait(pipeline, first_x);
            multiply_stage(acc, a, 0, cursor, levels, scales);
            cursor.advance();
            if constexpr (K_BLOCKS_PER_STAGE % 2) {
                if (cursor.j >= full_end) break;
                cursor.wait(pipeline, first_x);
                multiply_stage(acc, a, 1, cursor, levels, scales);
                cursor.advance();
            }
        }
        wgmma_wait<0>();
        cursor.release();
        if (K_BLOCKS_PER_STAGE > 1 && cursor.j < end) {  // the last stage has fewer k_blocks
            cursor.wait(pipeline, first_x);
            for (int k_block = 0; k_block < wg.p.k_blocks % K_BLOCKS_PER_STAGE; ++k_block) {
                multiply_k_block(acc, a[0], load_codes(cursor, k_block), cursor, k_block, levels, scales);
                wgmma_wait<0>();
            }
            cursor.advance();
            cursor.release();
        }
    }

private:
    __device__ __forceinline__ Codes load_codes(const Cursor& cursor, int k_block) const {
        return pipeline.codes(cursor.state.stage, k_block).codes(wg.warp, wg.lane);
    }

    // Dequantizes a k_block, starts its wgmma and waits for the wgmma of the k_block before.
    __device__ __forceinline__ void multiply_k_block(Acc& acc, OperandA& a, const Codes& codes, Cursor& cursor,
                                                     int k_block, const Levels<Config>& levels,
                                                     QuadScales<Config>& scales) const {
        const int tile_k_block = u32(cursor.j * K_BLOCKS_PER_STAGE + k_block) % u32(K_BLOCKS);
        scales.begin(pipeline, cursor.state.stage, k_block, tile_k_block, cursor.tile() + k_block / K_BLOCKS, wg.warp,
                     wg.lane);
        ScaleOf<Config> group;
#pragma unroll
        for (int step = 0; step < K_BLOCK_STEPS; ++step) {
            if (step % Config::SCALE_STEPS == 0) group = scales(wg.warp, wg.lane, k_block, tile_k_block, step);
            const Fragment codes_f16 = Format::codes_f16(codes, step);
#pragma unroll
            for (int i = 0; i < 4; ++i) a[step][i] = group.weights(levels.from_codes(codes_f16.a[i], i % 2), i % 2);
        }
        const unsigned long long x = cursor.x + k_block * X_K_BLOCK;
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < K_BLOCK_STEPS; ++step) wgmma<Config::BLOCK_TOKENS>(acc, a[step], x + 2 * step);
        wgmma_commit();
        wgmma_wait<1>();
        if (k_block == 0) cursor.release();
    }

    // Multiplies a full stage. Its k_blocks alternate between the two buffers of operand A, beginning with `first`.
    __device__ __forceinline__ void multiply_stage(Acc& acc, OperandA (&a)[2], int first, Cursor& cursor,
                                                   const Levels<Config>& levels, QuadScales<Config>& scales) const {
        Codes codes[TOGETHER];
#pragma unroll
        for (int k_block = 0; k_block < K_BLOCKS_PER_STAGE; ++k_block) {
            if (k_block % TOGETHER == 0)
#pragma unroll
                for (int i = 0; i < TOGETHER; ++i) codes[i] = load_codes(cursor, k_block + i);
            multiply_k_block(acc, a[(first + k_block) % 2], codes[k_block % TOGETHER], cursor, k_block, levels, scales);
        }
    }
};

}  // namespace qgemm
