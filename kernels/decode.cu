// decode: y [m, n] = x [m, k] @ W [n, k].T for few tokens on tensor cores, at the speed of memory.
//
// A CTA, its warps and their pipelines are those of warp_split_k.cuh. Weights are operand A, masked out of the codes in
// shared memory; tokens are operand B and arrive with the weights (operand.cuh). A product with a constant gives sum(x)
// where a scale is shared, for the zero or the minimum; scales multiply the float sums.
// Template: Format, In (float, half, bf16), TOKENS (1, 8, 16), M16_TILES (1, 2, 4), ROW_BLOCKS, WARP_SPLIT_K, STAGES,
// BULK.
#include "operand.cuh"
#include "x_loader.cuh"
#include "scales.cuh"

using B = Operand<In>;

constexpr bool ZEROED = B::ZERO != 0;
static_assert(!(Format::HAS_MINIMUM && Format::CODE_BIAS), "a format has a zero or a minimum");

// Takes what a constant's product gave for the two groups of a k_block: the same in every row.
__device__ inline void take_x_sums(XSums& x_sums, const Acc (&acc)[K_BLOCK_SCALES][COLUMN_TILES], int k_block,
                                   int lane) {
    const int g = lane / 4, t = lane % 4, from = g % 2 * 4 + g / 2;
#pragma unroll
    for (int tokens = 0; tokens < COLUMN_TILES; ++tokens) {
        const float (&first)[4] = acc[0][tokens].sum, (&second)[4] = acc[K_BLOCK_SCALES - 1][tokens].sum;
        if constexpr (TOKENS == 1) {  // in every column
            if (t == k_block) x_sums.of[tokens] = {first[0], second[0]};
            continue;
        }
        // An odd row offers the odd one of its two tokens.
        const float2 got = {__shfl_sync(~0u, g % 2 ? first[1] : first[0], from),
                            __shfl_sync(~0u, g % 2 ? second[1] : second[0], from)};
        if (t == k_block) x_sums.of[tokens] = got;
    }
}

