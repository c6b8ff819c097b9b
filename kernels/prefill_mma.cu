// prefill_mma: y [m, n] = x [m, k] @ W [n, k].T for many tokens on tensor cores by mma.sync (sm_80 and later).
//
// A CTA owns STRIPS strips of 64 rows of W and TOKENS tokens. It takes SPLITS spans of K at a time, whose codes, fields
// and x come through a ring of DEPTH stages. A warp owns GROUPS groups of 16 rows and every SPLITS-th span: it decodes
// its weights once, in registers, scale and minimum included, and multiplies them by all tokens. The splits' sums meet
// at the end, in a fixed order. Weights are brought into the range of half by `factor`, undone by `unit` at the end.
// Template: Format, In (half, bf16), Out (float, half, bf16), TOKENS, STRIPS, GROUPS (2, 4), SPLITS, DEPTH.
#include "folded.cuh"
#include "mma.cuh"
#include "pdl.cuh"
#include "ring.cuh"
#include "tile.cuh"

constexpr int ROWS = STRIPS * TILE_ROWS, ROW_WARPS = STRIPS * WARPS / GROUPS, THREADS = 32 * ROW_WARPS * SPLITS;
constexpr int COLUMN_TILES = TOKENS / 8;
constexpr int STORED = TOKENS < 32 ? TOKENS : 32;  // tokens whose sums are in shared memory at a time
constexpr int STRIDE = ROWS + 4;                   // of their sums: rows of g and columns of t fall on different banks

struct Weights {
    SpanOf<WARPS> span;
    Format fields;  // of its tile
};
struct Stage {
    Weights weights[SPLITS][STRIPS];
    In x[SPLITS][TOKENS][SPAN_COLUMNS + 8];  // padded by 16 bytes: the eight rows of an ldmatrix lie on different banks
};
using Parts = float[SPLITS][STORED][STRIDE];

struct Problem {
    i64 n, k, first_row;
    int m, first_token, spans;  // along K
};

// The pieces of 16 bytes that a thread copies in every stage, laid out once: the threads of a unit, one strip of one
// split, take its weights, and all threads in turn those of x.
struct Copies {
    static constexpr int UNITS = SPLITS * STRIPS, OF_UNIT = THREADS / UNITS;
    static constexpr int OF_SPAN = sizeof(SpanOf<WARPS>) / 16, OF_WEIGHTS = sizeof(Weights) / 16;
    static constexpr int OF_ROW = SPAN_COLUMNS * sizeof(In) / 16, OF_X = TOKENS * OF_ROW;
    static_assert(THREADS % OF_X == 0 || OF_X % THREADS == 0, "a turn of all threads copies whole tokens of splits");

    const Tile* strip;
    const In* x;
    i64 k;
    int spans, split_of_weights, piece_of_weights, column, tokens;  // tokens: that are left from this thread's first on
    u32 weights_to, x_to;

    __device__ Copies(Stage& stage, const Tile* tiles, const In* all_x, const Problem& p) : k(p.k) {
        const int unit = threadIdx.x / OF_UNIT, row = threadIdx.x / OF_ROW;
        const i64 first_row = p.first_row + unit % STRIPS * TILE_ROWS;
        strip = tiles + (first_row < p.n ? first_row / TILE_ROWS * (p.spans / SPANS) : 0);
        spans = first_row < p.n ? p.spans : 0;
        split_of_weights = unit / STRIPS;
        piece_of_weights = threadIdx.x % OF_UNIT;
        weights_to = shared_address(&stage.weights[split_of_weights][unit % STRIPS]) + 16 * piece_of_weights;
        tokens = p.m - p.first_token - row % TOKENS;
        column = row / TOKENS * SPAN_COLUMNS + threadIdx.x % OF_ROW * (16 / int(sizeof(In)));
        x = all_x + (p.first_token + row % TOKENS) * p.k + column;
        x_to = shared_address(&stage.x[row / TOKENS][row % TOKENS][column % SPAN_COLUMNS]);
    }
    // Into the stage whose memory starts `at` bytes after the first one's.
    __device__ void weights(int first_span, u32 at) const {
        const int span = first_span + split_of_weights;
        const Tile& tile = strip[span < spans ? span / SPANS : 0];
        const uint4* codes = reinterpret_cast<const uint4*>(&tile.spans[span % SPANS]) + piece_of_weights;
        const uint4* fields = reinterpret_cast<const uint4*>(&tile.fields) - OF_SPAN + piece_of_weights;
#pragma unroll
        for (int i = 0; i < OF_WEIGHTS; i += OF_UNIT)
            if (i + OF_UNIT <= OF_WEIGHTS || i + piece_of_weights < OF_WEIGHTS)
                copy_16(weights_to + at + 16 * i, (i + piece_of_weights < OF_SPAN ? codes : fields) + i, span < spans);
    }
    __device__ void x_of(int first_span, u32 at) const {
        const In* from = x + i64(first_span) * SPAN_COLUMNS;
#pragma unroll
        for (int i = 0; i < SPLITS * OF_X; i += THREADS) {
            const int split = i / OF_X, token = i % OF_X / OF_ROW, ahead = (first_span + split) * SPAN_COLUMNS;
            const bool inside = token < tokens && column + ahead < k;
            copy_16(x_to + at + u32(sizeof(In)) * (split * TOKENS + token) * (SPAN_COLUMNS + 8),
                    inside ? from + token * k + split * SPAN_COLUMNS : x, inside);
        }
    }
};

