// moe_combine: y [T, n], the sums over a token's experts of weight * (product + bias), in the order of its ids, in float32.
//
// Products lie sorted by expert (moe_sort). With one expert a token and no weights it puts the products of all slots
// into their places. A thread has 16 bytes of products of a row; an id that is no expert adds nothing.
// Config: In (of products), Out (of y); THREADS.
#include "epilogue.cuh"
#include "ptx/griddepcontrol.cuh"

namespace qgemm {

struct Combination {
    static constexpr int COLUMNS = 16 / sizeof(Config::In);  // of a thread
    using In = Config::In;
    using Out = Config::Out;
    const ExpertSums& all;
    i64 token, column;
    int columns;  // inside the matrix

    __device__ void run() const {
        float sums[COLUMNS] = {};
        for (int j = 0; j < all.top_k; ++j) {
            const i64 slot = token * all.top_k + j;
            const int row = static_cast<const int*>(all.rows)[slot];
            if (row < 0) continue;
            alignas(16) In products[COLUMNS];
            load(products, static_cast<const In*>(all.products) + row * all.n + column);
            const float weight = all.weights_type ? load_as(all.weights, all.weights_type, slot) : 1;
#pragma unroll
            for (int i = 0; i < COLUMNS; ++i) sums[i] += weight * (to_float(products[i]) + bias(slot, i));
        }
        store(static_cast<Out*>(all.y) + token * all.n + column, sums);
    }

private:
    template <class T>
    __device__ bool whole(const T* at) const {
        return columns == COLUMNS && reinterpret_cast<i64>(at) % min(16, int(sizeof(T)) * COLUMNS) == 0;
    }
    __device__ void load(In (&to)[COLUMNS], const In* from) const {
        if (whole(from)) return load_words<4>(reinterpret_cast<u32*>(to), reinterpret_cast<const u32*>(from));
        for (int i = 0; i < COLUMNS; ++i) to[i] = from[min(i, columns - 1)];
    }
    __device__ float bias(i64 slot, int i) const {
        if (!all.biases_type || i >= columns) return 0;
        const i64 id = all.wide_ids ? static_cast<const i64*>(all.ids)[slot] : static_cast<const int*>(all.ids)[slot];
        return load_as(all.biases, all.biases_type, id * all.n + column + i);
    }
    __device__ void store(Out* to, const float (&sums)[COLUMNS]) const {
        alignas(16) Out made[COLUMNS];
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) made[i] = from_float<Out>(sums[i]);
        constexpr int WORDS = sizeof(Out) * COLUMNS / 4, AT_ONCE = WORDS < 4 ? WORDS : 4;
        if (whole(to)) {
#pragma unroll
            for (int i = 0; i < WORDS; i += AT_ONCE)
                load_words<AT_ONCE>(reinterpret_cast<u32*>(to) + i, reinterpret_cast<u32*>(made) + i);
            return;
        }
        for (int i = 0; i < columns; ++i) to[i] = made[i];
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
