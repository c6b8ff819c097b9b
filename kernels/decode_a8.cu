// decode_a8: y [m, n] = x @ W [n, k].T for few tokens from x's q8_1 blocks, tile by tile [along][m], integer dots on
// tensor cores, at the speed of memory.
//
// The CTA, its warps and their rings are those of decode.cu; a stage takes the tile's activations in the same way, by
// one bulk copy. Per block, with the weight's scale dw and minimum mw, the activation's scale da and sum sa, and sumi the
// dot product of the codes (unsigned but for q8):   sum += dw * (da * sumi - ZERO * sa) + mw * sa
// Template: Format, Out (float, half, bf16), TOKENS (8, 16), GROUPS (1, 2, 4), SPLITS, DEPTH.
#include "activations.cuh"
#include "pdl.cuh"
#include "ring.cuh"
#include "split.cuh"

static_assert(Format::BLOCK == 32, "one q8_1 block of x serves one block of W");
static_assert(TILE_COLUMNS == X_COLUMNS, "a tile of x serves one tile of W");
constexpr int BLOCKS = TILE_COLUMNS / 32;

struct Stage {
    Slice weights;
    Activations x[TOKENS];
};

// A warp's stream of tiles: number i is tile i * SPLITS of those that start at the pointers.
struct Stream {
    Stage* stages;
    u32 barriers;
    const Format* tiles;
    int first_group;
    const Activations* x;
    int m;

    __device__ void init_barriers() const {
        if (elect_one()) {
            for (int slot = 0; slot < DEPTH; ++slot) mbarrier_init(barriers + 8 * slot, 1);
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        __syncwarp();
    }

    __device__ void load_weights(int i, int slot) const {
        if (elect_one()) {
            const u32 barrier = barriers + 8 * slot;
            mbarrier_expect(barrier, sizeof(Slice) + m * sizeof(Activations));
            stages[slot].weights.copy_from(tiles[i * SPLITS], first_group, [&](void* to, const void* from, u32 bytes) {
                bulk_copy(shared_address(to), from, bytes, barrier);
            });
        }
    }

    __device__ void load_x(int i, int slot) const {
        if (elect_one())
            bulk_copy(shared_address(stages[slot].x), x + i64(i) * SPLITS * m, m * sizeof(Activations),
                      barriers + 8 * slot);
    }
};

// Adds a tile's products to the sums.
__device__ inline void multiply(AllSums& sums, const Stage& stage, int lane) {
    const int g = lane / 4, t = lane % 4;
    uint2 b[BLOCKS][COLUMN_TILES];
    float da[BLOCKS][COLUMN_TILES][2], sa[BLOCKS][COLUMN_TILES][2];  // of tokens 2t and 2t + 1
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
        for (int tokens = 0; tokens < COLUMN_TILES; ++tokens) {
            b[block][tokens] = *reinterpret_cast<const uint2*>(stage.x[8 * tokens + g].q + 32 * block + 8 * t);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float2 ds = __half22float2(stage.x[8 * tokens + 2 * t + i].ds[block]);
                da[block][tokens][i] = ds.x, sa[block][tokens][i] = ds.y;
            }
        }
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        const auto codes = stage.weights.codes(group, lane);
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            const Bytes first = Format::bytes(codes, 2 * block), second = Format::bytes(codes, 2 * block + 1);
            const float2 dw = stage.weights.scale(group, g, block), mw = stage.weights.minimum(group, g, block);
#pragma unroll
            for (int tokens = 0; tokens < COLUMN_TILES; ++tokens) {
                int sumi[4] = {};
                mma_m16n8k32(sumi, first, second, b[block][tokens]);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float a = da[block][tokens][i % 2], s = sa[block][tokens][i % 2];
                    float& sum = sums[group][tokens].sum[i];
                    sum += (i < 2 ? dw.x : dw.y) * (a * float(sumi[i]) - Format::ZERO * s);
                    if constexpr (Format::HAS_MINIMUM) sum += (i < 2 ? mw.x : mw.y) * s;
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    decode_a8(const Format* __restrict__ tiles, const Activations* __restrict__ x, Out* __restrict__ y, i64 n, i64 k,
              int m) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ unsigned long long barriers[SPLITS][DEPTH];
    const int split = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int along = int((k + TILE_COLUMNS - 1) / TILE_COLUMNS), count = (along - split + SPLITS - 1) / SPLITS;
    const i64 first_row = i64(blockIdx.x) * ROWS;
    Stage* stages = reinterpret_cast<Stage*>(memory) + split * DEPTH;
    const Stream stream = {stages,
                           shared_address(barriers[split]),
                           tiles + first_row / TILE_ROWS * along + split,
                           int(first_row % TILE_ROWS / 16),
                           x + i64(split) * m,
                           m};
    stream.init_barriers();
    for (int i = 0; i < min(DEPTH, count); ++i) stream.load_weights(i, i);
    launch_dependents();
    wait_for_predecessors();  // the weights never change, x and y belong to the kernels before
    for (int i = 0; i < min(DEPTH, count); ++i) stream.load_x(i, i);

    AllSums sums = {};
    int slot = 0, round = 0;
    for (int i = 0; i < count; ++i) {
        mbarrier_wait(stream.barriers + 8 * slot, round & 1);
        multiply(sums, stages[slot], lane);
        __syncwarp();  // every lane has read the slot
        if (i + DEPTH < count) {
            stream.load_weights(i + DEPTH, slot);
            stream.load_x(i + DEPTH, slot);
        }
        if (++slot == DEPTH) slot = 0, ++round;
    }
    __syncthreads();  // the rings are empty: their memory serves the sums
    reduce_and_store(sums, {1.0f, 1.0f}, reinterpret_cast<float*>(memory), y, first_row, n, m, split, lane);
}