// Adds the products of a span: `weights` those of its strip, `first` the first of this warp's groups in it.
__device__ inline void multiply(Sums (&sums)[GROUPS][COLUMN_TILES], const Weights& weights,
                                const In (&x)[TOKENS][SPAN_COLUMNS + 8], int span, int first, float factor, int lane) {
    typename Format::Codes codes[GROUPS];
    Folded<In> folded[GROUPS];
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) codes[group] = weights.span.codes(first + group, lane);
#pragma unroll
    for (int step = 0; step < SPAN_STEPS; ++step) {
        Fragment a[GROUPS];
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            if (step % SCALE_STEPS == 0) {
                const int index = span % SPANS * SPAN_SCALES + step / SCALE_STEPS;
                folded[group] = {weights.fields.scale(first + group, lane / 4, index),
                                 weights.fields.minimum(first + group, lane / 4, index), factor};
            }
            a[group] = folded[group].template weights<Format>(codes[group], step);
        }
#pragma unroll
        for (int tokens = 0; tokens < COLUMN_TILES; tokens += 2) {
            u32 b[4];  // columns 0..7, 8..15 of eight tokens, then of the next eight
            const int token = 8 * tokens + lane % 8 + lane / 16 * 8;
            ldmatrix_x4(b, shared_address(&x[token][16 * step + lane / 8 % 2 * 8]));
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int group = 0; group < GROUPS; ++group)
                    mma_m16n8k16<In>(sums[group][tokens + half], a[group], {b[2 * half], b[2 * half + 1]});
        }
    }
}

// STORED tokens at a time: the warps' sums to shared memory, there added up and stored, a row of y at a time.
__device__ inline void store(const Sums (&sums)[GROUPS][COLUMN_TILES], Parts& parts, Out* y, const Problem& p, int row,
                             int split, float unit, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int first = 0; first < TOKENS; first += STORED) {
        __syncthreads();
#pragma unroll
        for (int group = 0; group < GROUPS; ++group)
#pragma unroll
            for (int token = 0; token < STORED; token += 8)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    parts[split][token + 2 * t + i % 2][row + 16 * group + g + i / 2 * 8] =
                        sums[group][(first + token) / 8].sum[i];
        __syncthreads();
        for (int i = threadIdx.x; i < STORED * ROWS; i += THREADS) {
            const int token = i / ROWS, at = i % ROWS;
            float sum = 0;
#pragma unroll
            for (int s = 0; s < SPLITS; ++s) sum += parts[s][token][at];
            if (p.first_token + first + token < p.m && p.first_row + at < p.n)
                y[(p.first_token + first + token) * p.n + p.first_row + at] = from_float<Out>(unit * sum);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prefill_mma(const Tile* __restrict__ tiles, const In* __restrict__ x, Out* __restrict__ y, i64 n, i64 k, int m,
                float factor, float unit) {
    extern __shared__ __align__(128) unsigned char memory[];
    Stage* stages = reinterpret_cast<Stage*>(memory);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int split = warp / ROW_WARPS, group = warp % ROW_WARPS * GROUPS, strip = group / WARPS;
    const int token_tiles = (m + TOKENS - 1) / TOKENS;
    const Problem p = {n,
                       k,
                       i64(blockIdx.x / token_tiles) * ROWS,
                       m,
                       int(blockIdx.x % token_tiles) * TOKENS,
                       int((k + TILE_COLUMNS - 1) / TILE_COLUMNS) * SPANS};
    const int count = (p.spans + SPLITS - 1) / SPLITS;

    // Weights never change: the first stages' are under way before the kernels that write x are done.
    const Copies copies(stages[0], tiles, x, p);
    for (int i = 0; i < DEPTH - 1; ++i) copies.weights(i * SPLITS, i * sizeof(Stage));
    launch_dependents();
    wait_for_predecessors();
    for (int i = 0; i < DEPTH - 1; ++i) {
        copies.x_of(i * SPLITS, i * sizeof(Stage));
        copies_commit();
    }
    Sums sums[GROUPS][COLUMN_TILES] = {};
    for (int i = 0, slot = 0, free = DEPTH - 1; i < count; ++i) {
        copies_wait<DEPTH - 2>();
        __syncthreads();  // stage i is there, and every warp has read the one before
        copies.weights((i + DEPTH - 1) * SPLITS, free * sizeof(Stage));
        copies.x_of((i + DEPTH - 1) * SPLITS, free * sizeof(Stage));
        copies_commit();
        const int span = i * SPLITS + split;
        if (span < p.spans)
            multiply(sums, stages[slot].weights[split][strip], stages[slot].x[split], span, group % WARPS, factor,
                     lane);
        free = slot;
        if (++slot == DEPTH) slot = 0;
    }
    copies_wait<0>();  // the stages' memory serves the sums
    store(sums, *reinterpret_cast<Parts*>(memory), y, p, 16 * group, split, unit, lane);
}
