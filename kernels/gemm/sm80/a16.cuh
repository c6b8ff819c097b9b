// Mainloop of the sm_80 prefill kernels for x of 16 bits. A warp dequantizes W into registers, operand A
// (dequantize.cuh), and loads x by ldmatrix, operand B, both one step ahead of the tensor cores.
//
// Config: Sm80 of config.cuh; In: half. pitch: of a row of x; other than k if x is ScaledRows.
#pragma once

#include "gemm/dequantize.cuh"
#include "ptx/ldmatrix.cuh"
#include "quantize/scaled_rows.cuh"
#include "pipeline.cuh"

namespace qgemm {

// Copies x, one k_iter after the other. Consecutive threads copy consecutive 16-byte chunks of a row.
template <class Config>
struct XLoader {
    using In = typename Config::In;
    using Row = In[K_BLOCK + 8];  // padded: the eight rows of an ldmatrix fall on different banks
    static constexpr int BLOCK_TOKENS = Config::BLOCK_TOKENS, WARP_SPLIT_K = Config::WARP_SPLIT_K,
                         THREADS = Config::THREADS;
    static constexpr int ROW_CHUNKS = K_BLOCK * sizeof(In) / 16, CHUNKS = BLOCK_TOKENS * ROW_CHUNKS;
    static_assert(THREADS % CHUNKS == 0 || CHUNKS % THREADS == 0,
                  "the threads copy whole k_blocks, or a k_block is a whole number of passes");

    const In* x;
    int pitch;
    int columns, tokens;  // remaining from this thread's first chunk on
    u32 to;               // address of this chunk in the first stage

    __device__ XLoader(Row (&stage)[WARP_SPLIT_K][BLOCK_TOKENS], const In* all_x, int pitch, const CtaTile<Config>& p)
        : pitch(pitch) {
        const int row = threadIdx.x / ROW_CHUNKS, in_row = threadIdx.x % ROW_CHUNKS * (16 / int(sizeof(In)));
        const i64 column = i64(p.first * WARP_SPLIT_K + row / BLOCK_TOKENS) * K_BLOCK + in_row;
        columns = int(min(p.k, i64(p.end) * WARP_SPLIT_K * K_BLOCK) - column);
        tokens = row < WARP_SPLIT_K * BLOCK_TOKENS ? p.m - p.first_token - row % BLOCK_TOKENS : 0;
        x = all_x + i64(p.first_token + row % BLOCK_TOKENS) * pitch + column;
        to = shared_address(&stage[row / BLOCK_TOKENS][row % BLOCK_TOKENS][in_row]);
    }
    // Copies the next k_iter to `offset` bytes after the first stage; zeros beyond the slice.
    __device__ void load(u32 offset) {
#pragma unroll
        for (int i = 0; i < WARP_SPLIT_K * CHUNKS; i += THREADS) {
            const int warp_k = i / CHUNKS, token = i % CHUNKS / ROW_CHUNKS;
            if (token < tokens)  // products of other tokens are not stored
                cp_async_16(to + offset + u32(sizeof(Row)) * (warp_k * BLOCK_TOKENS + token),
                            x + i64(token) * pitch + warp_k * K_BLOCK, warp_k * K_BLOCK < columns);
        }
        x += WARP_SPLIT_K * K_BLOCK;
        columns -= WARP_SPLIT_K * K_BLOCK;
    }
};

// The factor of a token's row of x: 1, unless x is ScaledRows.
__device__ inline float x_factor(const void* x, int pitch, i64 k, i64 token) {
    return pitch == k ? 1 : ScaledRows{const_cast<void*>(x), k}.factor(token);
}

// Operand A of a warp, one step of 16 columns at a time.
template <class Config>
struct OperandA {
    using Format = typename Config::TileFormat;
    static constexpr int M16_TILES = Config::M16_TILES;
    typename Format::Codes codes[M16_TILES];
    GroupScale<Format::HAS_MINIMUM> groups[M16_TILES];
    int first, lane;  // first: number of the warp's first 16 rows in the row_block
    float factor;

    __device__ void load(Fragment (&a)[M16_TILES], const StageWeights<Config>& weights, int k_block, int step) {
        if (step == 0)
#pragma unroll
            for (int m16 = 0; m16 < M16_TILES; ++m16) codes[m16] = weights.k_block.codes(first + m16, lane);
#pragma unroll
        for (int m16 = 0; m16 < M16_TILES; ++m16) {
            if (step % Config::SCALE_STEPS == 0)
                load_scale(groups[m16], weights.fields, first + m16,
                           Config::scale_index(k_block % Config::K_BLOCKS, step));
            a[m16] = dequantize(Format::fragment(codes[m16], step), groups[m16]);
        }
    }

private:
    template <class Group>
    __device__ void load_scale(Group& group, const Format& fields, int m16, int index) const {
        const float2 d = fields.scale(m16, lane / 4, index), m = fields.minimum(m16, lane / 4, index);
        group = {{d.x * factor, d.y * factor}, {m.x * factor, m.y * factor}};
    }
};

// Operand B of a lane, one batch of column tiles (8 tokens by 16 columns) of a step at a time.
template <class Config>
struct OperandB {
    static constexpr int COLUMN_TILES = Config::COLUMN_TILES;
    static constexpr int BATCH = COLUMN_TILES < 8 ? COLUMN_TILES : 8;             // column tiles
    static constexpr int BATCHES = Config::K_BLOCK_STEPS * COLUMN_TILES / BATCH;  // per k_block
    using In = typename Config::In;
    u32 pairs[BATCH / 2][4];

