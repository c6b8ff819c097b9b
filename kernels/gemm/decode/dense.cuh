// Grouping of decode: up to MAX_PRODUCTS products by matrices W that share x and a launch; y = epilogue(x @ W.T).
//
// The CTAs of a product follow those of the product before it. GATED: two products, the first of which is the gate of
// the second; each CTA has the same rows of both, and stores gate(first) * second alone.
// Config: Decode of config.cuh.
#pragma once

#include "policies.cuh"
#include "reduce.cuh"

namespace qgemm {

template <class Config>
struct StoreProducts {
    const WarpCoord<Config>& coord;

    __device__ void begin() {}
    template <class Sums>
    __device__ void operator()(int token, i64 row, Sums sums) const {
        const Epilogue epilogue = epilogue_of(coord.index);
        const i64 first = token * coord.products.of[coord.index].n;
        if constexpr (Config::GATED) {
            const float up = epilogue_of(1).biased(row, sums(1));
            const float y = gated(epilogue.types.gate, epilogue.biased(row, sums(0)), up);
            store_as(epilogue.arrays.y, epilogue.types.y, first + row, y);
        } else {
            epilogue.store(first, row, sums(0));
        }
    }
    __device__ Epilogue epilogue_of(int index) const {
        return {{coord.products.arrays[index].outputs, coord.products.of[index].types}};
    }
};

struct DenseProducts {
    using Arguments = Products;

    template <class Config>
    static __device__ __forceinline__ void run(const Products& products, unsigned char* memory,
                                               unsigned long long (&mbarriers)[Config::WARP_SPLIT_K][Config::STAGES]) {
        static_assert(!Config::SUMMED, "a sum over experts has slots");
        const WarpCoord<Config> coord(products);
        Config::Mainloop::template run<Config>(coord, static_cast<const typename Config::In*>(products.x),
                                               int(products.m), memory, mbarriers, StoreProducts<Config>{coord});
    }
};

}  // namespace qgemm
