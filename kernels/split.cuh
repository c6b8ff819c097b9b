// A CTA that owns GROUPS groups of 16 rows of a strip: its SPLITS warps take the strip's tiles in turn, each span by span
// through a ring of its own that no other warp waits for, and their sums meet at the end, in a fixed order.
#pragma once

#include "mma.cuh"
#include "ring.cuh"
#include "tile.cuh"

constexpr int THREADS = SPLITS * 32;
constexpr int ROWS = 16 * GROUPS;
constexpr int COLUMN_TILES = TOKENS / 8;

using Span = SpanOf<GROUPS>;
using Fields = FormatOf<GROUPS>;
using AllSums = Sums[GROUPS][COLUMN_TILES];

// The memory of a warp: what it needs for DEPTH spans, the codes and the activations X of each. The fields of a tile come with its first span and stay until
// its last.
template <class X, int SPANS>
struct RingOf {
    static constexpr int TILES = 1 + (DEPTH - 1 + SPANS - 1) / SPANS;  // that DEPTH spans may belong to
    struct Stage {
        Span weights;
        X x;
    } stages[DEPTH];
    Fields slots[TILES];

    __device__ const Fields& fields(int i, int) const { return slots[i / SPANS % TILES]; }
    static __device__ u32 bytes(int i) { return sizeof(Span) + (i % SPANS == 0 ? sizeof(Fields) : 0); }
    template <class Copy>
    __device__ void load(const Tile& tile, int i, int slot, int first_group, Copy copy) {
        stages[slot].weights.copy_from(tile.spans[i % SPANS], first_group, copy);
        if (i % SPANS == 0) slots[i / SPANS % TILES].copy_from(tile.fields, first_group, copy);
    }
};

// A tile of one span comes in one piece, if the CTA takes all its rows.
template <class X>
struct RingOf<X, 1> {
    struct Stage {
        Span weights;
        Fields fields;
        X x;
    } stages[DEPTH];

    __device__ const Fields& fields(int, int slot) const { return stages[slot].fields; }
    static __device__ u32 bytes(int) { return sizeof(Span) + sizeof(Fields); }
    template <class Copy>
    __device__ void load(const Tile& tile, int, int slot, int first_group, Copy copy) {
        if constexpr (GROUPS == WARPS) {
            copy(&stages[slot].weights, &tile, sizeof(Tile));
        } else {
            stages[slot].weights.copy_from(tile.spans[0], first_group, copy);
            stages[slot].fields.copy_from(tile.fields, first_group, copy);
        }
    }
};

// The barriers of a ring of this warp, each of which waits for so many arrivals, and the bytes they announce.
__device__ inline void init_barriers(u32 barriers, int arrivals) {
    if (elect_one()) {
        for (int slot = 0; slot < DEPTH; ++slot) mbarrier_init(barriers + 8 * slot, arrivals);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
}

// Number `i` of the spans of a warp, whose first tile is *tiles, and `more` bytes that the caller copies -> slot.
template <class Ring>
__device__ inline void load_weights(Ring* ring, u32 barriers, const Tile* tiles, int i, int slot, int first_group,
                                    u32 more) {
    if (elect_one()) {
        const u32 barrier = barriers + 8 * slot;
        mbarrier_expect(barrier, Ring::bytes(i) + more);
        ring->load(tiles[i / SPANS * SPLITS], i, slot, first_group,
                   [&](void* to, const void* from, u32 bytes) { bulk_copy(shared_address(to), from, bytes, barrier); });
    }
}

// The warps' sums times a unit, that of rows g and of rows g + 8, -> y. `parts` is shared memory of the whole CTA.
__device__ inline void reduce_and_store(const AllSums& sums, float2 unit, float* parts, Out* y, i64 first_row, i64 n,
                                        int m, int split, int lane) {
    constexpr int STRIDE = ROWS + 4;  // rows of g and columns of t fall on different banks
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int group = 0; group < GROUPS; ++group)
#pragma unroll
        for (int tokens = 0; tokens < COLUMN_TILES; ++tokens)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = 16 * group + g + 8 * (i / 2), token = 8 * tokens + 2 * t + i % 2;
                const float sum = (i < 2 ? unit.x : unit.y) * sums[group][tokens].sum[i];
                if (token < m) parts[(split * TOKENS + token) * STRIDE + row] = sum;
            }
    __syncthreads();
    for (int i = threadIdx.x; i < m * ROWS; i += THREADS) {
        const int row = i % ROWS, token = i / ROWS;
        float sum = 0;
#pragma unroll
        for (int s = 0; s < SPLITS; ++s) sum += parts[(s * TOKENS + token) * STRIDE + row];
        if (first_row + row < n) y[token * n + first_row + row] = from_float<Out>(sum);
    }
}
