// prefill_mma: y [m, n] = x [m, k] @ W [n, k].T for many tokens on tensor cores by mma.sync (sm_80 and later).
//
// A CTA owns STRIPS strips of 64 rows of W, TOKENS tokens and one of `slices` slices of K. It takes SPLITS spans at a
// time, whose codes, fields and x come through a ring of DEPTH stages. A warp owns GROUPS groups of 16 rows and one of
// the SPLITS spans: it decodes its weights in registers, scale and minimum included, and reads x, both ahead of the
// tensor cores. The sums of splits and slices meet at the end, in a fixed order. Weights are brought into the range of
// half by `factor`, undone by `unit` at the end.
// Template: Format, In (half, bf16), Out (float, half, bf16), TOKENS, STRIPS, GROUPS (2, 4), SPLITS, DEPTH (at least 3),
// MOST_SLICES.
#include "folded.cuh"
#include "mma.cuh"
#include "pdl.cuh"
#include "ring.cuh"
#include "tile.cuh"

constexpr int ROWS = STRIPS * TILE_ROWS, ROW_WARPS = STRIPS * WARPS / GROUPS, THREADS = 32 * ROW_WARPS * SPLITS;
constexpr int COLUMN_TILES = TOKENS / 8;
constexpr int STORED = TOKENS < 32 ? TOKENS : 32;           // tokens whose sums are in shared memory at a time
constexpr int STRIDE = ROWS + 4;                            // rows of g and columns of t fall on different banks
constexpr int X_STRIDE = SPAN_COLUMNS + 8;                  // so do the eight rows of an ldmatrix
constexpr int BATCH = COLUMN_TILES < 8 ? COLUMN_TILES : 8;  // column tiles whose x is read at a time
constexpr int BATCHES = SPAN_STEPS * COLUMN_TILES / BATCH;  // of a span

struct Weights {
    SpanOf<WARPS> span;
    Format fields;  // of its tile
};
struct Stage {
    Weights weights[SPLITS][STRIPS];
    In x[SPLITS][TOKENS][X_STRIDE];
};
using Stored = float[SPLITS][STORED][STRIDE];
using AllSums = Sums[GROUPS][COLUMN_TILES];

struct Problem {
    i64 n, k, first_row;
    int m, first_token;
    int spans, first, end;  // along K; of this slice, in units of SPLITS spans
};

// The pieces of 16 bytes that a thread copies for every stage: the threads of a unit, one strip of one split, take its
// weights, and all threads in turn those of x.
struct Copies {
    static constexpr int OF_UNIT = THREADS / (SPLITS * STRIPS);
    static constexpr int OF_SPAN = sizeof(SpanOf<WARPS>) / 16, OF_WEIGHTS = sizeof(Weights) / 16;
    static constexpr int OF_ROW = SPAN_COLUMNS * sizeof(In) / 16, OF_X = TOKENS * OF_ROW;
    static_assert(THREADS % OF_X == 0 || OF_X % THREADS == 0, "a turn of all threads copies whole splits, or a part");

    const Tile* strip;
    int span, spans, piece;  // of this thread's unit
    const In* x;
    int k, columns, tokens;  // that are left from this thread's first piece on
    u32 weights_to, x_to;

    __device__ Copies(Stage& stage, const Tile* tiles, const In* all_x, const Problem& p) : k(p.k) {
        const int unit = threadIdx.x / OF_UNIT, row = threadIdx.x / OF_ROW;
        const i64 first_row = p.first_row + unit % STRIPS * TILE_ROWS;
        strip = tiles + (first_row < p.n ? first_row / TILE_ROWS * (p.spans / SPANS) : 0);
        spans = first_row < p.n ? min(p.spans, p.end * SPLITS) : 0;
        const int split = unit / STRIPS;
        span = p.first * SPLITS + split;
        piece = threadIdx.x % OF_UNIT;
        weights_to = shared_address(&stage.weights[split][unit % STRIPS]) + 16 * piece;
        const int in_row = threadIdx.x % OF_ROW * (16 / int(sizeof(In)));
        const i64 column = i64(p.first * SPLITS + row / TOKENS) * SPAN_COLUMNS + in_row;
        columns = int(min(p.k, i64(p.end) * SPLITS * SPAN_COLUMNS) - column);
        tokens = row < SPLITS * TOKENS ? p.m - p.first_token - row % TOKENS : 0;
        x = all_x + (p.first_token + row % TOKENS) * p.k + column;
        x_to = shared_address(&stage.x[row / TOKENS][row % TOKENS][in_row]);
    }
    // The next stage's, into the memory that starts `at` bytes after the first stage's. Beyond the slice there are zeros.
    __device__ void weights(u32 at) {
        const Tile& tile = strip[span / SPANS];
        const uint4* codes = reinterpret_cast<const uint4*>(&tile.spans[span % SPANS]) + piece;
        const uint4* fields = reinterpret_cast<const uint4*>(&tile.fields) - OF_SPAN + piece;
#pragma unroll
        for (int i = 0; i < OF_WEIGHTS; i += OF_UNIT)
            if (i + OF_UNIT <= OF_WEIGHTS || i + piece < OF_WEIGHTS)
                copy_16(weights_to + at + 16 * i, (SPANS == 1 || i + piece < OF_SPAN ? codes : fields) + i,
                        span < spans);
        span += SPLITS;
    }
    __device__ void activations(u32 at) {
#pragma unroll
        for (int i = 0; i < SPLITS * OF_X; i += THREADS) {
            const int split = i / OF_X, token = i % OF_X / OF_ROW;
            if (token < tokens)  // the others' products are not stored
                copy_16(x_to + at + u32(sizeof(In)) * (split * TOKENS + token) * X_STRIDE,
                        x + i64(token) * k + split * SPAN_COLUMNS, split * SPAN_COLUMNS < columns);
        }
        x += SPLITS * SPAN_COLUMNS;
        columns -= SPLITS * SPAN_COLUMNS;
    }
};

