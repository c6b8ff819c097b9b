// A CTA that owns ROW_BLOCKS row_blocks of 64 rows of W, TOKENS tokens and one of `split_k` split_k of K: how the mma
// kernels for many tokens cut y, fill their stages and add up. WARP_SPLIT_K k_blocks at a time come through a pipeline
// of STAGES stages, with codes, fields and x; a warp owns M16_TILES groups of 16 rows and one of the WARP_SPLIT_K
// k_blocks. The sums of splits and split_k meet at the end, in a fixed order.
#pragma once

#include "mma.cuh"
#include "griddepcontrol.cuh"
#include "pipeline.cuh"
#include "tile.cuh"

constexpr int ROWS = ROW_BLOCKS * TILE_ROWS, ROW_WARPS = ROW_BLOCKS * WARPS / M16_TILES,
              THREADS = 32 * ROW_WARPS * WARP_SPLIT_K;
constexpr int COLUMN_TILES = TOKENS / 8;
constexpr int STORED = TOKENS < 32 ? TOKENS : 32;  // tokens whose sums are in shared memory at a time
constexpr int STRIDE = ROWS + 4;                   // rows of g and columns of t fall on different banks

struct Weights {
    KBlockOf<WARPS> k_block;
    Format fields;  // of its tile
};
// X: a token's share of a k_block of x.
template <class X>
struct StageOf {
    Weights weights[WARP_SPLIT_K][ROW_BLOCKS];
    X x[WARP_SPLIT_K][TOKENS];
};
using Stored = float[WARP_SPLIT_K][STORED][STRIDE];
using WarpAcc = Acc[M16_TILES][COLUMN_TILES];

// The CTA's share of y [m, n] = x [m, k] @ W [n, k].T.
struct Problem {
    i64 n, k, first_row;
    int m, first_token;
    int k_blocks, first, end;  // along K; of this slice, in units of WARP_SPLIT_K k_blocks
    int tile, cta_k;

    __device__ Problem(i64 n, i64 k, int m, int split_k)
        : n(n), k(k), m(m), tile(blockIdx.x / split_k), cta_k(blockIdx.x % split_k) {
        const int token_tiles = (m + TOKENS - 1) / TOKENS;
        first_row = i64(tile / token_tiles) * ROWS, first_token = tile % token_tiles * TOKENS;
        k_blocks = int((k + TILE_COLUMNS - 1) / TILE_COLUMNS) * K_BLOCKS;
        const i64 k_iters = (k_blocks + WARP_SPLIT_K - 1) / WARP_SPLIT_K;
        first = int(k_iters * cta_k / split_k), end = int(k_iters * (cta_k + 1) / split_k);
    }
};

// Where a warp stands.
struct WarpCoord {
    int lane = threadIdx.x % 32, warp_k, first_m16;  // of the CTA's groups of rows

    __device__ WarpCoord() {
        const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
        warp_k = warp / ROW_WARPS, first_m16 = warp % ROW_WARPS * M16_TILES;
    }
    template <class Stage>
    __device__ const Weights& weights(const Stage& stage) const {
        return stage.weights[warp_k][first_m16 / WARPS];
    }
};

// The chunks of 16 bytes of weights that a thread copies for every stage. The threads of a unit take one row_block of
// one split.
struct WeightCopies {
    static constexpr int OF_UNIT = THREADS / (WARP_SPLIT_K * ROW_BLOCKS);
    static constexpr int K_BLOCK_CHUNKS = sizeof(KBlockOf<WARPS>) / 16, CHUNKS = sizeof(Weights) / 16;

    const Tile* row_block;
    int k_block, k_blocks, chunk;  // of this thread's unit
    u32 to;

    __device__ WeightCopies(Weights (&stage)[WARP_SPLIT_K][ROW_BLOCKS], const Tile* tiles, const Problem& p) {
        const int unit = threadIdx.x / OF_UNIT, warp_k = unit / ROW_BLOCKS;
        const i64 first_row = p.first_row + unit % ROW_BLOCKS * TILE_ROWS;
        row_block = tiles + (first_row < p.n ? first_row / TILE_ROWS * (p.k_blocks / K_BLOCKS) : 0);
        k_blocks = first_row < p.n ? min(p.k_blocks, p.end * WARP_SPLIT_K) : 0;
        k_block = p.first * WARP_SPLIT_K + warp_k;
        chunk = threadIdx.x % OF_UNIT;
        to = shared_address(&stage[warp_k][unit % ROW_BLOCKS]) + 16 * chunk;
    }
    // The next stage's, into the memory that starts `at` bytes after the first stage's. Beyond the slice there are
    // zeros.
    __device__ void operator()(u32 at) {
        const Tile& tile = row_block[k_block / K_BLOCKS];
        const uint4* codes = reinterpret_cast<const uint4*>(&tile.k_blocks[k_block % K_BLOCKS]) + chunk;
        const uint4* fields = reinterpret_cast<const uint4*>(&tile.fields) - K_BLOCK_CHUNKS + chunk;
#pragma unroll
        for (int i = 0; i < CHUNKS; i += OF_UNIT)
            if (i + OF_UNIT <= CHUNKS || i + chunk < CHUNKS)
                cp_async_16(to + at + 16 * i, (K_BLOCKS == 1 || i + chunk < K_BLOCK_CHUNKS ? codes : fields) + i,
                            k_block < k_blocks);
        k_block += WARP_SPLIT_K;
    }
};

