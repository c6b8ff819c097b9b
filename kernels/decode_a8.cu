// decode_a8: y [m, n] = x @ W [n, k].T for few tokens from q8_1 blocks of x, dots of codes on tensor cores, as integers
// or halves (dots.cuh), at the speed of memory.
//
// A CTA, its warps and their pipelines are those of warp_split_k.cuh. x comes as Activations, k_block by k_block
// [along][m], or, if it is small, as numbers [m, k], which each CTA quantizes for itself.
// Template: Format, In (Activations, half, bf16, float), TOKENS (1, 8, 16), M16_TILES (1, 2, 4), ROW_BLOCKS,
// WARP_SPLIT_K, STAGES, BULK.
#include "dots.cuh"
#include "codes/quantize.cuh"
#include "scales.cuh"

using X = Activations[8 * COLUMN_TILES];
using Dots = FewDots<Format>;
constexpr int SCALES = BLOCK_SCALES<Format>;  // of a block of x

// What a stage holds of x: all of a k_block, if it comes as Activations.
template <class T>
struct StageX {
    using Type = void;
};
template <>
struct StageX<Activations> {
    using Type = X;
};

// Adds a k_block's products to the sums, but for the minimums of a super-block.
template <class Smem>
__device__ inline void multiply(WarpAcc& acc, XSums& x_sums, const Smem& mine, const Activations* x, int i, int stage,
                                int lane) {
    const int g = lane / 4, t = lane % 4, k_block = i % K_BLOCKS;
    typename Dots::X b[BLOCKS][COLUMN_TILES];
    float da[BLOCKS][COLUMN_TILES][2], sa[BLOCKS][COLUMN_TILES][2];  // of tokens 2t and 2t + 1
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
        for (int tokens = 0; tokens < COLUMN_TILES; ++tokens) {
            b[block][tokens] =
                Dots::x(*reinterpret_cast<const uint2*>(x[TOKEN_STRIDE * (8 * tokens + g)].q + 32 * block + 8 * t));
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float2 ds = __half22float2(x[TOKEN_STRIDE * (8 * tokens + 2 * t + j)].ds[block]);
                da[block][tokens][j] = ds.x, sa[block][tokens][j] = ds.y;
            }
        }
    if (SHARED_MINIMUM && t == k_block) {
#pragma unroll
        for (int tokens = 0; tokens < COLUMN_TILES; ++tokens) {
            const half2(&ds)[BLOCKS] = x[TOKEN_STRIDE * (8 * tokens + g)].ds;
            x_sums.of[tokens] = {__high2float(ds[0]), __high2float(ds[BLOCKS - 1])};
        }
    }
#pragma unroll
    for (int m16 = 0; m16 < ROW_BLOCKS * M16_TILES; ++m16) {
        const int row_block = m16 / M16_TILES, of_row_block = m16 % M16_TILES;
        const Fields& fields = mine.pipeline.fields(i, stage, row_block);
        const auto codes = mine.pipeline.codes(stage, row_block).codes(of_row_block, lane);
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            const auto first = Dots::step(codes, 2 * block), second = Dots::step(codes, 2 * block + 1);
#pragma unroll
            for (int part = 0; part < SCALES; ++part) {
                const int index = (k_block * BLOCKS + block) * SCALES + part;
                const float2 dw = mine(fields, row_block, of_row_block, g, index);
                const float2 mw = SHARED_MINIMUM ? float2{} : fields.minimum(of_row_block, g, index);
#pragma unroll
                for (int tokens = 0; tokens < COLUMN_TILES; ++tokens)
                    add_block<Dots, Format::HAS_MINIMUM && !SHARED_MINIMUM>(acc[row_block][of_row_block][tokens], first,
                                                                            second, part, dw, mw, b[block][tokens],
                                                                            da[block][tokens], sa[block][tokens]);
            }
        }
    }
}

