// x quantized inside of prefill_sm90_eight_bits, by the consumer warps before their mainloop, while W is loaded.
//
// A turn of a CTA is a unit for each of its consumer warps. A warp leads: it takes turns by tickets, so that no CTA
// needs others to run beside it, hands them to the consumers and announces those that are made. The warp that loads x
// waits for those of all CTAs.
//
// The first ticket comes before griddepcontrol.wait: the next kernel may start when all CTAs have taken their last, so
// that no ticket of a later grid comes between them.
#pragma once

#include "ptx/barrier.cuh"
#include "ptx/elect_sync.cuh"
#include "ptx/griddepcontrol.cuh"
#include "config.cuh"
#include "given_x.cuh"

namespace qgemm {

// Config: of eight_bits.cuh.
template <class Config>
struct QuantizeByTurns : GivenX {
    static constexpr u32 WARPS = Config::CONSUMERS * 4;
    using GivenX::GivenX;

    // By the warp that leads. handed: the turn that consumers make next. A ticket is not taken before the last turn is
    // made: others may have none yet.
    __device__ __forceinline__ void lead(u32& handed) const {
        u32 turn = take();
        griddepcontrol_wait();
        for (;;) {
            handed = turn = __shfl_sync(~0u, turn, 0);
            meet();
            if (turn >= count()) break;
            meet();
            turn = take();
            if (elect_sync()) {
                fence_acq_rel_gpu();
                red_add_relaxed_gpu(&units->done, 1);
            }
        }
        griddepcontrol_launch_dependents();
    }
    // By the warp that loads x, until all of it is there.
    __device__ __forceinline__ void await() const { GivenX::await(count()); }
    // By that warp, later: it waits for an answer from memory.
    __device__ void leave() const {
        __syncwarp();
        if (elect_sync() && atom_inc_relaxed_gpu(&units->left, gridDim.x - 1) == gridDim.x - 1) units->done = 0;
    }
    // By the consumer warps.
    __device__ __forceinline__ void follow(const u32& handed, int warp) const {
        griddepcontrol_wait();
        for (;;) {
            meet();
            const u32 unit = handed * WARPS + warp;
            if (unit >= count() * WARPS) break;
            if (unit < count_units()) make(unit);
            fence_proxy_async_global();
            meet();
        }
        __syncwarp();  // lanes diverged: see Consumer in consumer.cuh
    }

private:
    // Turns of all CTAs.
    __device__ u32 count() const { return (count_units() + WARPS - 1) / WARPS; }
    // A ticket, which the first lane gets. The last one of a grid makes the counter 0 again.
    __device__ u32 take() const {
        return threadIdx.x % 32 ? 0 : atom_inc_relaxed_gpu(&units->tickets, count() + gridDim.x - 1);
    }
    __device__ static void meet() { barrier_sync(X_TURN_BARRIER, Config::CONSUMER_THREADS + 32); }
    __device__ __forceinline__ void make(u32 unit) const {
        switch (type) {
            case FLOAT32:
                return make<float>(unit);
            case FLOAT16:
                return make<half>(unit);
            case BFLOAT16:
                return make<bf16>(unit);
        }
    }
    template <class In>
    __device__ __forceinline__ void make(u32 unit) const {
        const int first = token(unit), lane = threadIdx.x % 32;
        const u32 from = column(unit);
        TokenGroups<In, UNIT_TOKENS> values;
        values.load(static_cast<const In*>(given), to, first, from, lane);
        values.template store<Config::X_GROUP, false>(to, first, from, lane);
    }
};

}  // namespace qgemm
