// prefill_sm90_eight_bits: its configuration and its loads of x, where they differ from prefill_sm90.
//
// x is signed bytes [rows, columns], padded to whole token tiles and whole stages, with scales [stages][rows].
// qgemm/cuda/layout/group_activations.py has the order of columns and tokens. The consumer warps may quantize x first,
// while W loads (quantize_x_by_cta.cuh).
// Config: Sm90 of config.cuh with In signed char and a stage of EIGHT_BIT_COLUMNS, which share a scale of W and one of
// x; LEAST_LEVEL and GREATEST_LEVEL of the format.
#pragma once

#include "consumer.cuh"
#include "quantize_x_by_cta.cuh"

namespace qgemm {

template <class Base>
struct EightBits : Sm90<Base> {
    static constexpr bool EIGHT_BITS = true;
    static constexpr int BOXES = Base::K_BLOCKS_PER_STAGE * K_BLOCK / Sm90<Base>::X_COLUMNS;  // per stage of x
    static_assert(Base::K_BLOCKS_PER_STAGE * K_BLOCK == EIGHT_BIT_COLUMNS, "a stage has the columns of a scale of W");
    static_assert(Sm90<Base>::WHOLE_TILES, "a stage holds whole tiles, which have all scales of its columns");
    static_assert(BOXES == 2, "the main loop multiplies two boxes per stage");

    struct XScales {
        float x_scales[Base::STAGES][Base::BLOCK_TOKENS];
        alignas(16) u32 batch;  // number of the batch that consumer warps quantize: quantize_x_by_cta.cuh
    };
};

// x in bytes. map: tensor map of the bytes; scales: [stages][rows]; raw: x in floats if this kernel quantizes
// it.
template <class Config>
struct EightBitX {
    const TensorMap* map;
    const float* scales;
    int rows;
    QuantizeXByCta<Config> raw;
};

template <class Config>
__device__ __forceinline__ void lead_x(const EightBitX<Config>& x, Smem<Config>& smem) {
    if (x.raw.x) x.raw.lead(smem.batch);
}
template <class Config>
__device__ __forceinline__ void prepare_x(const EightBitX<Config>& x, const Smem<Config>& smem, int warp) {
    if (x.raw.x) x.raw.follow(smem.batch, warp);
}

template <class Config>
__device__ inline void load_x(Producer<Config>& producer, const EightBitX<Config>& x) {
    constexpr int BOXES = Config::BOXES;
    if (elect_sync()) prefetch_tensormap(x.map);
    if (!x.raw.x) griddepcontrol_launch_dependents();
    auto& smem = producer.smem;
    const auto begin = [&] {
        init_wait<Config>();
        griddepcontrol_wait();
        if (x.raw.x) x.raw.await();
    };
    producer.for_stages(nullptr, begin,
                        [&](const Source<Config>& source, int j, const PipelineState<Config::STAGES>& state, u32) {
                            const u32 full = smem.full_barrier(state);
                            mbarrier_arrive_expect_tx(full, sizeof(smem.x[0]) + sizeof(smem.x_scales[0]));
#pragma unroll
                            for (int box = 0; box < BOXES; ++box)
                                tma_load_2d(shared_address(smem.x[state.stage][box]), x.map, source.token,
                                            (j * BOXES + box) * Config::X_COLUMNS, full);
                            cp_async_bulk(shared_address(smem.x_scales[state.stage]),
                                          x.scales + i64(j) * x.rows + source.token, sizeof(smem.x_scales[0]), full);
                        });
    if (x.raw.x) x.raw.exit();
}

}  // namespace qgemm
