// Grouping of decode: products by experts W [E, n, k] of few tokens, each by the experts of its ids [T, top_k].
//
//   y [T, top_k, n] = (x @ W[ids].T + bias[ids]) * weights, x [T, k] or [T, top_k, k]; weights: of the router, or none.
//   GATED: of two products by the same expert the first is the gate of the second.
//   SUMMED: y [T, n], the sum over a token's experts, x [T, top_k, k]; the weights multiply the biases alone.
// Nothing is sorted: each CTA looks its expert up. An id that is no expert gives zeros.
// Config: Decode of config.cuh with TOKENS = 1 and PREFETCH = 0.
#pragma once

#include "expert_coord.cuh"
#include "policies.cuh"
#include "reduce.cuh"

namespace qgemm {

// Stores a row of the CTA's slot or token. A thread has one row, or several if warps are few.
//
// Biases and weights are loaded while W is in flight, and converted when the sums are complete. A load at that point
// would be waited for: queued after the copies of all CTAs, it has a latency of 4 us.
template <class Config>
struct StoreExperts {
    static constexpr int PRODUCTS = Config::GATED ? 2 : 1, STORED = Config::ROWS / Config::CLUSTER_SPLIT_K;
    static constexpr int STORING_WARPS = (STORED + 31) / 32;
    static constexpr int TERMS = Config::SUMMED ? 4 : 1;      // experts whose biases are loaded early
    static constexpr bool EARLY = STORED <= Config::THREADS;  // one row a thread
    const ExpertCoord<Config>& coord;
    u32 biases[TERMS][PRODUCTS] = {}, weights[TERMS] = {};

    __device__ void begin() {
        if (!EARLY || coord.warp_k >= STORING_WARPS) return;
        if (Config::SUMMED && !epilogue_of(0).types.bias) return;
#pragma unroll
        for (int i = 0; i < TERMS; ++i) {
            const int expert = expert_of(i);
            if (expert < 0) continue;
            weights[i] = load_raw(all().weights, all().weights_type, coord.slot + i);
#pragma unroll
            for (int product = 0; product < PRODUCTS; ++product)
                biases[i][product] = load_raw(epilogue_of(product).arrays.bias, epilogue_of(product).types.bias,
                                              bias_row(expert, own_row()));
        }
    }
    template <class Sums>
    __device__ void operator()(int, i64 row, Sums sums) const {
        const Epilogue epilogue = epilogue_of(0);
        const i64 i = blockIdx.y * coord.products.of[0].n + row;
        float y = sums(0);
        if constexpr (Config::SUMMED) {
            if (epilogue.types.bias) y += bias_of_all(row);
        } else {
            y += bias(0, 0, row);
            if constexpr (Config::GATED)
                y = gated(epilogue.types.gate, y, sums(1) + bias(0, 1, row));
            else if (epilogue.types.gate)
                y = gated(epilogue.types.gate, load_as(epilogue.arrays.residual, epilogue.types.residual, i), y);
            y *= weight(0);
        }
        if ((Config::SUMMED ? coord.stand_in : coord.expert) < 0) y = 0;
        store_as(epilogue.arrays.y, epilogue.types.y, i, y);
    }

private:
    __device__ const ExpertProducts& all() const { return coord.all; }
    // The expert of slot i of the token, or of the CTA's only slot; -1: none.
    __device__ int expert_of(int i) const {
        if constexpr (!Config::SUMMED) return coord.expert;
        return i < all().top_k ? coord.shared[i] : -1;
    }
    __device__ float weight(int i) const {
        if (!EARLY) return coord.weight(coord.slot + i);
        return all().weights ? value_of(weights[i], all().weights_type) : 1;
    }
    __device__ float bias(int i, int product, i64 row) const {
        if (!EARLY) return epilogue_of(product).biased(bias_row(max(expert_of(i), 0), row), 0);
        return value_of(biases[i][product], epilogue_of(product).types.bias);
    }
    // The biases of all experts of the token, times their weights.
    __device__ float bias_of_all(i64 row) const {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < TERMS; ++i)
            if (expert_of(i) >= 0) sum += weight(i) * bias(i, 0, row);
        for (int i = TERMS; i < all().top_k; ++i)
            if (expert_of(i) >= 0)
                sum += coord.weight(coord.slot + i) * epilogue_of(0).biased(bias_row(expert_of(i), row), 0);
        return sum;
    }
    __device__ i64 own_row() const {
        const int rank = coord.share / Config::WARP_SPLIT_K;
        return min(coord.first_row + rank * STORED + threadIdx.x % STORED, coord.products.of[0].n - 1);
    }
    __device__ i64 bias_row(int expert, i64 row) const { return expert * all().expert_rows + row; }
    __device__ Epilogue epilogue_of(int index) const {
        return {{coord.products.arrays[index].outputs, coord.products.of[index].types}};
    }
};

struct ExpertSlots {
    using Arguments = ExpertProducts;

    template <class Config>
    static __device__ __forceinline__ void run(const ExpertProducts& all, unsigned char* memory,
                                               unsigned long long (&mbarriers)[Config::WARP_SPLIT_K][Config::STAGES]) {
        static_assert(Config::PREFETCH == 0, "prefetching begins before the expert is known");
        __shared__ int experts[32];
        const i64 row_of_x = Config::SUMMED || all.x_of_slots ? i64(blockIdx.y) : blockIdx.y / all.top_k;
        const auto* x = static_cast<const typename Config::In*>(all.products.x) +
                        row_of_x * all.products.k * (Config::SUMMED ? all.top_k : 1);
        // The second product of a layer knows the ids: CTAs of the first let it start once they have read theirs.
        if (!all.ids_are_known) griddepcontrol_wait();
        const ExpertCoord<Config> coord(all, experts);
        Config::Mainloop::template run<Config>(coord, x, 1, memory, mbarriers, StoreExperts<Config>{coord});
    }
};

}  // namespace qgemm