// x [m, k] -> q8_1 [k_blocks][m], by all threads of a CTA: eight columns a thread and token, AT_ONCE loads under way.
template <class T>
__device__ inline void quantize(Activations* to, const T* x, i64 k, int m, int k_blocks) {
    constexpr int SHARES = K_BLOCK / 8, AT_ONCE = 4;
    int first = 0, token = 0;  // the threads' shares, token by token
    while (first < k_blocks * SHARES) {
        float values[AT_ONCE][8] = {};
        int firsts[AT_ONCE], tokens[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            firsts[i] = first, tokens[i] = token;
            const int column = 8 * (first + int(threadIdx.x));
            if (column < k) load_eight(values[i], x + token * k + column);
            if (++token == m) token = 0, first += THREADS;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (firsts[i] >= k_blocks * SHARES) break;
            const int share = firsts[i] + int(threadIdx.x), k_block = share / SHARES;
            QuantizedShare(values[i]).store(to[k_block * m + tokens[i]], share % SHARES, k_block < k_blocks);
        }
    }
}

template <class T>
__device__ inline void run(const Products& products) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ unsigned long long words[WARP_SPLIT_K][STAGES];
    using Smem = ::Smem<typename StageX<T>::Type>;
    static_assert(sizeof(Smem) == WARP_BYTES,
                  "the memory of a warp differs from pipeline_bytes() of qgemm/cuda/kernels/decode_config.py");
    const WarpCoord coord(products);
    const int m = int(products.m);
    const T* x = static_cast<const T*>(products.x);
    Smem& mine = reinterpret_cast<Smem*>(memory)[coord.warp_k];
    auto& pipeline = mine.pipeline;
    const Arrivals<STAGES, false, BULK> arrivals(words[coord.warp_k]);

    WarpAcc acc = {};
    XSums x_sums = {};
    KTileIterator k_tiles = {coord};
    const auto load_weights = [&](int stage) {
        const u32 bytes = pipeline.bytes(k_tiles) + (PREPARED<T> ? m * u32(sizeof(Activations)) : 0);
        arrivals.first_copy(stage, bytes, [&](auto copy) { pipeline.load(k_tiles, stage, copy); });
        k_tiles.advance();
    };
    const auto multiply_by = [&](const Activations* quantized, int i, int stage) {
        if (i % K_BLOCKS == 0)
            for (int row_block = 0; row_block < ROW_BLOCKS; ++row_block)
                mine.take(pipeline.fields(i, stage, row_block), row_block, coord.lane);
        multiply(acc, x_sums, mine, quantized, i, stage, coord.lane);
        if constexpr (SHARED_MINIMUM)
            if (i % K_BLOCKS == K_BLOCKS - 1)
                for (int row_block = 0; row_block < ROW_BLOCKS; ++row_block)
                    add_minimums<2>(acc[row_block], x_sums, pipeline.fields(i, stage, row_block), 1, coord.lane);
    };
    if constexpr (PREPARED<T>) {
        const T* from = x + i64(coord.warp_k) * K_BLOCKS * m;  // the next k_block
        int k_block = 0;
        const auto load_x = [&](int stage) {
            arrivals.copy(stage, [&](auto copy) { copy(pipeline.stages[stage].x, from, m * u32(sizeof(T))); });
            from += m;
            if (++k_block == K_BLOCKS) k_block = 0, from += (WARP_SPLIT_K - 1) * K_BLOCKS * m;
        };
        stream(
            coord.count, arrivals, load_weights, [] {}, [] {}, load_x,
            [&](int i, int stage) { multiply_by(pipeline.stages[stage].x, i, stage); });
    } else {
        auto* quantized = reinterpret_cast<Activations*>(memory + WARP_SPLIT_K * WARP_BYTES);
        const auto quantize_x = [&] {
            quantize(quantized, x, products.k, m, int(coord.along) * K_BLOCKS);
            __syncthreads();
        };
        const Activations* from = quantized + coord.warp_k * K_BLOCKS * m;  // the k_block in hand
        stream(
            coord.count, arrivals, load_weights, [] {}, quantize_x, [](int) {},
            [&](int i, int stage) {
                multiply_by(from, i, stage);
                from += (i % K_BLOCKS == K_BLOCKS - 1 ? 1 + (WARP_SPLIT_K - 1) * K_BLOCKS : 1) * m;
            });
    }
    __syncthreads();  // the pipelines are empty: their memory serves the sums
    reduce_and_store(acc, {1.0f, 1.0f}, reinterpret_cast<float*>(memory), coord, m);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_a8(const __grid_constant__ Products products) {
    run<In>(products);
}
