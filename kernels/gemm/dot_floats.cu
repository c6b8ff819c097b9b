// dot_floats: products by W [E, n, k] of floats, each token by the experts of its ids [T, top_k]; without ids by the
// one matrix W [n, k].
//
//   y [T, top_k, n] = (x @ W[ids].T + bias[ids]) * weights, x [T, k] or [T, top_k, k]; weights: of the router, or none.
//   A residual is added before that or, with a gate, multiplies as of gemm/epilogue.cuh.
//   GATED: of two products by the same expert the first is the gate of the second.
//   SUMMED: y [T, n], the sum over a token's experts, x [T, top_k, k]; the weights multiply the biases alone.
// A warp owns a row of W and has its products with x exactly, summed in float32. W is read again for each slot. An id
// that is no expert gives zeros.
// Config: Weight and In (types of W and x), GATED, SUMMED, WARPS.
#include "gemm/epilogue.cuh"
#include "ptx/griddepcontrol.cuh"

namespace qgemm {

// N numbers, loaded in words.
template <class T, int N>
struct alignas(16) Numbers {
    static constexpr int BYTES = N * sizeof(T), ALIGNMENT = BYTES < 16 ? BYTES : 16, WORDS = ALIGNMENT / 4;
    T values[N];

    __device__ static bool loads(const T* from) { return reinterpret_cast<i64>(from) % ALIGNMENT == 0; }
    __device__ void load(const T* from) {
#pragma unroll
        for (int i = 0; i < BYTES / 4; i += WORDS)
            load_words<WORDS>(reinterpret_cast<u32*>(values) + i, reinterpret_cast<const u32*>(from) + i);
    }
};

template <class Config>
struct DotFloats {
    using Weight = typename Config::Weight;
    using In = typename Config::In;
    static constexpr int AT_ONCE = 16 / sizeof(Weight);  // weights that a lane loads at a time
    const ExpertProducts& all;
    i64 row;
    int lane;

    // -1 for an id that is no expert.
    __device__ int expert_of(i64 slot) const {
        if (!all.ids) return 0;
        const i64 id = all.wide_ids ? static_cast<const i64*>(all.ids)[slot] : static_cast<const int*>(all.ids)[slot];
        return id >= 0 && id < all.experts ? int(id) : -1;
    }
    __device__ float weight(i64 slot) const { return all.weights ? load_as(all.weights, all.weights_type, slot) : 1; }
    __device__ Epilogue epilogue_of(int product) const {
        return {{all.products.arrays[product].outputs, all.products.of[product].types}};
    }
    __device__ float biased(int product, int expert, float sum) const {
        return epilogue_of(product).biased(expert * all.expert_rows + row, sum);
    }
    // Row x_row of x times the row of W of an expert, the same in all lanes.
    __device__ float dot(int product, int expert, i64 x_row) const {
        const i64 k = all.products.k;
        const char* expert_0 = static_cast<const char*>(all.products.arrays[product].tiles);
        const Weight* w = reinterpret_cast<const Weight*>(expert_0 + expert * all.expert_bytes) + row * k;
        const In* x = static_cast<const In*>(all.products.x) + x_row * k;
        using Weights = Numbers<Weight, AT_ONCE>;
        using Values = Numbers<In, AT_ONCE>;
        float sum = 0;
        if (k % AT_ONCE == 0 && Weights::loads(w) && Values::loads(x)) {
#pragma unroll 4
            for (i64 i = lane * AT_ONCE; i < k; i += 32 * AT_ONCE) {
                Weights weights;
                Values values;
                weights.load(w + i);
                values.load(x + i);
#pragma unroll
                for (int j = 0; j < AT_ONCE; ++j) sum += to_float(weights.values[j]) * to_float(values.values[j]);
            }
        } else {
            for (i64 i = lane; i < k; i += 32) sum += to_float(w[i]) * to_float(x[i]);
        }
#pragma unroll
        for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
        return sum;
    }
    __device__ float of_slot(i64 slot, i64 y_index) const {
        const int expert = expert_of(slot);
        if (expert < 0) return 0;
        const i64 x_row = all.x_of_slots ? slot : slot / all.top_k;
        const Epilogue epilogue = epilogue_of(0);
        float y = biased(0, expert, dot(0, expert, x_row));
        if constexpr (Config::GATED) {
            y = gated(epilogue.types.gate, y, biased(1, expert, dot(1, expert, x_row)));
        } else if (epilogue.types.residual) {
            const float residual = load_as(epilogue.arrays.residual, epilogue.types.residual, y_index);
            y = epilogue.types.gate ? gated(epilogue.types.gate, residual, y) : y + residual;
        }
        return y * weight(slot);
    }
    __device__ float of_token(i64 token) const {
        float y = 0;
        for (i64 slot = token * all.top_k; slot < (token + 1) * all.top_k; ++slot) {
            const int expert = expert_of(slot);
            if (expert < 0) continue;
            y += dot(0, expert, slot);
            if (epilogue_of(0).types.bias) y += weight(slot) * biased(0, expert, 0);
        }
        return y;
    }
    __device__ void run() const {
        const Epilogue epilogue = epilogue_of(0);
        const i64 i = blockIdx.y * all.products.of[0].n + row;
        const float y = Config::SUMMED ? of_token(blockIdx.y) : of_slot(blockIdx.y, i);
        if (lane == 0) store_as(epilogue.arrays.y, epilogue.types.y, i, y);
    }
};

}  // namespace qgemm

extern "C" __global__ void __launch_bounds__(32 * qgemm::Config::WARPS)
    dot_floats(const __grid_constant__ qgemm::ExpertProducts all) {
    using namespace qgemm;
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();  // the second product of a layer reads the ids at once: they are written by now
    const i64 row = i64(blockIdx.x) * Config::WARPS + threadIdx.x / 32;
    if (row < all.products.of[0].n) DotFloats<Config>{all, row, int(threadIdx.x % 32)}.run();
}
