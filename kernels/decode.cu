// decode: y [m, n] = x [m, k] @ W [n, k].T for few tokens on tensor cores, at the speed of memory.
//
// A CTA owns GROUPS groups of 16 rows of a strip; its SPLITS warps take the strip's tiles in turn, each through a ring
// of its own that no other warp waits for, and add their sums at the end, in a fixed order. Weights are operand A,
// masked out of the codes in shared memory as subnormal halves; tokens are operand B and ride on the barriers of the
// weights. A product with a constant gives sum(x) of a block, for the zero or the minimum; scales multiply the float
// sums of a block.
// Template: Format, In (half, bf16), Out (float, half, bf16), TOKENS (8, 16), GROUPS (1, 2, 4), SPLITS, DEPTH.
#include "pdl.cuh"
#include "ring.cuh"
#include "split.cuh"

constexpr int STEPS = TILE_COLUMNS / 16;
constexpr int BLOCKS = TILE_COLUMNS / Format::BLOCK;
constexpr int PIECES = TILE_COLUMNS * sizeof(In) / 16;  // 16-byte pieces of a token's share of a tile

// What a warp needs for one tile.
struct Stage {
    Slice weights;
    In x[TOKENS][TILE_COLUMNS + 8];  // rows padded by 16 bytes: the eight rows of an ldmatrix lie on different banks
};

// A warp's stream of tiles: number i is tile split + i * SPLITS of the strip.
struct Stream {
    Stage* stages;
    u32 barriers;
    const Format* tiles;
    int first_group;
    const In* x;          // this lane's 16-byte piece of its first token
    i64 token_stride;     // to the lane's next token, 32 / PIECES on
    int column, columns;  // of the piece, within the row
    int token, m;
    u32 to;  // of the piece, within the first stage

