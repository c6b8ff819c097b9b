// moe_sort: ids [T, top_k] of experts -> the slots sorted by expert, the token tiles of every expert, and the rows of x
// [T, k] or [T, top_k, k] in this order.
//
// A stable counting sort. Each CTA counts the experts of all ids, before its own segment and from there on, which gives
// the first row of every expert in its segment. One warp assigns the rows of the segment in order, 32 slots at a time,
// and all warps copy the rows of x. So the result depends on the ids alone. An id that is no expert has no row.
// Config: THREADS.
#include "host.cuh"
#include "ptx/dynamic_smem.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/vote_ballot.cuh"
#include "gemm/schedule.cuh"

namespace qgemm {

constexpr int SORT_WARPS = Config::THREADS / 32;

struct Sorter {
    const ExpertSort& all;
    int* before;  // [experts]: ids before the segment; later the next row of an expert
    int* after;   // [experts]: ids from the segment on
    int first = blockIdx.x * all.segment, end = min(all.slots, first + all.segment);  // the segment
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    // -1 for an id that is no expert, and from `end` on. Without branches, so that several loads are in flight.
    template <class Id>
    __device__ int expert_of(int slot, int end) const {
        const i64 id = static_cast<const Id*>(all.ids)[min(slot, all.slots - 1)];
        return slot < end && id >= 0 && id < all.experts ? int(id) : -1;
    }
    // The order of counting does not matter: threads count any slots.
    template <class Id>
    __device__ void count_all() const {
        constexpr int AT_ONCE = 8;
        for (int slot = threadIdx.x; slot < all.slots; slot += AT_ONCE * Config::THREADS) {
            int experts[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) experts[i] = expert_of<Id>(slot + i * Config::THREADS, all.slots);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i)
                if (experts[i] >= 0) atomicAdd(&(slot + i * Config::THREADS < first ? before : after)[experts[i]], 1);
        }
    }
    // One warp calls it.
    template <class Id>
    __device__ void assign_rows() const {
        const int bits = 32 - __clz(all.experts);
        for (int slot = first + lane; slot - lane < end; slot += 32) {
            const int expert = expert_of<Id>(slot, end);
            const u32 same = equal_lanes(expert, bits), earlier = same & (1u << lane) - 1;
            const int row = expert < 0 ? -1 : before[expert] + __popc(earlier);
            __syncwarp();  // the next rows are read
            if (expert >= 0 && earlier == 0) before[expert] += __popc(same);
            __syncwarp();
            if (slot < end) static_cast<int*>(all.rows)[slot] = row;
        }
    }
    // The lanes of the warp that have the same number, of `bits` bits. A ballot for each bit is faster than match.any,
    // which compares with one lane after another. Sorting 32,768 ids by one CTA: 62 us, with match.any 73.
    __device__ static u32 equal_lanes(int number, int bits) {
        u32 same = ~0u;
        for (int bit = 0; bit < bits; ++bit) {
            const bool set = number >> bit & 1;
            const u32 ones = vote_ballot(set);
            same &= set ? ones : ~ones;
        }
        return same;
    }
    // The whole sort; `before` and `after` hold zeros. scan() turns the counts in `before` into the first row of every
    // expert in the segment. The first rows of x are loaded before their places are known.
    template <class Id, class Scan>
    __device__ void run(Scan scan) const {
        const int count = (end - first) * all.chunks;
        Copies copies(*this, threadIdx.x, count);
        count_all<Id>();
        __syncthreads();
        scan();
        __syncthreads();
        if (warp == 0) assign_rows<Id>();
        __syncthreads();
        copies.store(*this);
        for (int from = threadIdx.x + Copies::AT_ONCE * Config::THREADS; from < count;
             from += Copies::AT_ONCE * Config::THREADS)
            Copies(*this, from, count).store(*this);
    }

private:
    // AT_ONCE chunks of x, 16 bytes each, between their load and their store into the sorted rows.
    struct Copies {
        static constexpr int AT_ONCE = 8;
        uint4 chunks[AT_ONCE];
        int from, count;

        __device__ Copies(const Sorter& sorter, int from, int count) : from(from), count(count) {
            const ExpertSort& all = sorter.all;
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int chunk = index(i), number = divide(chunk, all.chunks_of_row);
                const i64 row_of_x = divide(sorter.first + number, all.slots_of_row);
                chunks[i] = static_cast<const uint4*>(all.x)[row_of_x * all.chunks + chunk - number * all.chunks];
            }
        }
        __device__ int index(int i) const { return min(from + i * Config::THREADS, count - 1); }
        __device__ void store(const Sorter& sorter) const {
            const ExpertSort& all = sorter.all;
            int rows[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i)
                rows[i] = static_cast<const int*>(all.rows)[sorter.first + divide(index(i), all.chunks_of_row)];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int chunk = index(i) - divide(index(i), all.chunks_of_row) * all.chunks;
                if (rows[i] >= 0 && from + i * Config::THREADS < count)
                    static_cast<uint4*>(all.sorted)[i64(rows[i]) * all.chunks + chunk] = chunks[i];
            }
        }
    };
};

// Sums over all threads before this one, and over all threads. sums: shared memory, one element for each warp.
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
        __syncthreads();  // sums of the previous scan are read
        if (lane == 31) sums[warp] = sum;
        __syncthreads();
        before = {sum.count - own.count, sum.rows - own.rows};
#pragma unroll
        for (int other = 0; other < SORT_WARPS; ++other) {
            const TokenTiles sum = sums[other];
            if (other < warp) before.count += sum.count, before.rows += sum.rows;
            total.count += sum.count, total.rows += sum.rows;
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
    const Sorter sorter = {all, memory, memory + all.experts};
    for (int i = threadIdx.x; i < 2 * all.experts; i += Config::THREADS) memory[i] = 0;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    __syncthreads();
    // Counts -> first rows, a thread for each of THREADS experts at a time.
    const auto scan = [&] {
        TokenTiles done = {0, 0};  // totals of the previous experts
        for (int first = 0; first < all.experts; first += Config::THREADS) {
            const int expert = first + threadIdx.x;
            const bool valid = expert < all.experts;
            const int rows = valid ? sorter.before[expert] + sorter.after[expert] : 0;
            const int tiles = (rows + tokens - 1) / tokens;
            const Scan scanned({tiles, rows}, sums);
            const int row = done.rows + scanned.before.rows, first_tile = done.count + scanned.before.count;
            for (int i = blockIdx.x; i < tiles; i += gridDim.x)
                static_cast<TokenTile*>(all.token_tiles)[first_tile + i] = {
                    expert, row + i * tokens, min(tokens, rows - i * tokens), first_tile, tiles};
            if (valid) sorter.before[expert] += row;
            done.count += scanned.total.count, done.rows += scanned.total.rows;
        }
        if (blockIdx.x == 0 && threadIdx.x == 0) *static_cast<TokenTiles*>(all.counts) = done;
    };
    if (all.wide_ids)
        sorter.run<i64>(scan);
    else
        sorter.run<int>(scan);
}
