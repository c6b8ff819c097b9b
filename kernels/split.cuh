// A CTA that owns GROUPS groups of 16 rows of a strip: its SPLITS warps take the strip's tiles in turn, each span by span
// through a ring of its own that no other warp waits for, and their sums meet at the end, in a fixed order.
#pragma once

#include "epilogue.cuh"
#include "mma.cuh"
#include "pdl.cuh"
#include "ring.cuh"
#include "tile.cuh"

constexpr int THREADS = SPLITS * 32;
constexpr int ROWS = 16 * GROUPS;
constexpr int COLUMN_TILES = TOKENS / 8;

using Span = SpanOf<GROUPS>;
using Fields = FormatOf<GROUPS>;
using AllSums = Sums[GROUPS][COLUMN_TILES];

// One product of several that share x and a launch: y [m, n] = x @ W [n, k].T.
struct Product {
    const Tile* tiles;
    Outputs outputs;
    i64 n;
    i64 end;  // the CTA after its last
};
struct Products {
    Product of[MOST_PRODUCTS];
};
static_assert(sizeof(Products) == PRODUCTS_BYTES, "Products differs from its twin in qgemm/products.py");

// Where this warp stands: its product, rows and first tile, and how many spans it takes of its share of K.
struct Place {
    const Product& product;
    int split, lane;
    i64 first_row;
    int first_group;  // of the strip
    const Tile* tiles;
    int count;

    __device__ Place(const Products& products, i64 k) : Place(products, find(products), k) {}
    static __device__ int find(const Products& products) {
        int index = 0;
        while (blockIdx.x >= products.of[index].end) ++index;
        return index;
    }

private:
    __device__ Place(const Products& products, int index, i64 k) : product(products.of[index]) {
        split = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
        const i64 along = (k + TILE_COLUMNS - 1) / TILE_COLUMNS;
        first_row = (blockIdx.x - (index ? products.of[index - 1].end : 0)) * ROWS;
        first_group = first_row % TILE_ROWS / 16;
        tiles = product.tiles + first_row / TILE_ROWS * along + split;
        count = int(along - split + SPLITS - 1) / SPLITS * SPANS;
    }
};

// A stage of a ring: weights, and their share of x, an X, unless that is void.
template <class Weights, class X>
struct StageOf : Weights {
    X x;
};
template <class Weights>
struct StageOf<Weights, void> : Weights {};

struct Codes {
    Span weights;
};
struct CodesAndFields {
    Span weights;
    Fields fields;
};

// DEPTH spans of a warp. The fields of a tile come with its first span and stay until its last.
template <class X, int SPANS>
struct RingOf {
    static constexpr int TILES = 1 + (DEPTH - 1 + SPANS - 1) / SPANS;  // that DEPTH spans may belong to
    using Stage = StageOf<Codes, X>;
    Stage stages[DEPTH];
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
    using Stage = StageOf<CodesAndFields, X>;
    Stage stages[DEPTH];

    __device__ const Fields& fields(int, int slot) const { return stages[slot].fields; }
    static __device__ u32 bytes(int) { return sizeof(CodesAndFields); }
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

// The tile of number `i` of a warp's spans.
__device__ inline const Tile& tile_of(const Place& at, int i) { return at.tiles[i / SPANS * SPLITS]; }

// Runs a warp's spans through its ring. `load_weights(i, slot)` and `load_x(i, slot)` copy number i into a slot, and `multiply(i, slot)`
// adds its products.
template <class Arrivals, class LoadWeights, class LoadX, class Multiply>
__device__ inline void stream(int count, const Arrivals& arrivals, LoadWeights load_weights, LoadX load_x,
                              Multiply multiply) {
    for (int i = 0; i < min(DEPTH, count); ++i) load_weights(i, i);
    launch_dependents();
    wait_for_predecessors();  // the weights never change, x and y may belong to the kernels before
    for (int i = 0; i < DEPTH; ++i) {
        if (i < count) load_x(i, i);
        arrivals.close(i);
    }
    int slot = 0, round = 0;
    for (int i = 0; i < count; ++i) {
        arrivals.wait(slot, round);
        multiply(i, slot);
        __syncwarp();  // every lane has read the slot
        if (i + DEPTH < count) {
            load_weights(i + DEPTH, slot);
            load_x(i + DEPTH, slot);
        }
        arrivals.close(slot);
        if (++slot == DEPTH) slot = 0, ++round;
    }
}

// The warps' sums times a unit, that of rows g and of rows g + 8, -> y. `parts` is shared memory of the whole CTA.
__device__ inline void reduce_and_store(const AllSums& sums, float2 unit, float* parts, const Place& at, int m) {
    constexpr int STRIDE = ROWS + 4;  // rows of g and columns of t fall on different banks
    const int g = at.lane / 4, t = at.lane % 4;
#pragma unroll
    for (int group = 0; group < GROUPS; ++group)
#pragma unroll
        for (int tokens = 0; tokens < COLUMN_TILES; ++tokens)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = 16 * group + g + 8 * (i / 2), token = 8 * tokens + 2 * t + i % 2;
                const float sum = (i < 2 ? unit.x : unit.y) * sums[group][tokens].sum[i];
                if (token < m) parts[(at.split * TOKENS + token) * STRIDE + row] = sum;
            }
    __syncthreads();
    const Product& product = at.product;
    for (int i = threadIdx.x; i < m * ROWS; i += THREADS) {
        const int row = i % ROWS, token = i / ROWS;
        float sum = 0;
#pragma unroll
        for (int s = 0; s < SPLITS; ++s) sum += parts[(s * TOKENS + token) * STRIDE + row];
        if (at.first_row + row < product.n) product.outputs.store(token * product.n, at.first_row + row, sum);
    }
}
