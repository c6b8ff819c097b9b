// WorkQueue: work items that the warps of a grid draw from a counter in global memory. A warp that has drawn an item is
// running and waits for nobody, so CTAs need not be co-resident.
#pragma once

#include "ptx/cp_async_bulk.cuh"
#include "ptx/flag.cuh"

namespace qgemm {

// Zero-initialised by the host, and handed by each launch to the next with `next`, `finished` and `exited` at 0. The
// ready flags of items, if a kernel has them, follow the struct. They hold the epoch of their launch, so they are never
// cleared.
struct alignas(128) WorkQueue {
    u32 next;      // number of the item that is drawn next
    u32 finished;  // items whose results are stored
    u32 exited;    // warps that no longer use the queue in this launch
    u32 epoch;     // launches before this one

    // Draws an item: its number in lane 0, 0 in the other lanes. The counter returns to 0 after `last`.
    __device__ u32 draw(int lane, u32 last = 1u << 31) { return lane == 0 ? atom_inc_relaxed_gpu(&next, last) : 0; }
    // Counts `items` as finished. One thread calls it, after a __syncwarp or barrier that orders the stores before it.
    __device__ __forceinline__ void publish(u32 items) {
        fence_acq_rel_gpu();
        red_add_relaxed_gpu(&finished, items);
    }
    // Waits until `items` are finished. Bulk copies that follow read their results.
    __device__ __forceinline__ void await(u32 items) const {
        while (ld_acquire_gpu(&finished) != items) {
        }
        fence_proxy_async_global();
    }
    // True for the last of `users` threads that exit; that thread resets the queue for the next launch.
    __device__ bool exit_last(u32 users) { return atom_inc_relaxed_gpu(&exited, users - 1) == users - 1; }

    // The value of a ready flag that is raised in this launch. Valid until the caller exits.
    __device__ u32 ready_epoch() const { return __ldcg(&epoch) + 1; }
    __device__ u32* ready_flags() { return reinterpret_cast<u32*>(this + 1); }
};

}  // namespace qgemm
