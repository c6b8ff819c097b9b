// Mainloop and consumer of prefill_sm90_eight_bits. A warpgroup owns a row_block and every WG_SPLIT_K-th stage. A stage
// has the columns that share a scale of W and one of x, in two boxes of x.
//
//   acc += s_w * s_x * (integer sums over the columns of a stage)
//
// While wgmma computes the sums of one stage, the sums of the stage before are scaled and added, and the next weights
// become bytes. More than 128 tokens are computed in two passes with sums of their own: the sums of one pass are scaled
// while wgmma computes the other.
// Config: EightBits of eight_bits.cuh.
#pragma once

#include "ptx/wgmma_s8.cuh"
#include "gemm/eight_bit_scales.cuh"
#include "eight_bits.cuh"

namespace qgemm {

template <class Config>
struct EightBitMainloop {
    static constexpr int STEPS = Config::X_COLUMNS / 32;  // per box
    // Tokens of the two passes: int8 wgmma requires multiples of 16.
    static constexpr int FIRST_TOKENS = (Config::BLOCK_TOKENS / 2 + 15) / 16 * 16,
                         LAST_TOKENS = Config::BLOCK_TOKENS - FIRST_TOKENS;
    static constexpr u32 X_BOX = StageCursor<Config>::X_STAGE / Config::BOXES,  // strides of operand B's descriptor
        X_LAST = X_BOX / Config::BLOCK_TOKENS * FIRST_TOKENS;
    // Measured: 128 tokens in two passes cost 88.0 us, in one 82.0. 176 tokens in one pass spill registers.
    static constexpr bool TWO_PASSES = Config::BLOCK_TOKENS > 128;
    using Format = typename Config::TileFormat;
    using Acc = typename Config::Acc;
    template <int TOKENS>
    using Sums = int[TOKENS / 2];
    using OperandA = u32[STEPS][4];  // for a box of x
    using Cursor = StageCursor<Config>;
    const Warpgroup<Config>& wg;
    const WeightPipeline<Config>& pipeline;  // W of this row_block
    u32 first_x;                             // operand B's descriptor (low word) in the first stage

    // The scales of a stage: of x, and of this lane's rows g and g + 8.
    struct StageScales {
        const float4* x;
        float2 w;
    };

