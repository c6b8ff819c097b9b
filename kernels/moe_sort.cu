// moe_sort: ids [T, top_k] of experts -> their places sorted by expert, and the token tiles of every expert.
//
// A stable counting sort. Each CTA counts the experts of all ids, those before its own segment apart, which gives the
// first row of every expert in its segment; its warps count the ids of a part of the segment each and write their rows in
// order. So the result depends on the ids alone. An id that is no expert has no row.
// Config: THREADS, SEGMENT (ids of a CTA).
#include "host.cuh"
#include "ptx/dynamic_smem.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/vote_ballot.cuh"

namespace qgemm {

constexpr int SORT_WARPS = Config::THREADS / 32;

struct Sorter {
    const ExpertSort& all;
    int* counts;  // [SORT_WARPS][experts]: of a warp's part of the segment, then the next row of a warp and expert
    int* before;  // [experts]: ids before the segment
    int* behind;  // [experts]: the others
    int first = blockIdx.x * Config::SEGMENT, end = min(all.slots, first + Config::SEGMENT);  // of the segment
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    // -1 for an id that is no expert, and behind `end`.
    __device__ int expert_of(int slot, int end) const {
        if (slot >= end) return -1;
        const i64 id = all.wide_ids ? static_cast<const i64*>(all.ids)[slot] : static_cast<const int*>(all.ids)[slot];
        return id >= 0 && id < all.experts ? int(id) : -1;
    }
    // Order does not matter where ids are counted: any thread takes any.
    __device__ void count_all() const {
        constexpr int AT_ONCE = 8;
        for (int slot = threadIdx.x; slot < all.slots; slot += AT_ONCE * Config::THREADS) {
            int experts[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) experts[i] = expert_of(slot + i * Config::THREADS, all.slots);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i)
                if (experts[i] >= 0) atomicAdd(&(slot + i * Config::THREADS < first ? before : behind)[experts[i]], 1);
        }
    }
    // visit(slot, expert, lanes of the warp with the same one) for this warp's part of the segment, 32 slots at a time.
    template <class Visit>
    __device__ void for_segment(Visit visit) const {
        constexpr int STEPS = Config::SEGMENT / Config::THREADS;
        static_assert(Config::SEGMENT % Config::THREADS == 0, "warps have as many whole steps each");
        int experts[STEPS];
        const int from = first + warp * STEPS * 32 + lane, bits = 32 - __clz(all.experts);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) experts[step] = expert_of(from + step * 32, end);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            visit(from + step * 32, experts[step], alike(experts[step], bits));
            __syncwarp();  // counts are written
        }
    }
    // The lanes of the warp that have the same number of so many bits. A ballot for each bit is faster than match.any,
    // which compares with one number after the other: sorting 32,768 ids by one CTA took 73 us with it, 62 without.
    __device__ static u32 alike(int number, int bits) {
        u32 same = ~0u;
        for (int bit = 0; bit < bits; ++bit) {
            const bool mine = number >> bit & 1;
            const u32 ones = vote_ballot(mine);
            same &= mine ? ones : ~ones;
        }
        return same;
    }
    __device__ int& count(int of_warp, int expert) const { return counts[of_warp * all.experts + expert]; }
};

// Of all threads before this one, and of all of them. sums: shared memory, one for each warp.
struct Scan {
    TokenTiles before, total = {0, 0};

    __device__ Scan(const TokenTiles& own, TokenTiles* sums) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        TokenTiles sum = own;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int from = lane >= step ? lane - step : lane;
            const int count = __shfl_sync(~0u, sum.count, from), rows = __shfl_sync(~0u, sum.rows, from);
            if (lane >= step) sum.count += count, sum.rows += rows;
        }
        __syncthreads();  // sums of the scan before are read
        if (lane == 31) sums[warp] = sum;
        __syncthreads();
        before = {sum.count - own.count, sum.rows - own.rows};
        for (int other = 0; other < SORT_WARPS; ++other) {
            const TokenTiles found = sums[other];
            if (other < warp) before.count += found.count, before.rows += found.rows;
            total.count += found.count, total.rows += found.rows;
        }
    }
};

}  // namespace qgemm

extern "C" __global__ void __launch_bounds__(qgemm::Config::THREADS, 1)
    moe_sort(const __grid_constant__ qgemm::ExpertSort all) {
    using namespace qgemm;
    const int tokens = all.tokens;
    __shared__ TokenTiles sums[SORT_WARPS];
    int* memory = reinterpret_cast<int*>(dynamic_smem());
    const Sorter sorter = {all, memory, memory + SORT_WARPS * all.experts, memory + (SORT_WARPS + 1) * all.experts};
    for (int i = threadIdx.x; i < (SORT_WARPS + 2) * all.experts; i += Config::THREADS) memory[i] = 0;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    __syncthreads();
    sorter.count_all();
    sorter.for_segment([&](int, int expert, u32 same) {
        if (expert >= 0 && (same & (1u << sorter.lane) - 1) == 0) sorter.count(sorter.warp, expert) += __popc(same);
    });
    __syncthreads();
    // counts -> first rows; a thread an expert, THREADS of them at a time.
    TokenTiles done = {0, 0};  // of the experts before
    for (int first = 0; first < all.experts; first += Config::THREADS) {
        const int expert = first + threadIdx.x;
        const bool there = expert < all.experts;
        const int rows = there ? sorter.before[expert] + sorter.behind[expert] : 0;
        const int tiles = (rows + tokens - 1) / tokens;
        const Scan scan({tiles, rows}, sums);
        int row = done.rows + scan.before.rows;
        const int first_tile = done.count + scan.before.count;
        for (int i = blockIdx.x; i < tiles; i += gridDim.x)
            static_cast<TokenTile*>(all.token_tiles)[first_tile + i] = {
                expert, row + i * tokens, min(tokens, rows - i * tokens), first_tile, tiles};
        if (there) row += sorter.before[expert];
        for (int warp = 0; there && warp < SORT_WARPS; ++warp) {
            int& count = sorter.count(warp, expert);
            const int of_warp = count;
            count = row, row += of_warp;
        }
        done.count += scan.total.count, done.rows += scan.total.rows;
    }
    __syncthreads();
    sorter.for_segment([&](int slot, int expert, u32 same) {
        const u32 before = same & (1u << sorter.lane) - 1;
        int row = -1;
        if (expert >= 0) row = sorter.count(sorter.warp, expert) + __popc(before);
        __syncwarp();
        if (expert >= 0 && before == 0) sorter.count(sorter.warp, expert) += __popc(same);
        if (slot >= sorter.end) return;
        static_cast<int*>(all.rows)[slot] = row;
        if (row >= 0) static_cast<int*>(all.slots_of_rows)[row] = slot;
    });
    if (blockIdx.x == 0 && threadIdx.x == 0) *static_cast<TokenTiles*>(all.counts) = done;
}
