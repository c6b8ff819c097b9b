// decode: y [m, n] = x [m, k] @ W [n, k].T for few tokens on tensor cores, at the speed of memory.
//
// A CTA owns GROUPS groups of 16 rows of a strip; its SPLITS warps take the strip's tiles in turn, each span by span
// through a ring of its own that no other warp waits for, and add their sums at the end, in a fixed order. Weights are
// operand A, masked out of the codes in shared memory as subnormal halves; tokens are operand B and ride on the
// barriers of the weights. A product with a constant gives sum(x) where a scale is shared, for the zero or the minimum;
// scales multiply the float sums.
// Template: Format, In (half, bf16), Out (float, half, bf16), TOKENS (8, 16), GROUPS (1, 2, 4), SPLITS, DEPTH.
#include "mma.cuh"
#include "pdl.cuh"
#include "ring.cuh"
#include "tile.cuh"

constexpr int THREADS = SPLITS * 32;
constexpr int ROWS = 16 * GROUPS;
constexpr int COLUMN_TILES = TOKENS / 8;
constexpr int PIECES = SPAN_COLUMNS * sizeof(In) / 16;  // 16-byte pieces of a token's share of a span

using Span = SpanOf<GROUPS>;
using Fields = FormatOf<GROUPS>;
using X = In[TOKENS][SPAN_COLUMNS + 8];  // rows padded by 16 bytes: the eight of an ldmatrix lie on different banks

// The memory of a warp: what it needs for DEPTH spans. The fields of a tile come with its first span and stay until
// its last.
template <int SPANS>
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
template <>
struct RingOf<1> {
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

using Ring = RingOf<SPANS>;

// A warp's stream of spans: number i belongs to tile split + i / SPANS * SPLITS of the strip.
struct Stream {
    Ring* ring;
    u32 barriers;
    const Tile* tiles;
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
            mbarrier_expect(barrier, Ring::bytes(i));
            ring->load(tiles[i / SPANS * SPLITS], i, slot, first_group, [&](void* to, const void* from, u32 bytes) {
                bulk_copy(shared_address(to), from, bytes, barrier);
            });
        }
    }

    __device__ void load_x(int i, int slot) const {
        const int ahead = i / SPANS * SPLITS * TILE_COLUMNS + i % SPANS * SPAN_COLUMNS;
        const bool inside = column + ahead < columns;  // a ragged row ends within its last tile: zeros there
        const In* from = x + ahead;
        const u32 into = to + slot * sizeof(Ring::Stage);
#pragma unroll
        for (int j = 0; j < TOKENS * PIECES / 32; ++j)
            if (token + j * (32 / PIECES) < m)
                copy_16(into + j * (32 / PIECES) * sizeof(X) / TOKENS, from + j * token_stride, inside);
        mbarrier_arrive_after_copies(barriers + 8 * slot);
    }

    __device__ void wait(int slot, int round) const { mbarrier_wait(barriers + 8 * slot, round & 1); }
};

