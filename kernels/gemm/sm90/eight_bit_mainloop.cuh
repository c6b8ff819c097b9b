// Mainloop and consumer of prefill_sm90_eight_bits: a warpgroup owns a row_block and every WG_SPLIT_K-th stage. A stage
// has the columns of a scale of W, in two boxes of x.
//
//   acc += s_w * s_x * (the integer sums of a group of columns of x)
//
// While wgmma adds up one group, sums of the one before are scaled and added, and weights are brought into bytes. Where
// a group is a stage, more than 128 tokens are two halves with sums of their own, so that one is scaled while the other
// is added up.
// Config: EightBits of eight_bits.cuh.
#pragma once

#include "ptx/wgmma_s8.cuh"
#include "gemm/eight_bit_scales.cuh"
#include "eight_bits.cuh"

namespace qgemm {

template <class Config>
struct EightBitMainloop {
    static constexpr int GROUPS = Config::GROUPS, STEPS = Config::X_COLUMNS / 32;  // groups of x in a stage
    // Tokens of a half; wgmma of bytes takes multiples of 16.
    static constexpr int FIRST_TOKENS = (Config::TOKENS / 2 + 15) / 16 * 16,
                         LAST_TOKENS = Config::TOKENS - FIRST_TOKENS;
    static constexpr u32 X_BOX = StageCursor<Config>::X_STAGE / Config::BOXES,  // strides of operand B's descriptor
        X_HALF = X_BOX / Config::TOKENS * FIRST_TOKENS;
    // 128 tokens in halves take 88.0 us where one set of sums takes 82.0; 176 in one set spill registers.
    static constexpr bool HALVES = GROUPS == 1 && Config::TOKENS > 128;
    using Format = typename Config::TileFormat;
    using Acc = typename Config::Acc;
    template <int TOKENS>
    using Sums = int[TOKENS / 2];
    using OperandA = u32[STEPS][4];  // a box's registers
    using Cursor = StageCursor<Config>;
    const Warpgroup<Config>& wg;
    const WeightPipeline<Config>& pipeline;  // W of this row_block
    u32 first_x;                             // operand B's descriptor (low word) in the first stage

    // The scales of a group: of x, and of this lane's rows g and g + 8.
    struct GroupScales {
        const float4* x;
        float2 w;
    };