// A warp's weights, step by step.
struct Decoder {
    typename Format::Codes codes[GROUPS];
    Folded<In> folded[GROUPS];
    int first, lane;  // first: of its groups, within the strip
    float factor;

    __device__ void decode(Fragment (&a)[GROUPS], const Weights& weights, int span, int step) {
        if (step == 0)
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) codes[group] = weights.span.codes(first + group, lane);
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            if (step % SCALE_STEPS == 0) {
                const int index = span % SPANS * SPAN_SCALES + step / SCALE_STEPS;
                folded[group] = {weights.fields.scale(first + group, lane / 4, index),
                                 weights.fields.minimum(first + group, lane / 4, index), factor};
            }
            a[group] = folded[group].template weights<Format>(codes[group], step);
        }
    }
};

// This lane's share of x for BATCH column tiles of a step: columns 0..7, 8..15 of eight tokens, then of the next eight.
using Batch = u32[BATCH / 2][4];

// Batch `i` of a span; x: this lane's row of the first ldmatrix.
__device__ inline void load_batch(Batch& b, u32 x, int i) {
    const int step = i * BATCH / COLUMN_TILES, first = i * BATCH % COLUMN_TILES;
#pragma unroll
    for (int pair = 0; pair < BATCH / 2; ++pair)
        ldmatrix_x4(b[pair], x + u32(sizeof(In)) * (8 * (first + 2 * pair) * X_STRIDE + 16 * step));
}

__device__ inline void multiply(AllSums& sums, const Fragment (&a)[GROUPS], const Batch& b, int i) {
    const int first = i * BATCH % COLUMN_TILES;
#pragma unroll
    for (int tile = 0; tile < BATCH; ++tile)
#pragma unroll
        for (int group = 0; group < GROUPS; ++group)
            mma_m16n8k16<In>(sums[group][first + tile], a[group],
                             {b[tile / 2][tile % 2 * 2], b[tile / 2][tile % 2 * 2 + 1]});
}

// The sums of a tile's slices, which the last of its CTAs adds up. Counters are zero before and after.
struct Slices {
    float4* sums;   // [tile][slice][GROUPS * COLUMN_TILES][THREADS]
    u32* counters;  // [tile]
    int count;

    // True in the CTA that is to go on, with the sums of all.
    __device__ bool add(AllSums& mine, int tile, int slice) const {
        constexpr int PARTS = GROUPS * COLUMN_TILES;
        float4* first = sums + i64(tile) * count * PARTS * THREADS + threadIdx.x;
        float4* own = first + slice * PARTS * THREADS;
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            const float (&sum)[4] = mine[i / COLUMN_TILES][i % COLUMN_TILES].sum;
            own[i * THREADS] = {sum[0], sum[1], sum[2], sum[3]};
        }
        __shared__ bool last;
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            last = atomicAdd(&counters[tile], 1) == count - 1;
            if (last) counters[tile] = 0;
        }
        __syncthreads();
        if (!last) return false;
        __threadfence();
        // The loads of a batch do not wait for each other.
        constexpr int AT_ONCE = PARTS < 4 ? PARTS : 4;
#pragma unroll
        for (int part = 0; part < PARTS; part += AT_ONCE) {
            float4 of[MOST_SLICES][AT_ONCE];
#pragma unroll
            for (int s = 0; s < MOST_SLICES; ++s)
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i)
                    of[s][i] = s < count ? __ldcg(&first[(s * PARTS + part + i) * THREADS]) : float4{};
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                float (&sum)[4] = mine[(part + i) / COLUMN_TILES][(part + i) % COLUMN_TILES].sum;
                sum[0] = sum[1] = sum[2] = sum[3] = 0;
#pragma unroll
                for (int s = 0; s < MOST_SLICES; ++s)
                    sum[0] += of[s][i].x, sum[1] += of[s][i].y, sum[2] += of[s][i].z, sum[3] += of[s][i].w;
            }
        }
        return true;
    }
};

