// prefill_sm80: y [m, n] = x [m, k] @ W [n, k].T for many tokens on tensor cores by mma.sync (sm_80 and later).
//
// A CTA and its stages are those of sm80_tile.cuh. A warp decodes its weights in registers, scale and minimum included,
// and reads x, both ahead of the tensor cores. Weights are brought into the range of half by `factor`, undone by `unit`
// at the end.
// Template: Format, In (half, bf16), Out (float, half, bf16), TOKENS, ROW_BLOCKS, M16_TILES (2, 4), WARP_SPLIT_K,
// STAGES (at least 3), MAX_SPLIT_K.
#include "sm80_tile.cuh"
#include "scaled_weights.cuh"

constexpr int BATCH = COLUMN_TILES < 8 ? COLUMN_TILES : 8;     // column tiles whose x is read at a time
constexpr int BATCHES = K_BLOCK_STEPS * COLUMN_TILES / BATCH;  // of a k_block

using X = In[K_BLOCK + 8];  // the eight rows of an ldmatrix fall on different banks
using Stage = StageOf<X>;
constexpr u32 X_BYTES = sizeof(X);

// The chunks of x: all threads in turn copy those of a row.
struct XCopies {
    static constexpr int OF_ROW = K_BLOCK * sizeof(In) / 16, CHUNKS = TOKENS * OF_ROW;
    static_assert(THREADS % CHUNKS == 0 || CHUNKS % THREADS == 0,
                  "a k_iter of all threads copies whole splits, or a part");

    const In* x;
    int k, columns, tokens;  // that are left from this thread's first chunk on
    u32 to;

    __device__ XCopies(X (&stage)[WARP_SPLIT_K][TOKENS], const In* all_x, const Problem& p) : k(p.k) {
        const int row = threadIdx.x / OF_ROW, in_row = threadIdx.x % OF_ROW * (16 / int(sizeof(In)));
        const i64 column = i64(p.first * WARP_SPLIT_K + row / TOKENS) * K_BLOCK + in_row;
        columns = int(min(p.k, i64(p.end) * WARP_SPLIT_K * K_BLOCK) - column);
        tokens = row < WARP_SPLIT_K * TOKENS ? p.m - p.first_token - row % TOKENS : 0;
        x = all_x + (p.first_token + row % TOKENS) * p.k + column;
        to = shared_address(&stage[row / TOKENS][row % TOKENS][in_row]);
    }
    // The next stage's, `at` bytes after the first stage's; beyond the slice zeros.
    __device__ void operator()(u32 at) {
#pragma unroll
        for (int i = 0; i < WARP_SPLIT_K * CHUNKS; i += THREADS) {
            const int warp_k = i / CHUNKS, token = i % CHUNKS / OF_ROW;
            if (token < tokens)  // the others' products are not stored
                cp_async_16(to + at + X_BYTES * (warp_k * TOKENS + token), x + i64(token) * k + warp_k * K_BLOCK,
                            warp_k * K_BLOCK < columns);
        }
        x += WARP_SPLIT_K * K_BLOCK;
        columns -= WARP_SPLIT_K * K_BLOCK;
    }
};

// A warp's weights, step by step.
struct Decoder {
    typename Format::Codes codes[M16_TILES];
    ScaledWeights<In> scaled_weights[M16_TILES];
    int first, lane;  // first: of its groups, within the row_block
    float factor;

    __device__ void decode(Fragment (&a)[M16_TILES], const Weights& weights, int k_block, int step) {
        if (step == 0)
#pragma unroll
            for (int m16 = 0; m16 < M16_TILES; ++m16) codes[m16] = weights.k_block.codes(first + m16, lane);
#pragma unroll
        for (int m16 = 0; m16 < M16_TILES; ++m16) {
            if (step % SCALE_STEPS == 0) {
                const int index = k_block % K_BLOCKS * K_BLOCK_SCALES + step / SCALE_STEPS;
                scaled_weights[m16] = {weights.fields.scale(first + m16, lane / 4, index),
                                       weights.fields.minimum(first + m16, lane / 4, index), factor};
            }
            a[m16] = scaled_weights[m16].template weights<Format>(codes[m16], step);
        }
    }
};

// This lane's share of x for BATCH column tiles of a step: columns 0..7, 8..15 of eight tokens, then of the next eight.
using Batch = u32[BATCH / 2][4];

