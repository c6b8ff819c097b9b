// A ring of tiles in shared memory that one warp fills and empties for itself: no other warp waits for it.
// sm_90 and later: bulk copies that report to an mbarrier. sm_80 to sm_89: cp.async, 16 bytes a lane.
#pragma once

#include "types.cuh"

__device__ inline u32 shared_address(const void* pointer) { return u32(__cvta_generic_to_shared(pointer)); }

// True in one lane of the warp; unlike lane == 0 it stays uniform, so that ptxas does not build a loop around a copy.
__device__ inline bool elect_one() {
    u32 elected;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(elected));
    return elected;
}

__device__ inline void mbarrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ inline void mbarrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ inline void mbarrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

__device__ inline void bulk_copy(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

template <class Slice, int DEPTH>
struct Ring {
    Slice* slots;
    u32 barriers;

    // `memory` of DEPTH slots and `words` of DEPTH barriers belong to this warp alone.
    __device__ Ring(void* memory, unsigned long long* words)
        : slots(static_cast<Slice*>(memory)), barriers(shared_address(words)) {
        if (elect_one()) {
            for (int i = 0; i < DEPTH; ++i) mbarrier_init(barriers + 8 * i, 1);
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        __syncwarp();
    }

    // Start copying the row groups from `first` on of a tile into the slot.
    template <class Tile>
    __device__ void fill(int slot, const Tile& tile, int first) {
        if (elect_one()) {
            const u32 barrier = barriers + 8 * slot;
            mbarrier_expect(barrier, sizeof(Slice));
            slots[slot].copy_from(tile, first, [&](void* to, const void* from, u32 bytes) {
                bulk_copy(shared_address(to), from, bytes, barrier);
            });
        }
    }

    // Wait for the slot's copy; `round` counts how often the slot was used before.
    __device__ const Slice& wait(int slot, int round) {
        mbarrier_wait(barriers + 8 * slot, round & 1);
        return slots[slot];
    }
};
