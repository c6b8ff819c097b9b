// Prefill on sm_90 by eight bits: what differs from prefill_sm90 in shared memory and in how x is loaded.
//
// x comes as signed bytes [m, k], padded to whole token tiles and whole stages, with scales [boxes along k][m]:
// qgemm/cuda/layout/group_activations.py has the order of columns and tokens. Or the consumer warps quantize it first,
// while W is loaded.
// Config: Sm90 of config.cuh with In signed char, a stage of EIGHT_BIT_COLUMNS, which share a scale of W; X_GROUP
// (columns of x that share a scale), LEAST_LEVEL, GREATEST_LEVEL (of the format).
#pragma once

#include "consumer.cuh"
#include "quantize_by_turns.cuh"

namespace qgemm {

template <class Base>
struct EightBits : Sm90<Base> {
    static constexpr bool EIGHT_BITS = true;
    static constexpr int BOXES = Base::K_BLOCKS_PER_STAGE * K_BLOCK / Sm90<Base>::X_COLUMNS;  // of x, in a stage
    static_assert(Base::K_BLOCKS_PER_STAGE * K_BLOCK == EIGHT_BIT_COLUMNS, "a stage has the columns of a scale of W");
    static_assert(Sm90<Base>::WHOLE_TILES, "a stage holds whole tiles, and so all scales of its columns");
    static constexpr int GROUPS = EIGHT_BIT_COLUMNS / Base::X_GROUP;  // of x, in a stage
    static_assert(BOXES == 2 && BOXES % GROUPS == 0, "a box of x lies in one group");

    struct XScales {
        float x_scales[Base::STAGES][GROUPS][Base::TOKENS];
        alignas(16) u32 turn;  // that this CTA has taken: quantize_by_turns.cuh
    };
};

// x as it is loaded. map: of its bytes; scales: [groups along K][rows]; from: where they are made of x as it is given.
template <class Config>
struct EightBitX {
    const TensorMap* map;
    const float* scales;
    int rows;
    QuantizeByTurns<Config> from;
};

template <class Config>
__device__ __forceinline__ void lead_x(const EightBitX<Config>& x, Smem<Config>& smem) {
    if (x.from.given) x.from.lead(smem.turn);
}
template <class Config>
__device__ __forceinline__ void prepare_x(const EightBitX<Config>& x, const Smem<Config>& smem, int warp) {
    if (x.from.given) x.from.follow(smem.turn, warp);
}

template <class Config>
__device__ inline void load_x(Producer<Config>& producer, const EightBitX<Config>& x) {
    constexpr int BOXES = Config::BOXES, GROUPS = Config::GROUPS;
    if (elect_sync()) prefetch_tensormap(x.map);
    if (!x.from.given) griddepcontrol_launch_dependents();
    auto& smem = producer.smem;
    const auto begin = [&] {
        init_wait<Config>();
        griddepcontrol_wait();
        if (x.from.given) x.from.await();
    };
    producer.for_stages(nullptr, begin,
                        [&](const Source<Config>& source, int j, const PipelineState<Config>& state, u32) {
                            const u32 full = state.full(smem);
                            mbarrier_arrive_expect_tx(full, sizeof(smem.x[0]) + sizeof(smem.x_scales[0]));
#pragma unroll
                            for (int box = 0; box < BOXES; ++box)
                                tma_load_2d(shared_address(smem.x[state.stage][box]), x.map, source.token,
                                            (j * BOXES + box) * Config::X_COLUMNS, full);
#pragma unroll
                            for (int group = 0; group < GROUPS; ++group)
                                cp_async_bulk(shared_address(smem.x_scales[state.stage][group]),
                                              x.scales + i64(j * GROUPS + group) * x.rows + source.token,
                                              sizeof(smem.x_scales[0][0]), full);
                        });
    if (x.from.given) x.from.leave();
}

}  // namespace qgemm
