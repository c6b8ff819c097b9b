// decode_a8: y [m, n] = x @ W [n, k].T for few tokens from q8_1 blocks of x, integer dots on tensor cores, at the speed
// of memory.
//
// A CTA, its warps and their rings are those of split.cuh. x comes as Activations, span by span [along][m], or as
// numbers [m, k], of which each warp quantizes its spans for itself.
// Per block, with the weight's scale dw and minimum mw, the activation's scale da and sum sa, and sumi the dot product
// of the codes (unsigned but for q8):   sum += dw * (da * sumi - ZERO * sa) + mw * sa
// Where 16 weights share a scale, bytes are levels and there is no sa:   sum += dw * da * sumi for each half of a block.
// Template: Format, In (Activations, half, bf16, float), TOKENS (8, 16), GROUPS (1, 2, 4), SPLITS, DEPTH,
// BULK.
#include "pieces.cuh"
#include "quantize.cuh"

static_assert(SPAN_COLUMNS == X_COLUMNS, "activations come span by span");
static_assert(Format::GROUP == 32 || (Format::ZERO == 0 && !Format::HAS_MINIMUM),
              "a q8_1 block of x has a sum for 32 weights, none for fewer");
constexpr int BLOCKS = SPAN_COLUMNS / 32;
constexpr int SCALES = 32 / Format::GROUP;  // of a block of x

using X = Activations[TOKENS];

// The memory of a warp.
template <class In>
struct Memory {
    RingOf<Rows, SPANS> ring;
    X quantized;  // the span in hand
};
template <>
struct Memory<Activations> {
    RingOf<X, SPANS> ring;
};

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

// Quantizes a span of x, four tokens at a time, eight lanes a token.
template <class T>
__device__ inline void quantize(X& to, const T (&x)[TOKENS][SPAN_COLUMNS + 8], int m, int lane) {
    const int column = lane % 8 * 8, half_step = lane % 2, step = lane / 2 % 2, block = lane / 4 % 2;
    for (int token = lane / 8; token - lane / 8 < m; token += 4) {
        float values[8];
        load_eight(values, &x[token][column]);
        u32 largest = 0;
        for (float value : values) largest = max(largest, magnitude_bits(value));
        largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
        const Quantizer quantizer(largest);
        u32 q[2] = {};  // columns 0..3, 4..7
#pragma unroll
        for (int i = 0; i < 8; ++i) q[i / 4] |= (quantizer.code(values[i]) & 0xff) << 8 * (i % 4);
        int sum = __dp4a(int(q[1]), 0x01010101, __dp4a(int(q[0]), 0x01010101, 0));
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        // Half a step from each of two neighbours makes whole words; the first takes those of t = 0, 1, the second 2, 3.
        const u32 other = __shfl_xor_sync(~0u, half_step ? q[0] : q[1], 1);
        const u32 near = half_step ? other : q[0], far = half_step ? q[1] : other;
        u32* words = reinterpret_cast<u32*>(to[token].q + 32 * block + 16 * half_step + 4 * step);
        words[0] = __byte_perm(near, far, 0x5140);
        words[2] = __byte_perm(near, far, 0x7362);
        if (lane % 4 == 0) to[token].ds[block] = quantizer.scale_and_sum(sum);
    }
    __syncwarp();
}

template <class T>
__device__ inline void run(const Products& products, const T* x, i64 k, int m) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ unsigned long long words[SPLITS][DEPTH];
    const Place at(products, k);
    Memory<T>* mine = reinterpret_cast<Memory<T>*>(memory) + at.split;
    auto& ring = mine->ring;
    const Arrivals<DEPTH, !PREPARED<T>, BULK> arrivals(words[at.split]);

    AllSums sums = {};
    const auto load_weights = [&](int i, int slot) {
        arrivals.expect(slot, ring.bytes(i) + (PREPARED<T> ? m * u32(sizeof(Activations)) : 0));
        arrivals.copy(slot, [&](auto copy) { ring.load(tile_of(at, i), i, slot, at.first_group, copy); });
    };
    const auto multiply_by = [&](const X& quantized, int i, int slot) {
        multiply(sums, ring.stages[slot].weights, quantized, ring.fields(i, slot), i % SPANS, at.lane);
    };
    if constexpr (PREPARED<T>) {
        const T* spans = x + i64(at.split) * SPANS * m;
        const auto load_x = [&](int i, int slot) {
            const T* from = spans + i64(i / SPANS * SPLITS * SPANS + i % SPANS) * m;
            arrivals.copy(slot, [&](auto copy) { copy(ring.stages[slot].x, from, m * u32(sizeof(T))); });
        };
        stream(at.count, arrivals, load_weights, load_x,
               [&](int i, int slot) { multiply_by(ring.stages[slot].x, i, slot); });
    } else {
        const Pieces pieces(x, k, m, at, ring.stages);
        const auto load_x = [&](int i, int slot) { pieces.load(i, slot); };
        stream(at.count, arrivals, load_weights, load_x, [&](int i, int slot) {
            quantize(mine->quantized, ring.stages[slot].x, m, at.lane);
            multiply_by(mine->quantized, i, slot);
        });
    }
    __syncthreads();  // the rings are empty: their memory serves the sums
    reduce_and_store(sums, {1.0f, 1.0f}, reinterpret_cast<float*>(memory), at, m);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    decode_a8(const __grid_constant__ Products products, const In* __restrict__ x, i64 k, int m) {
    run(products, x, k, m);
}