    // acc += W @ x over this warpgroup's stages of a work tile. before: stages that the CTA used for earlier work
    // tiles.
    __device__ __forceinline__ void run(Acc& acc, const WorkTile& s, u32 before) const {
        Cursor cursor(wg, s, before);
        if constexpr (TWO_PASSES)
            run_two_passes(acc, cursor, wg.p.end_stage(s));
        else
            run_one_pass(acc, cursor, wg.p.end_stage(s));
    }

private:
    // The sums of both passes are added within the iteration: if the next one read them, ptxas
    // would wait for all wgmma.
    __device__ __forceinline__ void run_two_passes(Acc& acc, Cursor& cursor, int end) const {
        if (cursor.j >= end) return;
        OperandA a[2];
        Sums<FIRST_TOKENS> first;
        Sums<LAST_TOKENS> last;
        EightBitScales<Config> w_scales;
        begin_stage(a[0], cursor, w_scales);
        while (cursor.j < end) {
            const unsigned long long x = cursor.x;
            const StageScales scales = scales_of(cursor, w_scales);
            multiply<FIRST_TOKENS, 0, false>(first, a[0], x);
            dequantize(a[1], cursor, 1, w_scales);
            multiply<FIRST_TOKENS, 1>(first, a[1], x + X_BOX);
            multiply<LAST_TOKENS, 0>(last, a[0], x + X_LAST);
            multiply<LAST_TOKENS, 1>(last, a[1], x + X_BOX + X_LAST);
            cursor.release();
            wgmma_wait<2>();
            add<0, FIRST_TOKENS>(acc, first, scales);
            cursor.advance();
            wgmma_wait<1>();  // wgmma has read a[0]
            if (cursor.j < end) begin_stage(a[0], cursor, w_scales);
            wgmma_wait<0>();
            add<FIRST_TOKENS, LAST_TOKENS>(acc, last, scales);
        }
        cursor.release();
    }
    // The sums of all tokens are computed together.
    __device__ __forceinline__ void run_one_pass(Acc& acc, Cursor& cursor, int end) const {
        OperandA a[2];
        Sums<Config::BLOCK_TOKENS> sums;
        EightBitScales<Config> w_scales;
        StageScales scales = {nullptr, {}};  // scales of the sums that wgmma may still be computing
        for (; cursor.j < end; cursor.advance()) {
            cursor.wait(pipeline, first_x);
            w_scales.begin(pipeline, cursor.state.stage, cursor.tile(), wg.p.k_blocks_in(cursor.j), wg.warp, wg.lane);
            wgmma_wait<1>();  // wgmma has read a[0]
            dequantize(a[0], cursor, 0, w_scales);
            wgmma_wait<0>();
            if (scales.x) add<0, Config::BLOCK_TOKENS>(acc, sums, scales);
            cursor.release();
            multiply<Config::BLOCK_TOKENS, 0>(sums, a[0], cursor.x);
            scales = scales_of(cursor, w_scales);
            dequantize(a[1], cursor, 1, w_scales);
            multiply<Config::BLOCK_TOKENS, 1>(sums, a[1], cursor.x + X_BOX);
        }
        wgmma_wait<0>();
        if (scales.x) add<0, Config::BLOCK_TOKENS>(acc, sums, scales);
        cursor.release();
    }
    // Waits for a stage, decodes its scales and converts the weights of its first box to bytes.
    __device__ __forceinline__ void begin_stage(OperandA& a, Cursor& cursor, EightBitScales<Config>& w_scales) const {
        cursor.wait(pipeline, first_x);
        w_scales.begin(pipeline, cursor.state.stage, cursor.tile(), wg.p.k_blocks_in(cursor.j), wg.warp, wg.lane);
        dequantize(a, cursor, 0, w_scales);
    }
    // Starts the sums of TOKENS tokens over a box; ADD: adds to the sums.
    template <int TOKENS, int ADD, bool COMMIT = true>
    __device__ __forceinline__ static void multiply(Sums<TOKENS>& sums, const OperandA& a, unsigned long long x) {
        wgmma_fence();
        wgmma_s8<TOKENS, ADD>(sums, a[0], x);
#pragma unroll
        for (int step = 1; step < STEPS; ++step) wgmma_s8<TOKENS, 1>(sums, a[step], x + 2 * step);
        if (COMMIT) wgmma_commit();
    }
    __device__ StageScales scales_of(const Cursor& cursor, const EightBitScales<Config>& w_scales) const {
        const float* x = wg.smem.x_scales[cursor.state.stage];
        return {reinterpret_cast<const float4*>(x) + wg.lane % 4, w_scales.unit};
    }
    __device__ __forceinline__ void dequantize(OperandA& a, const Cursor& cursor, int box,
                                               const EightBitScales<Config>& w_scales) const {
#pragma unroll
        for (int i = 0; i < Config::X_K_BLOCKS; ++i) {
            const int k_block = box * Config::X_K_BLOCKS + i;
            const auto codes = pipeline.codes(cursor.state.stage, k_block).codes(wg.warp, wg.lane);
#pragma unroll
            for (int step = 0; step < Config::K_BLOCK_STEPS; ++step) {
                u32 rows[2];
                w_scales.bytes(rows, Format::codes_f16(codes, step), k_block, step);
                const int mma = (i * Config::K_BLOCK_STEPS + step) / 2, part = step % 2;  // two steps per wgmma
                a[mma][2 * part] = rows[0], a[mma][2 * part + 1] = rows[1];
            }
        }
    }

    // Adds the scaled sums of tokens FIRST .. FIRST + TOKENS - 1: a lane has rows g and g + 8 of tokens 8 i + 2t and
    // 8 i + 2t + 1. The scales of four tokens of a lane are adjacent.
    template <int FIRST, int TOKENS>
    __device__ __forceinline__ void add(Acc& acc, const Sums<TOKENS>& sums, const StageScales& scales) const {
#pragma unroll
        for (int i = 0; i < TOKENS / 16; ++i) {
            const int sixteen = FIRST / 16 + i;
            const float4 four = scales.x[4 * sixteen];
            const float x[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float scale = x[j / 4 * 2 + j % 2] * (j / 2 % 2 ? scales.w.y : scales.w.x);
                acc[8 * sixteen + j] = __fmaf_rn(float(sums[8 * i + j]), scale, acc[8 * sixteen + j]);
            }
        }
    }
};

// Consumer of consumer.cuh for products of int8. Store: as there, with a NoRowFactor.
template <class Config, class Store>
struct Consumer<Config, Store, true> {
    const Warpgroup<Config>& wg;
    EightBitMainloop<Config> mainloop;
    const Store& store;

    __device__ void run(const TileScheduler& first, const float*, Workspace<Config::MAX_PARTIALS>* workspace) const {
        TileScheduler scheduler(first);
        u32 stages = 0;
        for (WorkTile s; scheduler.fetch(s);) {
            const u32 before = stages;
            stages += wg.p.end_stage(s) - wg.p.first_stage(s);
            typename Config::Acc acc = {};
            mainloop.run(acc, s, before);
            finish_tile(wg, store, acc, s.tile, first.template peers<Config::EPI_TILES>(s), workspace, NoRowFactor());
            if (Config::SINGLE_TILE) break;
            __syncwarp();  // lanes diverged: see Consumer in consumer.cuh
        }
    }
};

}  // namespace qgemm