// Starts to fill all stages but one; x copies as weights do, and `prepare` is done meanwhile. Weights never change: the
// first are under way before the kernels that write x are done.
template <class XCopies, class Prepare>
__device__ inline void fill_stages(WeightCopies& weights, XCopies& x, u32 stage_bytes, Prepare prepare) {
    constexpr int EARLY = 2;
    for (int i = 0; i < EARLY; ++i) weights(i * stage_bytes);
    prepare();
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    for (int i = 0; i < STAGES - 1; ++i) {
        if (i >= EARLY) weights(i * stage_bytes);
        x(i * stage_bytes);
        cp_async_commit();
    }
}

// The sums of a tile's split_k, which the last of its CTAs adds up. Counters are zero before and after.
struct SplitK {
    float4* partials;  // [tile][slice][M16_TILES * COLUMN_TILES][THREADS]
    u32* counters;     // [tile]
    int count;

    // True in the CTA that is to go on, with the sums of all.
    __device__ bool add(WarpAcc& mine, const Problem& p) const {
        constexpr int QUADS = M16_TILES * COLUMN_TILES;
        float4* first = partials + i64(p.tile) * count * QUADS * THREADS + threadIdx.x;
        float4* own = first + p.cta_k * QUADS * THREADS;
#pragma unroll
        for (int i = 0; i < QUADS; ++i) {
            const float (&sum)[4] = mine[i / COLUMN_TILES][i % COLUMN_TILES].sum;
            own[i * THREADS] = {sum[0], sum[1], sum[2], sum[3]};
        }
        __shared__ bool is_finalizer;
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            is_finalizer = atomicAdd(&counters[p.tile], 1) == count - 1;
            if (is_finalizer) counters[p.tile] = 0;
        }
        __syncthreads();
        if (!is_finalizer) return false;
        __threadfence();
        // The loads of a batch do not wait for each other.
        constexpr int AT_ONCE = QUADS < 4 ? QUADS : 4;
#pragma unroll
        for (int quad = 0; quad < QUADS; quad += AT_ONCE) {
            float4 of[MAX_SPLIT_K][AT_ONCE];
#pragma unroll
            for (int s = 0; s < MAX_SPLIT_K; ++s)
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i)
                    of[s][i] = s < count ? __ldcg(&first[(s * QUADS + quad + i) * THREADS]) : float4{};
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                float (&sum)[4] = mine[(quad + i) / COLUMN_TILES][(quad + i) % COLUMN_TILES].sum;
                sum[0] = sum[1] = sum[2] = sum[3] = 0;
#pragma unroll
                for (int s = 0; s < MAX_SPLIT_K; ++s)
                    sum[0] += of[s][i].x, sum[1] += of[s][i].y, sum[2] += of[s][i].z, sum[3] += of[s][i].w;
            }
        }
        return true;
    }
};

// The warps' sums, times `unit`, to y: STORED tokens at a time through shared memory, where the splits' are added up.
__device__ inline void store(const WarpAcc& acc, Stored& stored, Out* y, const Problem& p, const WarpCoord& coord,
                             float unit) {
    static_assert(THREADS % ROWS == 0, "a thread stores one row of W");
    const int g = coord.lane / 4, t = coord.lane % 4, row = threadIdx.x % ROWS;
    y += p.first_token * p.n + p.first_row + row;
#pragma unroll
    for (int first = 0; first < TOKENS; first += STORED) {
        __syncthreads();
#pragma unroll
        for (int m16 = 0; m16 < M16_TILES; ++m16)
#pragma unroll
            for (int token = 0; token < STORED; token += 8)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    stored[coord.warp_k][token + 2 * t + i % 2][16 * (coord.first_m16 + m16) + g + i / 2 * 8] =
                        acc[m16][(first + token) / 8].sum[i];
        __syncthreads();
        const int end = min(STORED, p.m - p.first_token - first);
        if (p.first_row + row < p.n)
            for (int token = threadIdx.x / ROWS; token < end; token += THREADS / ROWS) {
                float sum = 0;
#pragma unroll
                for (int s = 0; s < WARP_SPLIT_K; ++s) sum += stored[s][token][row];
                y[(first + token) * p.n] = from_float<Out>(unit * sum);
            }
    }
}