    __device__ void init_barriers() const {
        if (elect_one()) {
            for (int slot = 0; slot < DEPTH; ++slot) mbarrier_init(barriers + 8 * slot, 1 + 32);
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        __syncwarp();
    }

    __device__ void load_weights(int i, int slot) const {
        if (elect_one()) {
            const u32 barrier = barriers + 8 * slot;
            mbarrier_expect(barrier, sizeof(Slice));
            stages[slot].weights.copy_from(tiles[i * SPLITS], first_group, [&](void* to, const void* from, u32 bytes) {
                bulk_copy(shared_address(to), from, bytes, barrier);
            });
        }
    }

    __device__ void load_x(int i, int slot) const {
        const int ahead = i * SPLITS * TILE_COLUMNS;
        const bool inside = column + ahead < columns;  // a ragged row ends within its last tile: zeros there
        const In* from = x + ahead;
        const u32 into = to + slot * sizeof(Stage);
#pragma unroll
        for (int j = 0; j < TOKENS * PIECES / 32; ++j)
            if (token + j * (32 / PIECES) < m)
                copy_16(into + j * (32 / PIECES) * sizeof(stages->x[0]), from + j * token_stride, inside);
        mbarrier_arrive_after_copies(barriers + 8 * slot);
    }

    __device__ void wait(int slot, int round) const { mbarrier_wait(barriers + 8 * slot, round & 1); }
};

// Adds a tile's products to the sums.
__device__ inline void multiply(AllSums& sums, const Stage& stage, int lane) {
    constexpr int PER_BLOCK = STEPS / BLOCKS;
    const int g = lane / 4;
    u32 b[STEPS][COLUMN_TILES][2];
#pragma unroll
    for (int tokens = 0; tokens < COLUMN_TILES; ++tokens)
#pragma unroll
        for (int step = 0; step < STEPS; step += 2) {
            u32 rows[4];  // columns 0..7, 8..15, 16..23, 24..31 from step on
            ldmatrix_x4(rows, shared_address(&stage.x[8 * tokens + lane % 8][16 * step + lane / 8 * 8]));
            for (int i = 0; i < 4; ++i) b[step + i / 2][tokens][i % 2] = rows[i];
        }
    // In units of the raw codes: -zero * sum(x) of each block, where a dot product starts, or sum(x) for the minimum.
    Sums starts[BLOCKS][COLUMN_TILES] = {};
    static_assert(!(Format::HAS_MINIMUM && Format::RAW_ZERO), "a format has a zero or a minimum");
    if constexpr (Format::HAS_MINIMUM || Format::RAW_ZERO) {
        const Fragment unit = raw_constant(Format::HAS_MINIMUM ? 1 : -Format::RAW_ZERO, Format::RAW_SHIFT);
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
#pragma unroll
            for (int tokens = 0; tokens < COLUMN_TILES; ++tokens)
                mma_m16n8k16<In>(starts[step / PER_BLOCK][tokens], unit, b[step][tokens]);
    }
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        const auto codes = stage.weights.codes(group, lane);
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            Sums dots[COLUMN_TILES] = {};
            if constexpr (!Format::HAS_MINIMUM)
#pragma unroll
                for (int tokens = 0; tokens < COLUMN_TILES; ++tokens) dots[tokens] = starts[block][tokens];
#pragma unroll
            for (int step = block * PER_BLOCK; step < (block + 1) * PER_BLOCK; ++step) {
                const Fragment a = Format::raw(codes, step);
#pragma unroll
                for (int tokens = 0; tokens < COLUMN_TILES; ++tokens)
                    mma_m16n8k16<In>(dots[tokens], a, b[step][tokens]);
            }
            const float2 d = stage.weights.scale(group, g, block), m = stage.weights.minimum(group, g, block);
#pragma unroll
            for (int tokens = 0; tokens < COLUMN_TILES; ++tokens)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float& sum = sums[group][tokens].sum[i];
                    sum += (i < 2 ? d.x : d.y) * dots[tokens].sum[i];
                    if constexpr (Format::HAS_MINIMUM) sum += (i < 2 ? m.x : m.y) * starts[block][tokens].sum[i];
                }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    decode(const Format* __restrict__ tiles, const In* __restrict__ x, Out* __restrict__ y, i64 n, i64 k, int m) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ unsigned long long barriers[SPLITS][DEPTH];
    const int split = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int along = int((k + TILE_COLUMNS - 1) / TILE_COLUMNS), count = (along - split + SPLITS - 1) / SPLITS;
    const i64 first_row = i64(blockIdx.x) * ROWS;
    const int token = lane / PIECES, piece = lane % PIECES * (16 / int(sizeof(In)));
    Stage* stages = reinterpret_cast<Stage*>(memory) + split * DEPTH;
    const Stream stream = {stages,
                           shared_address(barriers[split]),
                           tiles + first_row / TILE_ROWS * along + split,
                           int(first_row % TILE_ROWS / 16),
                           x + token * k + split * TILE_COLUMNS + piece,
                           32 / PIECES * k,
                           split * TILE_COLUMNS + piece,
                           int(k),
                           token,
                           m,
                           shared_address(&stages->x[token][piece])};
    stream.init_barriers();
    for (int i = 0; i < min(DEPTH, count); ++i) stream.load_weights(i, i);
    launch_dependents();
    wait_for_predecessors();  // the weights never change, x and y may belong to the kernel before
    for (int i = 0; i < min(DEPTH, count); ++i) stream.load_x(i, i);

    AllSums sums = {};
    int slot = 0, round = 0;
    for (int i = 0; i < count; ++i) {
        stream.wait(slot, round);
        multiply(sums, stages[slot], lane);
        __syncwarp();  // every lane has read the slot
        if (i + DEPTH < count) {
            stream.load_weights(i + DEPTH, slot);
            stream.load_x(i + DEPTH, slot);
        }
        if (++slot == DEPTH) slot = 0, ++round;
    }
    __syncthreads();                               // the rings are empty: their memory serves the sums
    const float unit = 1 << Format::RAW_EXPONENT;  // of the raw codes
    reduce_and_store(sums, {unit, unit / (1 << Format::RAW_SHIFT)}, reinterpret_cast<float*>(memory), y, first_row, n,
                     m, split, lane);
}
