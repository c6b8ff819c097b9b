// A pipeline of stages in shared memory that one warp fills and empties for itself: no other warp waits for it.
// BULK, sm_90 and later: bulk copies that report to an mbarrier a stage. Else, sm_80 and later: cp.async, 16 bytes a
// lane, in groups that are waited for in order.
#pragma once

#include "ptx/cp_async.cuh"
#include "ptx/cp_async_bulk.cuh"
#include "ptx/elect_sync.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_address.cuh"

namespace qgemm {

// How the stages of this warp's pipeline fill: for each in turn, `copy` its parts, `close` it, and later `wait` for it.
// Every stage is closed, also one that stays empty. LANES: whether each lane copies pieces of its own by cp_async_16.
template <int STAGES, bool LANES, bool BULK>
struct Arrivals;

template <int STAGES, bool LANES>
struct Arrivals<STAGES, LANES, true> {
    u32 barriers;

    // words: one for each stage.
    __device__ Arrivals(unsigned long long* words) : barriers(shared_address(words)) {
        if (elect_sync()) {
            for (int stage = 0; stage < STAGES; ++stage) mbarrier_init(barriers + 8 * stage, LANES ? 1 + 32 : 1);
            fence_mbarrier_init();
        }
        __syncwarp();
    }
    // `partials` gets a function to copy with. `bytes`: of all that will be copied into this stage.
    template <class Parts>
    __device__ void first_copy(int stage, u32 bytes, Parts parts) const {
        if (elect_sync()) {
            mbarrier_arrive_expect_tx(barriers + 8 * stage, bytes);
            parts(copier(stage));
        }
    }
    template <class Parts>
    __device__ void copy(int stage, Parts parts) const {
        if (elect_sync()) parts(copier(stage));
    }
    __device__ auto copier(int stage) const {
        return [barrier = barriers + 8 * stage](void* to, const void* from, u32 bytes) {
            cp_async_bulk(shared_address(to), from, bytes, barrier);
        };
    }
    __device__ void close(int stage) const {
        if (LANES) cp_async_mbarrier_arrive(barriers + 8 * stage);
    }
    __device__ void wait(int stage, int phase) const { mbarrier_wait_parity(barriers + 8 * stage, phase & 1); }
};

template <int STAGES, bool LANES>
struct Arrivals<STAGES, LANES, false> {
    __device__ Arrivals(unsigned long long*) {}
    template <class Parts>
    __device__ void first_copy(int stage, u32, Parts parts) const {
        copy(stage, parts);
    }
    template <class Parts>
    __device__ void copy(int, Parts parts) const {
        parts([&](void* to, const void* from, u32 bytes) {
            for (u32 at = threadIdx.x % 32 * 16; at < bytes; at += 32 * 16)
                cp_async_16(shared_address(to) + at, static_cast<const char*>(from) + at, true);
        });
    }
    __device__ void close(int) const { cp_async_commit(); }
    __device__ void wait(int, int) const {
        cp_async_wait<STAGES - 1>();
        __syncwarp();  // what the other lanes copied is there as well
    }
};

}  // namespace qgemm
