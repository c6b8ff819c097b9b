// x quantized inside gemm_sm90_s8, by its consumer warps before they multiply. Every warp draws its own work items, and
// publishes them together when the queue is empty. The warp that loads x waits for all of them.
#pragma once

#include "raw_x.cuh"

namespace qgemm {

template <bool E4M3>
struct QuantizeXByWarp : RawX {
    using RawX::RawX;

    // Called by whole warps of every CTA, after griddepcontrol.wait.
    __device__ __forceinline__ void run(int lane) const {
        const u32 items = with_type([&](auto zero) { return quantize<decltype(zero)>(lane); });
        fence_proxy_async_global();
        __syncwarp();
        if (lane == 0 && items) queue->publish(items);
    }
    // Called by the warp that loads x.
    __device__ __forceinline__ void await() const { queue->await(items()); }
    // Called by a thread of each of `ctas` CTAs, after await() and after all run() of its CTA.
    __device__ void exit(u32 ctas) const {
        if (queue->exit_last(ctas)) queue->next = queue->finished = 0;
    }

private:
    // Quantizes items until the queue is empty and returns their number. An item is split into parts of a few tokens;
    // the next part loads while one is quantized.
    template <class In>
    __device__ __forceinline__ u32 quantize(int lane) const {
        constexpr int PART_TOKENS = ITEM_TOKENS * 2 / sizeof(In), PARTS = ITEM_TOKENS / PART_TOKENS;
        const In* from = static_cast<const In*>(x);
        const u32 end = items();
        u32 finished = 0, item = __shfl_sync(~0u, queue->draw(lane), 0);
        if (item >= end) return 0;
        u32 drawn = queue->draw(lane);
        TokenGroups<In, PART_TOKENS> values, next_values;
        values.load(from, out, token(item), column(item), lane);
#pragma unroll 1
        for (int part = 0;;) {
            const bool last = part == PARTS - 1;
            const int next_part = last ? 0 : part + 1;
            const u32 next_item = last ? __shfl_sync(~0u, drawn, 0) : item;
            if (last && next_item < end) drawn = queue->draw(lane);
            if (next_item < end)
                next_values.load(from, out, token(next_item) + next_part * PART_TOKENS, column(next_item), lane);
            values.template store<E4M3>(out, token(item) + part * PART_TOKENS, column(item), lane);
            finished += last;
            if (next_item >= end) return finished;
            values = next_values, item = next_item, part = next_part;
        }
    }
};

}  // namespace qgemm
