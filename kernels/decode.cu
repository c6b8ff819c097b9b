// decode: y [m, n] = x [m, k] @ W [n, k].T for few tokens on tensor cores, at the speed of memory.
//
// A CTA owns GROUPS groups of 16 rows of a strip; its SPLITS warps take the strip's tiles in turn, each through a ring
// of its own, and add their sums at the end, in a fixed order. Weights are operand A, decoded from shared memory to
// registers, tokens are operand B, read from global memory one tile ahead. Levels are exact in half; scales multiply
// the float sums of a block, a minimum the sum of x over the block (a product with ones).
// Template: Format, In (half, bf16), Out (float, half, bf16), TOKENS (8, 16), GROUPS (1, 2, 4), SPLITS, DEPTH.
#include "mma.cuh"
#include "pdl.cuh"
#include "ring.cuh"

using Slice = FormatOf<GROUPS>;

constexpr int THREADS = SPLITS * 32;
constexpr int ROWS = 16 * GROUPS;
constexpr int COLUMN_TILES = TOKENS / 8;
constexpr int STEPS = TILE_COLUMNS / 16;
constexpr int BLOCKS = TILE_COLUMNS / Format::BLOCK;

// A lane's operand B for one tile: column g of each group of 8 tokens.
struct Activations {
    u32 b[STEPS][COLUMN_TILES][2];
};

__device__ inline void load(Activations& into, const In* const (&rows)[COLUMN_TILES], i64 column, i64 k) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int tokens = 0; tokens < COLUMN_TILES; ++tokens) {
            const In* at = rows[tokens] + column + 16 * step;
            const bool inside = column + 16 * step < k;  // a ragged row ends within a tile
            into.b[step][tokens][0] = inside ? *reinterpret_cast<const u32*>(at) : 0;
            into.b[step][tokens][1] = inside ? *reinterpret_cast<const u32*>(at + 8) : 0;
        }
}

__device__ inline void multiply(Sums (&sums)[GROUPS][COLUMN_TILES], const Slice& slice, const Activations& x, int lane) {
    const int g = lane / 4;
    constexpr int PER_BLOCK = STEPS / BLOCKS;
    Sums totals[BLOCKS][COLUMN_TILES] = {};  // the sum of x over each block, in every row
    if constexpr (Format::HAS_MINIMUM) {
        const half2 one = __float2half2_rn(1.0f);
        const Fragment ones = {one, one, one, one};
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
#pragma unroll
            for (int tokens = 0; tokens < COLUMN_TILES; ++tokens)
                mma_m16n8k16<In>(totals[step / PER_BLOCK][tokens], ones, x.b[step][tokens]);
    }
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        const auto codes = slice.codes(group, lane);
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            Sums dots[COLUMN_TILES] = {};
#pragma unroll
            for (int step = block * PER_BLOCK; step < (block + 1) * PER_BLOCK; ++step) {
                const Fragment a = Format::fragment(codes, step);
#pragma unroll
                for (int tokens = 0; tokens < COLUMN_TILES; ++tokens)
                    mma_m16n8k16<In>(dots[tokens], a, x.b[step][tokens]);
            }
            const float2 d = slice.scale(group, g, block), m = slice.minimum(group, g, block);
#pragma unroll
            for (int tokens = 0; tokens < COLUMN_TILES; ++tokens)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float& sum = sums[group][tokens].sum[i];
                    sum += (i < 2 ? d.x : d.y) * dots[tokens].sum[i];
                    if constexpr (Format::HAS_MINIMUM) sum += (i < 2 ? m.x : m.y) * totals[block][tokens].sum[i];
                }
        }
    }
}

// The warps' sums, added in their order -> y.
__device__ inline void reduce_and_store(const Sums (&sums)[GROUPS][COLUMN_TILES], float* parts, Out* y, i64 first_row,
                                        i64 n, int m, int split, int lane) {
    constexpr int STRIDE = ROWS + 4;  // rows of g and columns of t fall on different banks
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int group = 0; group < GROUPS; ++group)
#pragma unroll
        for (int tokens = 0; tokens < COLUMN_TILES; ++tokens)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = 16 * group + g + 8 * (i / 2), token = 8 * tokens + 2 * t + i % 2;
                if (token < m) parts[(split * TOKENS + token) * STRIDE + row] = sums[group][tokens].sum[i];
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

extern "C" __global__ void __launch_bounds__(THREADS)
    decode(const Format* __restrict__ tiles, const In* __restrict__ x, Out* __restrict__ y, i64 n, i64 k, int m) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ unsigned long long barriers[SPLITS][DEPTH];
    const int split = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int along = int((k + TILE_COLUMNS - 1) / TILE_COLUMNS);
    const i64 first_row = i64(blockIdx.x) * ROWS;
    const Format* strip = tiles + first_row / TILE_ROWS * along + split;
    const int first_group = first_row % TILE_ROWS / 16;
    const int count = (along - split + SPLITS - 1) / SPLITS;

    Ring<Slice, DEPTH> ring(memory + split * DEPTH * sizeof(Slice), barriers[split]);
    for (int i = 0; i < min(DEPTH, count); ++i) ring.fill(i, strip[i * SPLITS], first_group);
    launch_dependents();
    wait_for_predecessors();  // the weights never change, x and y may belong to the kernel before

    const In* rows[COLUMN_TILES];
#pragma unroll
    for (int tokens = 0; tokens < COLUMN_TILES; ++tokens) {
        const int token = 8 * tokens + lane / 4;  // tokens beyond m read row 0 and are not stored
        rows[tokens] = x + (token < m ? token : 0) * k + 2 * (lane % 4);
    }
    Sums sums[GROUPS][COLUMN_TILES] = {};
    Activations now, next = {};
    if (count > 0) load(now, rows, split * TILE_COLUMNS, k);
    int slot = 0, round = 0;
    for (int i = 0; i < count; ++i) {
        if (i + 1 < count) load(next, rows, i64(split + (i + 1) * SPLITS) * TILE_COLUMNS, k);
        multiply(sums, ring.wait(slot, round), now, lane);
        __syncwarp();  // every lane has read the slot
        if (i + DEPTH < count) ring.fill(slot, strip[(i + DEPTH) * SPLITS], first_group);
        if (++slot == DEPTH) slot = 0, ++round;
        now = next;
    }
    __syncthreads();  // the rings are empty: their memory serves the sums
    reduce_and_store(sums, reinterpret_cast<float*>(memory), y, first_row, n, m, split, lane);
}
