// decode_a8: y [m, n] = x @ W [n, k].T for few tokens from q8_1 blocks of x, integer dots on tensor cores, at the speed
// of memory.
//
// A CTA, its warps and their rings are those of split.cuh. x comes as Activations, span by span [along][m], or, of one
// or two tokens, as numbers [m, k], of which each warp quantizes its share of K for itself.
// Template: Format, In (Activations, half, bf16, float), TOKENS (8, 16), GROUPS (1, 2, 4), STRIPS, SPLITS,
// DEPTH, BULK.
#include "dots.cuh"
#include "quantize.cuh"
#include "split.cuh"

using X = Activations[TOKENS];

// A warp quantizes a batch at a time, eight lanes for each entry: a span of one token.
constexpr int BATCH = 4, ENTRY_PADDING = 8;  // entries; numbers after each, against bank conflicts
using Batch = In[BATCH][SPAN_COLUMNS + ENTRY_PADDING];

// The memory of a warp.
template <class T>
struct Memory {
    RingOf<void, SPANS> ring;
    Batch batches[2];
    Activations quantized[BATCH + TOKENS];  // the batch in hand; what is read beyond it counts for no token
};
template <>
struct Memory<Activations> {
    RingOf<X, SPANS> ring;
};

// Adds a span's products to the sums.
template <class Ring>
__device__ inline void multiply(AllSums& sums, const Ring& ring, const Activations* x, int i, int slot, int lane) {
    const int g = lane / 4, t = lane % 4, span = i % SPANS;
    uint2 b[BLOCKS][COLUMN_TILES];
    float da[BLOCKS][COLUMN_TILES][2], sa[BLOCKS][COLUMN_TILES][2];  // of tokens 2t and 2t + 1
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
        for (int tokens = 0; tokens < COLUMN_TILES; ++tokens) {
            b[block][tokens] = *reinterpret_cast<const uint2*>(x[8 * tokens + g].q + 32 * block + 8 * t);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float2 ds = __half22float2(x[8 * tokens + 2 * t + j].ds[block]);
                da[block][tokens][j] = ds.x, sa[block][tokens][j] = ds.y;
            }
        }
#pragma unroll
    for (int group = 0; group < STRIPS * GROUPS; ++group) {
        const int strip = group / GROUPS, of_strip = group % GROUPS;
        const Fields& fields = ring.fields(i, slot, strip);
        const auto codes = ring.codes(slot, strip).codes(of_strip, lane);
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            const Bytes first = Format::bytes(codes, 2 * block), second = Format::bytes(codes, 2 * block + 1);
#pragma unroll
            for (int part = 0; part < SCALES; ++part) {
                const int index = (span * BLOCKS + block) * SCALES + part;
                const float2 dw = fields.scale(of_strip, g, index), mw = fields.minimum(of_strip, g, index);
#pragma unroll
                for (int tokens = 0; tokens < COLUMN_TILES; ++tokens)
                    add_block<Converted>(sums[strip][of_strip][tokens], first, second, part, dw, mw, b[block][tokens],
                                         da[block][tokens], sa[block][tokens]);
            }
        }
    }
}

// Batches of x [m, k] -> shared memory -> q8_1.
template <class T>
struct Quantized {
    Memory<T>* memory;
    const T* x;
    i64 k;
    int m, spans;  // of a batch
    int first_column, count;
    int entry, lane;

    __device__ Quantized(Memory<T>* memory, const T* x, i64 k, int m, const Place& at)
        : memory(memory),
          x(x),
          k(k),
          m(m),
          spans(BATCH / m),
          first_column(at.split * TILE_COLUMNS),
          count(at.count),
          entry(at.lane / 8),
          lane(at.lane % 8) {}
    // Starts to copy a batch. Beyond K and the warp's last span it is zero.
    __device__ void load(int batch) const {
        const int i = batch * spans + entry / m;
        const i64 column = first_column + i / SPANS * SPLITS * TILE_COLUMNS + i % SPANS * SPAN_COLUMNS;
        constexpr int PIECE = 16 / sizeof(T), PIECES = SPAN_COLUMNS / PIECE / 8;  // of a lane
#pragma unroll
        for (int j = 0; j < PIECES; ++j) {
            const i64 at = column + (8 * j + lane) * PIECE;
            const bool inside = i < count && at < k;
            copy_16(shared_address(&memory->batches[batch % 2][entry][(8 * j + lane) * PIECE]),
                    x + (inside ? entry % m * k + at : 0), inside);
        }
        copies_commit();
    }
    // The quantized x of number i of the warp's spans; of a new batch, which it quantizes.
    __device__ const Activations* operator()(int i) const {
        if (i % spans == 0) {
            copies_wait<1>();
            __syncwarp();
            quantize(memory->quantized[entry], memory->batches[i / spans % 2][entry]);
            __syncwarp();
            load(i / spans + 2);
        }
        return memory->quantized + i % spans * m;
    }

private:
    // Eight columns a lane.
    __device__ void quantize(Activations& to, const T* from) const {
        float values[8];
        load_eight(values, from + 8 * lane);
        QuantizedShare(values).store(to, lane);
    }
};

template <class T>
__device__ inline void run(const Products& products) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ unsigned long long words[SPLITS][DEPTH];
    static_assert(sizeof(Memory<T>) == WARP_BYTES, "the memory of a warp differs from ring_bytes() of qgemm/splits.py");
    const Place at(products);
    const int m = int(products.m);
    const T* x = static_cast<const T*>(products.x);
    Memory<T>* mine = reinterpret_cast<Memory<T>*>(memory) + at.split;
    auto& ring = mine->ring;
    const Arrivals<DEPTH, false, BULK> arrivals(words[at.split]);

    AllSums sums = {};
    Walk walk = {at};
    const auto load_weights = [&](int slot) {
        const u32 bytes = ring.bytes(walk) + (PREPARED<T> ? m * u32(sizeof(Activations)) : 0);
        arrivals.first_copy(slot, bytes, [&](auto copy) { ring.load(walk, slot, copy); });
        walk.advance();
    };
    const auto multiply_by = [&](const Activations* quantized, int i, int slot) {
        multiply(sums, ring, quantized, i, slot, at.lane);
    };
    if constexpr (PREPARED<T>) {
        const T* from = x + i64(at.split) * SPANS * m;  // the next span
        int span = 0;
        const auto load_x = [&](int slot) {
            arrivals.copy(slot, [&](auto copy) { copy(ring.stages[slot].x, from, m * u32(sizeof(T))); });
            from += m;
            if (++span == SPANS) span = 0, from += (SPLITS - 1) * SPANS * m;
        };
        stream(
            at.count, arrivals, load_weights, [] {}, load_x,
            [&](int i, int slot) { multiply_by(ring.stages[slot].x, i, slot); });
    } else {
        static_assert(PREPARED<T> || BULK, "where weights arrive by cp.async as well, their groups would mix");
        const Quantized<T> quantized(mine, x, products.k, m, at);
        const auto load_x = [&, begun = false](int) mutable {
            if (!begun) quantized.load(0), quantized.load(1);
            begun = true;
        };
        stream(
            at.count, arrivals, load_weights, [] {}, load_x,
            [&](int i, int slot) { multiply_by(quantized(i), i, slot); });
        copies_wait<0>();  // batches beyond the last, which are zeros
    }
    __syncthreads();  // the rings are empty: their memory serves the sums
    reduce_and_store(sums, {1.0f, 1.0f}, reinterpret_cast<float*>(memory), at, m);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_a8(const __grid_constant__ Products products) {
    run<In>(products);
}