// Adds a span's products to the sums.
__device__ inline void multiply(Sums (&sums)[GROUPS][COLUMN_TILES], const Span& weights, const X& x,
                                const Fields& fields, int span, int lane) {
    const int g = lane / 4;
    u32 b[SPAN_STEPS][COLUMN_TILES][2];
#pragma unroll
    for (int tokens = 0; tokens < COLUMN_TILES; ++tokens)
#pragma unroll
        for (int step = 0; step < SPAN_STEPS; step += 2) {
            u32 rows[4];  // columns 0..7, 8..15, 16..23, 24..31 from step on
            ldmatrix_x4(rows, shared_address(&x[8 * tokens + lane % 8][16 * step + lane / 8 * 8]));
            for (int i = 0; i < 4; ++i) b[step + i / 2][tokens][i % 2] = rows[i];
        }
    // In units of the raw codes: -zero * sum(x) for each scale, where a dot product starts, or sum(x) for the minimum.
    Sums starts[SPAN_SCALES][COLUMN_TILES] = {};
    static_assert(!(Format::HAS_MINIMUM && Format::RAW_ZERO), "a format has a zero or a minimum");
    if constexpr (Format::HAS_MINIMUM || Format::RAW_ZERO) {
        const Fragment unit = raw_constant(Format::HAS_MINIMUM ? 1 : -Format::RAW_ZERO, Format::RAW_SHIFT);
#pragma unroll
        for (int step = 0; step < SPAN_STEPS; ++step)
#pragma unroll
            for (int tokens = 0; tokens < COLUMN_TILES; ++tokens)
                mma_m16n8k16<In>(starts[step / SCALE_STEPS][tokens], unit, b[step][tokens]);
    }
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        const auto codes = weights.codes(group, lane);
#pragma unroll
        for (int part = 0; part < SPAN_SCALES; ++part) {
            Sums dots[COLUMN_TILES] = {};
            if constexpr (!Format::HAS_MINIMUM)
#pragma unroll
                for (int tokens = 0; tokens < COLUMN_TILES; ++tokens) dots[tokens] = starts[part][tokens];
#pragma unroll
            for (int step = part * SCALE_STEPS; step < (part + 1) * SCALE_STEPS; ++step) {
                const Fragment a = Format::raw(codes, step);
#pragma unroll
                for (int tokens = 0; tokens < COLUMN_TILES; ++tokens)
                    mma_m16n8k16<In>(dots[tokens], a, b[step][tokens]);
            }
            const int index = span * SPAN_SCALES + part;
            const float2 d = fields.scale(group, g, index), m = fields.minimum(group, g, index);
#pragma unroll
            for (int tokens = 0; tokens < COLUMN_TILES; ++tokens)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float& sum = sums[group][tokens].sum[i];
                    sum += (i < 2 ? d.x : d.y) * dots[tokens].sum[i];
                    if constexpr (Format::HAS_MINIMUM) sum += (i < 2 ? m.x : m.y) * starts[part][tokens].sum[i];
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
                const float unit = 1 << Format::RAW_EXPONENT - (i < 2 ? 0 : Format::RAW_SHIFT);  // of the raw codes
                if (token < m) parts[(split * TOKENS + token) * STRIDE + row] = unit * sums[group][tokens].sum[i];
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
    decode(const Tile* __restrict__ tiles, const In* __restrict__ x, Out* __restrict__ y, i64 n, i64 k, int m) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ unsigned long long barriers[SPLITS][DEPTH];
    const int split = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int along = int((k + TILE_COLUMNS - 1) / TILE_COLUMNS);
    const int count = (along - split + SPLITS - 1) / SPLITS * SPANS;
    const i64 first_row = i64(blockIdx.x) * ROWS;
    const int token = lane / PIECES, piece = lane % PIECES * (16 / int(sizeof(In)));
    Ring* ring = reinterpret_cast<Ring*>(memory) + split;
    const Stream stream = {ring,
                           shared_address(barriers[split]),
                           tiles + first_row / TILE_ROWS * along + split,
                           int(first_row % TILE_ROWS / 16),
                           x + token * k + split * TILE_COLUMNS + piece,
                           32 / PIECES * k,
                           split * TILE_COLUMNS + piece,
                           int(k),
                           token,
                           m,
                           shared_address(&ring->stages->x[token][piece])};
    stream.init_barriers();
    for (int i = 0; i < min(DEPTH, count); ++i) stream.load_weights(i, i);
    launch_dependents();
    wait_for_predecessors();  // the weights never change, x and y may belong to the kernel before
    for (int i = 0; i < min(DEPTH, count); ++i) stream.load_x(i, i);

    Sums sums[GROUPS][COLUMN_TILES] = {};
    int slot = 0, round = 0;
    for (int i = 0; i < count; ++i) {
        stream.wait(slot, round);
        multiply(sums, ring->stages[slot].weights, ring->stages[slot].x, ring->fields(i, slot), i % SPANS, lane);
        __syncwarp();  // every lane has read the slot
        if (i + DEPTH < count) {
            stream.load_weights(i + DEPTH, slot);
            stream.load_x(i + DEPTH, slot);
        }
        if (++slot == DEPTH) slot = 0, ++round;
    }
    __syncthreads();  // the rings are empty: their memory serves the sums
    reduce_and_store(sums, reinterpret_cast<float*>(memory), y, first_row, n, m, split, lane);
}