// Batch `i` of a k_block; x: this lane's row of the first ldmatrix.
__device__ inline void load_batch(Batch& b, u32 x, int i) {
    const int step = i * BATCH / COLUMN_TILES, first = i * BATCH % COLUMN_TILES;
#pragma unroll
    for (int pair = 0; pair < BATCH / 2; ++pair)
        ldmatrix_x4(b[pair], x + X_BYTES * 8 * (first + 2 * pair) + u32(sizeof(In)) * 16 * step);
}

__device__ inline void multiply(WarpAcc& acc, const Fragment (&a)[M16_TILES], const Batch& b, int i) {
    const int first = i * BATCH % COLUMN_TILES;
#pragma unroll
    for (int tile = 0; tile < BATCH; ++tile)
#pragma unroll
        for (int m16 = 0; m16 < M16_TILES; ++m16)
            mma_m16n8k16<In>(acc[m16][first + tile], a[m16],
                             {b[tile / 2][tile % 2 * 2], b[tile / 2][tile % 2 * 2 + 1]});
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prefill_sm80(const Tile* __restrict__ tiles, const In* __restrict__ x, Out* __restrict__ y, float4* partials,
                 u32* counters, i64 n, i64 k, int m, int split_k, float factor, float unit) {
    extern __shared__ __align__(128) unsigned char memory[];
    Stage* stages = reinterpret_cast<Stage*>(memory + Format::TABLE_BYTES);
    const WarpCoord coord;
    const Problem p(n, k, m, split_k);
    WeightCopies weight_copies(stages[0].weights, tiles, p);
    XCopies x_copies(stages[0].x, x, p);
    fill_stages(weight_copies, x_copies, sizeof(Stage),
                [] { share_table<Format, half, THREADS>(Format::CODE_EXPONENT); });

    WarpAcc acc = {};
    Decoder decoder;
    decoder.first = coord.first_m16 % WARPS, decoder.lane = coord.lane, decoder.factor = factor;
    const auto weights = [&](int stage) -> const Weights& { return coord.weights(stages[stage]); };
    const u32 first_x =
        shared_address(&stages[0].x[coord.warp_k][coord.lane % 8 + coord.lane / 16 * 8][coord.lane / 8 % 2 * 8]);
    const auto x_of = [&](int stage) { return first_x + stage * u32(sizeof(Stage)); };
    Fragment a[2][M16_TILES];
    Batch b[2];
    cp_async_wait<STAGES - 2>();
    __syncthreads();
    decoder.decode(a[0], weights(0), p.first * WARP_SPLIT_K + coord.warp_k, 0);
    load_batch(b[0], x_of(0), 0);
    int stage = 0, free = STAGES - 1;
    for (int k_iter = p.first; k_iter < p.end; ++k_iter) {
        const int next = stage + 1 < STAGES ? stage + 1 : 0, k_block = k_iter * WARP_SPLIT_K + coord.warp_k;
#pragma unroll
        for (int i = 0; i < BATCHES; ++i) {
            const int step = i * BATCH / COLUMN_TILES;
            if (i == BATCHES / 2) {
                cp_async_wait<STAGES - 3>();
                __syncthreads();  // the next stage is there, and every warp has read the one before
                weight_copies(free * sizeof(Stage));
                x_copies(free * sizeof(Stage));
                cp_async_commit();
            }
            if (i + 1 < BATCHES)
                load_batch(b[(i + 1) % 2], x_of(stage), i + 1);
            else
                load_batch(b[0], x_of(next), 0);
            if (i * BATCH % COLUMN_TILES == 0) {
                if (step + 1 < K_BLOCK_STEPS)
                    decoder.decode(a[(step + 1) % 2], weights(stage), k_block, step + 1);
                else
                    decoder.decode(a[0], weights(next), k_block + WARP_SPLIT_K, 0);
            }
            multiply(acc, a[step % 2], b[i % 2], i);
        }
        free = stage;
        stage = next;
    }
    cp_async_wait<0>();  // the stages' memory serves the sums
    if (split_k > 1 && !SplitK{partials, counters, split_k}.add(acc, p)) return;
    store(acc, *reinterpret_cast<Stored*>(memory), y, p, coord, unit);
}