    // Loads batch `i` of a k_block. x: address of this lane's row of the first ldmatrix.
    __device__ void load(u32 x, int i) {
        const int step = i * BATCH / COLUMN_TILES, first = i * BATCH % COLUMN_TILES;
#pragma unroll
        for (int pair = 0; pair < BATCH / 2; ++pair)
            ldmatrix_x4(pairs[pair], x + u32(sizeof(typename XLoader<Config>::Row)) * 8 * (first + 2 * pair) +
                                         u32(sizeof(In)) * 16 * step);
    }
    // acc += a @ b
    __device__ void multiply(typename Config::WarpAcc& acc, const Fragment (&a)[Config::M16_TILES], int i) const {
        const int first = i * BATCH % COLUMN_TILES;
#pragma unroll
        for (int tile = 0; tile < BATCH; ++tile)
#pragma unroll
            for (int m16 = 0; m16 < Config::M16_TILES; ++m16)
                mma_m16n8k16<In>(acc[m16][first + tile], a[m16],
                                 {pairs[tile / 2][tile % 2 * 2], pairs[tile / 2][tile % 2 * 2 + 1]});
    }
};

// acc += W @ x over the CTA's slice of K.
template <class Config>
__device__ __forceinline__ void mainloop(typename Config::WarpAcc& acc,
                                         Stage<Config, typename XLoader<Config>::Row>* stages,
                                         WeightLoader<Config>& w_loader, XLoader<Config>& x_loader,
                                         const CtaTile<Config>& p, const WarpCoord<Config>& coord, float factor) {
    constexpr int STAGES = Config::STAGES, WARP_SPLIT_K = Config::WARP_SPLIT_K, COLUMN_TILES = Config::COLUMN_TILES;
    constexpr int BATCH = OperandB<Config>::BATCH, BATCHES = OperandB<Config>::BATCHES;
    OperandA<Config> operand_a;
    operand_a.first = coord.first_m16 % WARPS, operand_a.lane = coord.lane, operand_a.factor = factor;
    const auto weights = [&](int stage) -> const auto& { return stages[stage].weights_of(coord); };
    const u32 first_x =
        shared_address(&stages[0].x[coord.warp_k][coord.lane % 8 + coord.lane / 16 * 8][coord.lane / 8 % 2 * 8]);
    const auto stage_x = [&](int stage) { return first_x + stage * u32(sizeof(stages[0])); };
    Fragment a[2][Config::M16_TILES];
    OperandB<Config> b[2];
    cp_async_wait<STAGES - 2>();
    __syncthreads();
    operand_a.load(a[0], weights(0), p.first * WARP_SPLIT_K + coord.warp_k, 0);
    b[0].load(stage_x(0), 0);
    int stage = 0, free = STAGES - 1;
    for (int k_iter = p.first; k_iter < p.end; ++k_iter) {
        const int next = stage + 1 < STAGES ? stage + 1 : 0, k_block = k_iter * WARP_SPLIT_K + coord.warp_k;
#pragma unroll
        for (int i = 0; i < BATCHES; ++i) {
            const int step = i * BATCH / COLUMN_TILES;
            if (i == BATCHES / 2) {
                cp_async_wait<STAGES - 3>();
                __syncthreads();  // the next stage is full, and all warps have read the previous one
                w_loader.load(free * sizeof(stages[0]));
                x_loader.load(free * sizeof(stages[0]));
                cp_async_commit();
            }
            if (i + 1 < BATCHES)
                b[(i + 1) % 2].load(stage_x(stage), i + 1);
            else
                b[0].load(stage_x(next), 0);
            if (i * BATCH % COLUMN_TILES == 0) {
                if (step + 1 < Config::K_BLOCK_STEPS)
                    operand_a.load(a[(step + 1) % 2], weights(stage), k_block, step + 1);
                else
                    operand_a.load(a[0], weights(next), k_block + WARP_SPLIT_K, 0);
            }
            b[i % 2].multiply(acc, a[step % 2], i);
        }
        free = stage;
        stage = next;
    }
    cp_async_wait<0>();  // the reduction aliases the stages
}

}  // namespace qgemm
