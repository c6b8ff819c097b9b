// What a kernel does with a float sum: y = sum + bias + residual, the last two optional, of types that the host chooses.
#pragma once

#include "types.cuh"

// An array of a type that is known at run time, or none. The codes are TYPE_CODES of qgemm/products.py.
struct Array {
    void* data;
    i64 type;

    __device__ float operator[](i64 i) const {
        switch (type) {
            case 1:
                return static_cast<const float*>(data)[i];
            case 2:
                return to_float(static_cast<const half*>(data)[i]);
            case 3:
                return to_float(static_cast<const bf16*>(data)[i]);
            default:
                return 0;
        }
    }
    __device__ void store(i64 i, float value) const {
        switch (type) {
            case 1:
                static_cast<float*>(data)[i] = value;
                break;
            case 2:
                static_cast<half*>(data)[i] = from_float<half>(value);
                break;
            case 3:
                static_cast<bf16*>(data)[i] = from_float<bf16>(value);
        }
    }
    // Whether all rows of n elements of type T start at a multiple of 16 bytes.
    template <class T>
    __device__ bool aligned(i64 n) const {
        return (reinterpret_cast<i64>(data) | n * i64(sizeof(T))) % 16 == 0;
    }
};

struct Outputs {
    Array y;         // [m, n]
    Array bias;      // [n]
    Array residual;  // [m, n]; it may be y

    __device__ bool adds() const { return bias.type || residual.type; }
    // A sum of row `row` of W for the token whose outputs start at index `token` of y.
    __device__ void store(i64 token, i64 row, float sum) const {
        if (bias.type) sum += bias[row];
        if (residual.type) sum += residual[token + row];
        y.store(token + row, sum);
    }
};
