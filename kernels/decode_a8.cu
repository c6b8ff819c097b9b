// decode_a8: y [m, n] = x @ W [n, k].T for few tokens from x's q8_1 blocks, span by span [along][m], integer dots on
// tensor cores, at the speed of memory.
//
// A CTA, its warps and their rings are those of split.cuh; the activations of a span come by one more bulk copy. Per block, with the weight's scale dw and minimum mw, the activation's scale da and sum sa, and sumi the
// dot product of the codes (unsigned but for q8):   sum += dw * (da * sumi - ZERO * sa) + mw * sa
// Where 16 weights share a scale, bytes are levels and there is no sa:   sum += dw * da * sumi for each half of a block.
// Template: Format, Out (float, half, bf16), TOKENS (8, 16), GROUPS (1, 2, 4), SPLITS, DEPTH.
#include "activations.cuh"
#include "pdl.cuh"
#include "split.cuh"

static_assert(SPAN_COLUMNS == X_COLUMNS, "activations come span by span");
static_assert(Format::GROUP == 32 || (Format::ZERO == 0 && !Format::HAS_MINIMUM),
              "a q8_1 block of x has a sum for 32 weights, none for fewer");
constexpr int BLOCKS = SPAN_COLUMNS / 32;
constexpr int SCALES = 32 / Format::GROUP;  // of a block of x

using X = Activations[TOKENS];
using Ring = RingOf<X, SPANS>;

// Adds a span's products to the sums.
__device__ inline void multiply(AllSums& sums, const Span& weights, const X& x, const Fields& fields, int span,
                                int lane) {
    const int g = lane / 4, t = lane % 4;
    uint2 b[BLOCKS][COLUMN_TILES];
    float da[BLOCKS][COLUMN_TILES][2], sa[BLOCKS][COLUMN_TILES][2];  // of tokens 2t and 2t + 1
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
        for (int tokens = 0; tokens < COLUMN_TILES; ++tokens) {
            b[block][tokens] = *reinterpret_cast<const uint2*>(x[8 * tokens + g].q + 32 * block + 8 * t);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float2 ds = __half22float2(x[8 * tokens + 2 * t + i].ds[block]);
                da[block][tokens][i] = ds.x, sa[block][tokens][i] = ds.y;
            }
        }
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        const auto codes = weights.codes(group, lane);
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            const Bytes first = Format::bytes(codes, 2 * block), second = Format::bytes(codes, 2 * block + 1);
#pragma unroll
            for (int part = 0; part < SCALES; ++part) {
                const int index = (span * BLOCKS + block) * SCALES + part;
                const float2 dw = fields.scale(group, g, index), mw = fields.minimum(group, g, index);
#pragma unroll
                for (int tokens = 0; tokens < COLUMN_TILES; ++tokens) {
                    const uint2 q = b[block][tokens];
                    int sumi[4] = {};
                    if constexpr (SCALES == 1)
                        mma_m16n8k32(sumi, first, second, q);
                    else
                        mma_m16n8k16(sumi, part ? second : first, part ? q.y : q.x);
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const float a = da[block][tokens][i % 2], s = sa[block][tokens][i % 2];
                        float& sum = sums[group][tokens].sum[i];
                        float dot = a * float(sumi[i]);
                        if constexpr (Format::ZERO != 0) dot -= Format::ZERO * s;
                        sum += (i < 2 ? dw.x : dw.y) * dot;
                        if constexpr (Format::HAS_MINIMUM) sum += (i < 2 ? mw.x : mw.y) * s;
                    }
                }
            }
        }
    }
}

// The activations of number `i` of a warp's spans, the first of which starts at x -> slot.
__device__ inline void load_x(Ring* ring, u32 barriers, const Activations* x, int i, int slot, int m) {
    if (elect_one()) {
        const i64 ahead = i64(i / SPANS * SPLITS * SPANS + i % SPANS) * m;
        bulk_copy(shared_address(ring->stages[slot].x), x + ahead, m * sizeof(Activations), barriers + 8 * slot);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    decode_a8(const Tile* __restrict__ tiles, const Activations* __restrict__ x, Out* __restrict__ y, i64 n, i64 k,
              int m) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ unsigned long long words[SPLITS][DEPTH];
    const int split = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int along = int((k + TILE_COLUMNS - 1) / TILE_COLUMNS);
    const int count = (along - split + SPLITS - 1) / SPLITS * SPANS;
    const i64 first_row = i64(blockIdx.x) * ROWS;
    Ring* ring = reinterpret_cast<Ring*>(memory) + split;
    const u32 barriers = shared_address(words[split]), bytes = m * sizeof(Activations);
    const int first_group = first_row % TILE_ROWS / 16;
    tiles += first_row / TILE_ROWS * along + split;
    x += i64(split) * SPANS * m;

    init_barriers(barriers, 1);
    for (int i = 0; i < min(DEPTH, count); ++i) load_weights(ring, barriers, tiles, i, i, first_group, bytes);
    launch_dependents();
    wait_for_predecessors();  // the weights never change, x and y belong to the kernels before
    for (int i = 0; i < min(DEPTH, count); ++i) load_x(ring, barriers, x, i, i, m);

    AllSums sums = {};
    int slot = 0, round = 0;
    for (int i = 0; i < count; ++i) {
        mbarrier_wait(barriers + 8 * slot, round & 1);
        multiply(sums, ring->stages[slot].weights, ring->stages[slot].x, ring->fields(i, slot), i % SPANS, lane);
        __syncwarp();  // every lane has read the slot
        if (i + DEPTH < count) {
            load_weights(ring, barriers, tiles, i + DEPTH, slot, first_group, bytes);
            load_x(ring, barriers, x, i + DEPTH, slot, m);
        }
        if (++slot == DEPTH) slot = 0, ++round;
    }
    __syncthreads();  // the rings are empty: their memory serves the sums
    reduce_and_store(sums, {1.0f, 1.0f}, reinterpret_cast<float*>(memory), y, first_row, n, m, split, lane);
}
