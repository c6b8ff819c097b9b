// A pipeline of stages in shared memory that one warp fills and empties for itself: no other warp waits for it.
// BULK, sm_90 and later: bulk copies that report to an mbarrier a stage. Else, sm_80 and later: cp.async, 16 bytes a
// lane, in groups that are waited for in order.
#pragma once

#include "types.cuh"

__device__ inline u32 shared_address(const void* pointer) { return u32(__cvta_generic_to_shared(pointer)); }

// True in one lane of the warp; unlike lane == 0 it stays uniform, so that ptxas does not build a loop around a copy.
__device__ inline bool elect_sync() {
    u32 elected;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(elected));
    return elected;
}

__device__ inline void mbarrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ inline void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ inline void mbarrier_wait_parity(u32 barrier, u32 parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

__device__ inline void cp_async_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// 16 bytes from global to shared memory, or zeros.
__device__ inline void cp_async_16(u32 to, const void* from, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}

// The calling thread's earlier cp_async_16 count as one arrival at the barrier when they are complete.
__device__ inline void cp_async_mbarrier_arrive(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// The calling thread's copies since the last commit are one group, of which the last N may still be under way.
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ inline void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

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
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
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

// Four 8 x 8 matrices of 16-bit values; lane i gives the address of row i % 8 of matrix i / 8.
__device__ inline void ldmatrix_x4(u32 (&to)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row));
}
