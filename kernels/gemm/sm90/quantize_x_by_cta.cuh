// x quantized inside prefill_sm90_eight_bits, by its consumer warps before their mainloop, while W loads.
//
// A batch is one work item for each consumer warp of a CTA. A leader warp draws batches, broadcasts their numbers
// through smem and publishes finished ones. The warp that loads x waits for the batches of all CTAs.
//
// The leader draws its first batch before griddepcontrol.wait. The next kernel may start once all CTAs have drawn their
// last one, so no draw of a later grid comes between the draws of this one.
#pragma once

#include "ptx/barrier.cuh"
#include "ptx/elect_sync.cuh"
#include "ptx/griddepcontrol.cuh"
#include "config.cuh"
#include "raw_x.cuh"

namespace qgemm {

// Config: EightBits of eight_bits.cuh.
template <class Config>
struct QuantizeXByCta : RawX {
    static constexpr u32 WARPS = Config::CONSUMERS * 4;
    using RawX::RawX;

    // Called by the leader warp. shared_batch: the batch that the consumer warps quantize next. A batch is drawn only
    // after the one before is finished: other CTAs may have none yet.
    __device__ __forceinline__ void lead(u32& shared_batch) const {
        u32 batch = draw();
        griddepcontrol_wait();
        for (;;) {
            shared_batch = batch = __shfl_sync(~0u, batch, 0);
            barrier();
            if (batch >= batches()) break;
            barrier();
            batch = draw();
            if (elect_sync()) queue->publish(1);
        }
        griddepcontrol_launch_dependents();
    }
    // Called by the warp that loads x.
    __device__ __forceinline__ void await() const { queue->await(batches()); }
    // Called by the warp that loads x, after its loads: the atomic returns late. It leaves `next` alone, since a leader
    // may not have drawn its last batch yet; the counter returns to 0 by itself.
    __device__ void exit() const {
        __syncwarp();
        if (elect_sync() && queue->exit_last(gridDim.x)) queue->finished = 0;
    }
    // Called by the consumer warps.
    __device__ __forceinline__ void follow(const u32& shared_batch, int warp) const {
        griddepcontrol_wait();
        for (;;) {
            barrier();
            const u32 item = shared_batch * WARPS + warp;
            if (item >= batches() * WARPS) break;
            if (item < items()) with_type([&](auto zero) { quantize<decltype(zero)>(item); });
            fence_proxy_async_global();
            barrier();
        }
        __syncwarp();  // lanes diverged: see Consumer in consumer.cuh
    }

private:
    // Batches of all CTAs.
    __device__ u32 batches() const { return (items() + WARPS - 1) / WARPS; }
    // Every CTA draws one batch too many, its sign to stop; the last draw of the grid returns the counter to 0.
    __device__ u32 draw() const { return queue->draw(threadIdx.x % 32, batches() + gridDim.x - 1); }
    __device__ static void barrier() { barrier_sync(X_BATCH_BARRIER, Config::CONSUMER_THREADS + 32); }
    template <class In>
    __device__ __forceinline__ void quantize(u32 item) const {
        const int first_token = token(item), lane = threadIdx.x % 32;
        const u32 first_column = column(item);
        TokenGroups<In, ITEM_TOKENS> values;
        values.load(static_cast<const In*>(x), out, first_token, first_column, lane);
        values.template store<false>(out, first_token, first_column, lane);
    }
};

}  // namespace qgemm
