// Mainloop and consumer of prefill_sm90_a8_g128: a warpgroup owns a row_block and every WG_SPLIT_K-th stage. A stage has the columns of
// a scale of W and two boxes of x, EIGHT_BIT_GROUP columns each, that have a scale a token.
//
//   acc += s_w * s_x * (the integer sums of a box)
//
// While wgmma adds up a box, the weights of the next one are brought into bytes; then the sums are scaled and added, and
// the other warpgroups have the tensor cores.
// Config: EightBits of eight_bits.cuh.
#pragma once

#include "../ptx/wgmma_s8.cuh"
#include "eight_bit_scales.cuh"
#include "eight_bits.cuh"

namespace qgemm {

template <class Config>
struct EightBitMainloop {
    static constexpr int TOKENS = Config::TOKENS, BOXES = Config::BOXES, STEPS = EIGHT_BIT_GROUP / 32;
    static constexpr u32 X_BOX = StageCursor<Config>::X_STAGE / BOXES;  // stride of operand B's descriptor
    using Format = typename Config::TileFormat;
    using Acc = typename Config::Acc;
    using Sums = int[Config::ACC_SIZE];
    using OperandA = u32[STEPS][4];  // a box's registers
    using Cursor = StageCursor<Config>;
    const Warpgroup<Config>& wg;
    const WeightPipeline<Config>& pipeline;  // W of this row_block
    u32 first_x;                             // operand B's descriptor (low word) in the first stage

    // The scales of sums that wgmma may still be adding up.
    struct Pending {
        const float4* x = nullptr;
        float2 unit;
    };

    // acc += W @ x over this warpgroup's stages of a work tile. before: stages that this CTA has been through.
    __device__ __forceinline__ void run(Acc& acc, const WorkTile& s, u32 before) const {
        OperandA a[BOXES];
        Sums sums;
        EightBitScales<Config> scales;
        Pending pending;
        Cursor cursor(wg, s, before);
        for (const int end = wg.p.end_stage(s); cursor.j < end; cursor.advance()) {
            cursor.wait(pipeline, first_x);
            scales.begin(pipeline, cursor.state.stage, cursor.tile(), wg.p.k_blocks_in(cursor.j), wg.warp, wg.lane);
#pragma unroll
            for (int box = 0; box < BOXES; ++box) {
                dequantize(a[box], cursor, box, scales);
                wgmma_wait<0>();
                if (pending.x) add(acc, sums, pending);
                if (box == 0) cursor.release();
                wgmma_fence();
                const unsigned long long x = cursor.x + box * X_BOX;
#pragma unroll
                for (int step = 0; step < STEPS; ++step) {
                    if (step == 0)
                        wgmma_s8<TOKENS, 0>(sums, a[box][step], x);
                    else
                        wgmma_s8<TOKENS, 1>(sums, a[box][step], x + 2 * step);
                }
                wgmma_commit();
                const float* x_scales = wg.smem.x_scales[cursor.state.stage][box];
                pending = {reinterpret_cast<const float4*>(x_scales) + wg.lane % 4, scales.unit};
            }
        }
        wgmma_wait<0>();
        if (pending.x) add(acc, sums, pending);
        cursor.release();
    }

private:
    __device__ __forceinline__ void dequantize(OperandA& a, const Cursor& cursor, int box,
                                               const EightBitScales<Config>& scales) const {
#pragma unroll
        for (int i = 0; i < Config::X_K_BLOCKS; ++i) {
            const int k_block = box * Config::X_K_BLOCKS + i;
            const auto codes = pipeline.codes(cursor.state.stage, k_block).codes(wg.warp, wg.lane);
#pragma unroll
            for (int step = 0; step < Config::K_BLOCK_STEPS; ++step) {
                u32 rows[2];
                scales.bytes(rows, Format::codes_f16(codes, step), k_block, step);
                const int at = (i * Config::K_BLOCK_STEPS + step) / 2, of = step % 2;
                a[at][2 * of] = rows[0], a[at][2 * of + 1] = rows[1];
            }
        }
    }

    // Sums of tokens 8 i + 2t and 8 i + 2t + 1, of rows g and g + 8. The scales of four tokens of a lane lie together.
    __device__ __forceinline__ void add(Acc& acc, const Sums& sums, const Pending& by) const {
#pragma unroll
        for (int i = 0; i < TOKENS / 16; ++i) {
            const float4 four = by.x[4 * i];
            const float x[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float scale = x[j / 4 * 2 + j % 2] * (j / 2 % 2 ? by.unit.y : by.unit.x);
                acc[8 * i + j] = __fmaf_rn(float(sums[8 * i + j]), scale, acc[8 * i + j]);
            }
        }
    }
};

// Accumulators are products already.
struct NoRowFactor {
    __device__ static constexpr float acc(int) { return 1; }
};

// The same of a product by eight bits. Store: as there, with a NoRowFactor.
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
            __syncwarp();  // lanes diverged, see the other
        }
    }
};

}  // namespace qgemm