    // acc += W @ x over this warpgroup's stages of a work tile. before: stages that this CTA has been through.
    __device__ __forceinline__ void run(Acc& acc, const WorkTile& s, u32 before) const {
        Cursor cursor(wg, s, before);
        if constexpr (HALVES)
            run_halves(acc, cursor, wg.p.end_stage(s));
        else
            run_boxes(acc, cursor, wg.p.end_stage(s));
    }

private:
    // A group is a stage. Both halves are added before the next stage: sums that are read in the next round of the loop
    // make ptxas wait for all of wgmma.
    __device__ __forceinline__ void run_halves(Acc& acc, Cursor& cursor, int end) const {
        if (cursor.j >= end) return;
        OperandA a[2];
        Sums<FIRST_TOKENS> first;
        Sums<LAST_TOKENS> last;
        EightBitScales<Config> w_scales;
        begin_stage(a[0], cursor, w_scales);
        while (cursor.j < end) {
            const unsigned long long x = cursor.x;
            const GroupScales group = scales_of(cursor, 0, w_scales);
            multiply<FIRST_TOKENS, 0, false>(first, a[0], x);
            dequantize(a[1], cursor, 1, w_scales);
            multiply<FIRST_TOKENS, 1>(first, a[1], x + X_BOX);
            multiply<LAST_TOKENS, 0>(last, a[0], x + X_HALF);
            multiply<LAST_TOKENS, 1>(last, a[1], x + X_BOX + X_HALF);
            cursor.release();
            wgmma_wait<2>();
            add<0, FIRST_TOKENS>(acc, first, group);
            cursor.advance();
            wgmma_wait<1>();  // a[0] is read
            if (cursor.j < end) begin_stage(a[0], cursor, w_scales);
            wgmma_wait<0>();
            add<FIRST_TOKENS, LAST_TOKENS>(acc, last, group);
        }
        cursor.release();
    }
    // All tokens have their sums together: where a group is a box, halves take an eighth longer.
    __device__ __forceinline__ void run_boxes(Acc& acc, Cursor& cursor, int end) const {
        OperandA a[2];
        Sums<Config::TOKENS> sums;
        EightBitScales<Config> w_scales;
        GroupScales group = {nullptr, {}};  // of sums that wgmma may still be adding up
        for (; cursor.j < end; cursor.advance()) {
            cursor.wait(pipeline, first_x);
            w_scales.begin(pipeline, cursor.state.stage, cursor.tile(), wg.p.k_blocks_in(cursor.j), wg.warp, wg.lane);
            if constexpr (GROUPS == 1) wgmma_wait<1>();  // a[0] is read
#pragma unroll
            for (int box = 0; box < 2; ++box) {
                dequantize(a[box], cursor, box, w_scales);
                const unsigned long long x = cursor.x + box * X_BOX;
                if (GROUPS == 1 && box == 1) {
                    multiply<Config::TOKENS, 1>(sums, a[box], x);
                    continue;
                }
                wgmma_wait<0>();
                if (group.x) add<0, Config::TOKENS>(acc, sums, group);
                if (box == 0) cursor.release();
                multiply<Config::TOKENS, 0>(sums, a[box], x);
                group = scales_of(cursor, box, w_scales);
            }
        }
        wgmma_wait<0>();
        if (group.x) add<0, Config::TOKENS>(acc, sums, group);
        cursor.release();
    }
    // Waits for a stage, decodes its scales and brings the weights of its first box into bytes.
    __device__ __forceinline__ void begin_stage(OperandA& a, Cursor& cursor, EightBitScales<Config>& w_scales) const {
        cursor.wait(pipeline, first_x);
        w_scales.begin(pipeline, cursor.state.stage, cursor.tile(), wg.p.k_blocks_in(cursor.j), wg.warp, wg.lane);
        dequantize(a, cursor, 0, w_scales);
    }
    // Starts the sums of a half of the tokens over a box, or adds to them.
    template <int TOKENS, int ADD, bool COMMIT = true>
    __device__ __forceinline__ static void multiply(Sums<TOKENS>& sums, const OperandA& a, unsigned long long x) {
        wgmma_fence();
        wgmma_s8<TOKENS, ADD>(sums, a[0], x);
#pragma unroll
        for (int step = 1; step < STEPS; ++step) wgmma_s8<TOKENS, 1>(sums, a[step], x + 2 * step);
        if (COMMIT) wgmma_commit();
    }
    __device__ GroupScales scales_of(const Cursor& cursor, int group, const EightBitScales<Config>& w_scales) const {
        const float* x = wg.smem.x_scales[cursor.state.stage][group];
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
                const int at = (i * Config::K_BLOCK_STEPS + step) / 2, of = step % 2;
                a[at][2 * of] = rows[0], a[at][2 * of + 1] = rows[1];
            }
        }
    }

    // Adds the sums of tokens FIRST to FIRST + TOKENS - 1: of tokens 8 i + 2t and 8 i + 2t + 1, of rows g and g + 8.
    // The scales of four tokens of a lane lie together.
    template <int FIRST, int TOKENS>
    __device__ __forceinline__ void add(Acc& acc, const Sums<TOKENS>& sums, const GroupScales& by) const {
#pragma unroll
        for (int i = 0; i < TOKENS / 16; ++i) {
            const int of = FIRST / 16 + i;
            const float4 four = by.x[4 * of];
            const float x[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float scale = x[j / 4 * 2 + j % 2] * (j / 2 % 2 ? by.w.y : by.w.x);
                acc[8 * of + j] = __fmaf_rn(float(sums[8 * i + j]), scale, acc[8 * of + j]);
            }
        }
    }
};

// Consumer of consumer.cuh for products of eight bits. Store: as there, with a NoRowFactor.
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