// Adds a k_block's products to the sums, but for the minimums of a super-block.
__device__ inline void multiply(WarpAcc& acc, XSums& x_sums, const Smem<Rows>& mine, int i, int stage, int lane) {
    const int g = lane / 4, k_block = i % K_BLOCKS;
    const Rows& x = mine.pipeline.stages[stage].x;
    StepOfX<In> b[COLUMN_TILES][K_BLOCK_STEPS / 2][2];
#pragma unroll
    for (int tokens = 0; tokens < COLUMN_TILES; ++tokens)
#pragma unroll
        for (int pair = 0; pair < K_BLOCK_STEPS / 2; ++pair)
            load_x_steps<In>(b[tokens][pair], &x[8 * tokens][32 * pair], TOKEN_STRIDE * (K_BLOCK + 8), lane);
    const auto multiply_step = [&](Acc& sum, const Fragment& a, int tokens, int step) {
#pragma unroll
        for (int term = 0; term < B::TERMS; ++term) mma_m16n8k16<B::Type>(sum, a, b[tokens][step / 2][step % 2][term]);
    };
    // In units of the codes: -zero * sum(x) for each scale, where a dot product starts, or sum(x) for the minimum.
    Acc starts[K_BLOCK_SCALES][COLUMN_TILES] = {};
    if constexpr (Format::HAS_MINIMUM || ZEROED) {
        const Fragment unit = B::constant(Format::HAS_MINIMUM ? 1 : -B::ZERO);
#pragma unroll
        for (int step = 0; step < K_BLOCK_STEPS; ++step)
#pragma unroll
            for (int tokens = 0; tokens < COLUMN_TILES; ++tokens)
                multiply_step(starts[step / SCALE_STEPS][tokens], unit, tokens, step);
    }
    if constexpr (SHARED_MINIMUM) take_x_sums(x_sums, starts, k_block, lane);
#pragma unroll
    for (int m16 = 0; m16 < ROW_BLOCKS * M16_TILES; ++m16) {
        const int row_block = m16 / M16_TILES, of_row_block = m16 % M16_TILES;
        const Fields& fields = mine.pipeline.fields(i, stage, row_block);
        const auto codes = mine.pipeline.codes(stage, row_block).codes(of_row_block, lane);
#pragma unroll
        for (int part = 0; part < K_BLOCK_SCALES; ++part) {
            Acc dots[COLUMN_TILES] = {};
            if constexpr (ZEROED)
#pragma unroll
                for (int tokens = 0; tokens < COLUMN_TILES; ++tokens) dots[tokens] = starts[part][tokens];
#pragma unroll
            for (int step = part * SCALE_STEPS; step < (part + 1) * SCALE_STEPS; ++step) {
                const Fragment a = B::weights(codes, step);
#pragma unroll
                for (int tokens = 0; tokens < COLUMN_TILES; ++tokens) multiply_step(dots[tokens], a, tokens, step);
            }
            const int index = k_block * K_BLOCK_SCALES + part;
            const float2 d = mine(fields, row_block, of_row_block, g, index);
            const float2 m = SHARED_MINIMUM ? float2{} : fields.minimum(of_row_block, g, index);
#pragma unroll
            for (int tokens = 0; tokens < COLUMN_TILES; ++tokens)
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    float& sum = acc[row_block][of_row_block][tokens].sum[j];
                    sum += (j < 2 ? d.x : d.y) * dots[tokens].sum[j];
                    if constexpr (Format::HAS_MINIMUM && !SHARED_MINIMUM)
                        sum += (j < 2 ? m.x : m.y) * starts[part][tokens].sum[j];
                }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode(const __grid_constant__ Products products) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ unsigned long long words[WARP_SPLIT_K][STAGES];
    static_assert(sizeof(Smem<Rows>) == WARP_BYTES,
                  "the memory of a warp differs from pipeline_bytes() of qgemm/cuda/kernels/decode_config.py");
    const WarpCoord coord(products);
    const int m = int(products.m);
    auto* mine = reinterpret_cast<Smem<Rows>*>(memory + Format::TABLE_BYTES) + coord.warp_k;
    auto& pipeline = mine->pipeline;
    KTileIterator k_tiles = {coord};
    XLoader x_loader(static_cast<const In*>(products.x), products.k, m, coord, pipeline.stages);
    const Arrivals<STAGES, true, BULK> arrivals(words[coord.warp_k]);

    WarpAcc acc = {};
    XSums x_sums = {};
    stream(
        coord.count, arrivals,
        [&](int stage) {
            arrivals.first_copy(stage, pipeline.bytes(k_tiles),
                                [&](auto copy) { pipeline.load(k_tiles, stage, copy); });
            k_tiles.advance();
        },
        [&] { share_table<Format, B::Type, THREADS>(B::EXPONENT); }, [] {}, [&](int stage) { x_loader.load(stage); },
        [&](int i, int stage) {
            if (i % K_BLOCKS == 0)
                for (int row_block = 0; row_block < ROW_BLOCKS; ++row_block)
                    mine->take(pipeline.fields(i, stage, row_block), row_block, coord.lane);
            multiply(acc, x_sums, *mine, i, stage, coord.lane);
            if constexpr (SHARED_MINIMUM)
                if (i % K_BLOCKS == K_BLOCKS - 1)
                    for (int row_block = 0; row_block < ROW_BLOCKS; ++row_block)
                        add_minimums<3>(acc[row_block], x_sums, pipeline.fields(i, stage, row_block), 1 << B::SHIFT,
                                        coord.lane);
        });
    __syncthreads();                         // the pipelines are empty: their memory serves the sums
    const float unit = two_to(B::EXPONENT);  // of the codes
    reduce_and_store(acc, {unit, unit / (1 << B::SHIFT)}, reinterpret_cast<float*>(memory), coord, m);
}
