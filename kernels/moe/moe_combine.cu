// moe_combine: y [T, n], the sums of weight * (product + bias) over a token's experts, in the order of its ids, in
// float32.
//
// Products are sorted by expert (moe_sort). With one expert a token and no weights the kernel undoes the sort. A thread
// has 16 bytes of a row of products, and loads the rows of several experts at a time. An id that is no expert adds
// nothing.
// Config: In (type of products), Out (type of y), THREADS.
#include "gemm/epilogue.cuh"
#include "ptx/griddepcontrol.cuh"

namespace qgemm {

struct Combination {
    static constexpr int COLUMNS = 16 / sizeof(Config::In);  // columns of a thread
    static constexpr int AT_ONCE = 4;                        // experts whose rows are in flight
    using In = Config::In;
    using Out = Config::Out;
    const ExpertSums& all;
    i64 token, column;
    int columns;  // COLUMNS, fewer at the end of a row

    __device__ void run() const {
        float sums[COLUMNS] = {};
        for (int first = 0; first < all.top_k; first += AT_ONCE) {
            int rows[AT_ONCE];
            float weights[AT_ONCE];
            alignas(16) In products[AT_ONCE][COLUMNS];
            alignas(16) float biases[AT_ONCE][COLUMNS];
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) {
                const i64 slot = token * all.top_k + first + j;
                rows[j] = first + j < all.top_k ? static_cast<const int*>(all.rows)[slot] : -1;
                weights[j] =
                    all.weights_type && first + j < all.top_k ? load_as(all.weights, all.weights_type, slot) : 1;
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) {
                if (rows[j] < 0) continue;
                load(products[j], static_cast<const In*>(all.products) + rows[j] * all.n + column);
                load_biases(biases[j], token * all.top_k + first + j);
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j)
#pragma unroll
                for (int i = 0; i < COLUMNS; ++i)
                    if (rows[j] >= 0) sums[i] += weights[j] * (to_float(products[j][i]) + biases[j][i]);
        }
        store(static_cast<Out*>(all.y) + token * all.n + column, sums);
    }

private:
    template <class T>
    __device__ bool whole(const T* values) const {
        return columns == COLUMNS && reinterpret_cast<i64>(values) % min(16, int(sizeof(T)) * COLUMNS) == 0;
    }
    __device__ void load(In (&to)[COLUMNS], const In* from) const {
        if (whole(from)) return load_words<4>(reinterpret_cast<u32*>(to), reinterpret_cast<const u32*>(from));
        for (int i = 0; i < COLUMNS; ++i) to[i] = from[min(i, columns - 1)];
    }
    __device__ void load_biases(float (&to)[COLUMNS], i64 slot) const {
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) to[i] = 0;
        if (!all.biases_type) return;
        const i64 id = all.wide_ids ? static_cast<const i64*>(all.ids)[slot] : static_cast<const int*>(all.ids)[slot];
        const i64 first = id * all.n + column;
        const auto* values = static_cast<const float*>(all.biases) + first;
        if (all.biases_type == FLOAT32 && whole(values)) {
#pragma unroll
            for (int i = 0; i < COLUMNS; i += 4)
                load_words<4>(reinterpret_cast<u32*>(&to[i]), reinterpret_cast<const u32*>(values + i));
            return;
        }
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i)
            if (i < columns) to[i] = load_as(all.biases, all.biases_type, first + i);
    }
    __device__ void store(Out* to, const float (&sums)[COLUMNS]) const {
        alignas(16) Out rounded[COLUMNS];
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) rounded[i] = from_float<Out>(sums[i]);
        constexpr int WORDS = sizeof(Out) * COLUMNS / 4, AT_ONCE = WORDS < 4 ? WORDS : 4;
        if (whole(to)) {
#pragma unroll
            for (int i = 0; i < WORDS; i += AT_ONCE)
                load_words<AT_ONCE>(reinterpret_cast<u32*>(to) + i, reinterpret_cast<u32*>(rounded) + i);
            return;
        }
        for (int i = 0; i < columns; ++i) to[i] = rounded[i];
    }
};

}  // namespace qgemm

extern "C" __global__ void __launch_bounds__(qgemm::Config::THREADS)
    moe_combine(const __grid_constant__ qgemm::ExpertSums all) {
    using namespace qgemm;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const i64 column = i64(blockIdx.y * Config::THREADS + threadIdx.x) * Combination::COLUMNS;
    if (column >= all.n) return;
    const int columns = int(min(i64(Combination::COLUMNS), all.n - column));
    Combination{all, blockIdx.x, column, columns}.run();
}