// The warps' sums to shared memory, STORED tokens at a time; there the splits' are added up and stored.
__device__ inline void store(const AllSums& sums, Stored& stored, Out* y, const Problem& p, int first_row, int split,
                             float unit, int lane) {
    static_assert(THREADS % ROWS == 0, "a thread stores one row of W");
    const int g = lane / 4, t = lane % 4, row = threadIdx.x % ROWS;
    y += p.first_token * p.n + p.first_row + row;
#pragma unroll
    for (int first = 0; first < TOKENS; first += STORED) {
        __syncthreads();
#pragma unroll
        for (int group = 0; group < GROUPS; ++group)
#pragma unroll
            for (int token = 0; token < STORED; token += 8)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    stored[split][token + 2 * t + i % 2][first_row + 16 * group + g + i / 2 * 8] =
                        sums[group][(first + token) / 8].sum[i];
        __syncthreads();
        const int end = min(STORED, p.m - p.first_token - first);
        if (p.first_row + row < p.n)
            for (int token = threadIdx.x / ROWS; token < end; token += THREADS / ROWS) {
                float sum = 0;
#pragma unroll
                for (int s = 0; s < SPLITS; ++s) sum += stored[s][token][row];
                y[(first + token) * p.n] = from_float<Out>(unit * sum);
            }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prefill_mma(const Tile* __restrict__ tiles, const In* __restrict__ x, Out* __restrict__ y, float4* slice_sums,
                u32* counters, i64 n, i64 k, int m, int slices, float factor, float unit) {
    extern __shared__ __align__(128) unsigned char memory[];
    Stage* stages = reinterpret_cast<Stage*>(memory + Format::TABLE_BYTES);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int split = warp / ROW_WARPS, first_group = warp % ROW_WARPS * GROUPS;
    const int tile = blockIdx.x / slices, slice = blockIdx.x % slices, token_tiles = (m + TOKENS - 1) / TOKENS;
    Problem p = {n, k, i64(tile / token_tiles) * ROWS, m, tile % token_tiles * TOKENS};
    p.spans = int((k + TILE_COLUMNS - 1) / TILE_COLUMNS) * SPANS;
    const i64 turns = (p.spans + SPLITS - 1) / SPLITS;
    p.first = int(turns * slice / slices), p.end = int(turns * (slice + 1) / slices);

    // Weights never change: the first are under way before the kernels that write x are done.
    constexpr int EARLY = 2;
    Copies copies(stages[0], tiles, x, p);
    for (int i = 0; i < EARLY; ++i) copies.weights(i * sizeof(Stage));
    fill_table<Format, half, THREADS>(Format::RAW_EXPONENT);
    launch_dependents();
    wait_for_predecessors();
    for (int i = 0; i < DEPTH - 1; ++i) {
        if (i >= EARLY) copies.weights(i * sizeof(Stage));
        copies.activations(i * sizeof(Stage));
        copies_commit();
    }

    AllSums sums = {};
    Decoder decoder;
    decoder.first = first_group % WARPS, decoder.lane = lane, decoder.factor = factor;
    const auto weights = [&](int slot) -> const Weights& { return stages[slot].weights[split][first_group / WARPS]; };
    const u32 first_x = shared_address(&stages[0].x[split][lane % 8 + lane / 16 * 8][lane / 8 % 2 * 8]);
    const auto x_of = [&](int slot) { return first_x + slot * u32(sizeof(Stage)); };
    Fragment a[2][GROUPS];
    Batch b[2];
    copies_wait<DEPTH - 2>();
    __syncthreads();
    decoder.decode(a[0], weights(0), p.first * SPLITS + split, 0);
    load_batch(b[0], x_of(0), 0);
    int slot = 0, free = DEPTH - 1;
    for (int turn = p.first; turn < p.end; ++turn) {
        const int next = slot + 1 < DEPTH ? slot + 1 : 0, span = turn * SPLITS + split;
#pragma unroll
        for (int i = 0; i < BATCHES; ++i) {
            const int step = i * BATCH / COLUMN_TILES;
            if (i == BATCHES / 2) {
                copies_wait<DEPTH - 3>();
                __syncthreads();  // the next stage is there, and every warp has read the one before
                copies.weights(free * sizeof(Stage));
                copies.activations(free * sizeof(Stage));
                copies_commit();
            }
            if (i + 1 < BATCHES)
                load_batch(b[(i + 1) % 2], x_of(slot), i + 1);
            else
                load_batch(b[0], x_of(next), 0);
            if (i * BATCH % COLUMN_TILES == 0) {
                if (step + 1 < SPAN_STEPS)
                    decoder.decode(a[(step + 1) % 2], weights(slot), span, step + 1);
                else
                    decoder.decode(a[0], weights(next), span + SPLITS, 0);
            }
            multiply(sums, a[step % 2], b[i % 2], i);
        }
        free = slot;
        slot = next;
    }
    copies_wait<0>();  // the stages' memory serves the sums
    if (slices > 1 && !Slices{slice_sums, counters, slices}.add(sums, tile, slice)) return;
    store(sums, *reinterpret_cast<Stored*>(memory), y, p, 16 * first_group, split, unit, lane);
}
