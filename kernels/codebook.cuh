// What the formats with a codebook share: w = absmax * codebook[q].
//
// Levels are looked up two or four at a time in a table in shared memory, rounded to the type of the tensor cores' operand
// (half: 2^-11 of a level at most, times a power of two that brings them into its range). A kernel that asks for them
// leaves the first TABLE_BYTES of its dynamic memory to the table and begins with fill_table(). `levels` are exact.
#pragma once

#include "fragment.cuh"

// An absmax of one byte. Exponent and mantissa stand as in a float but for the bias; without an exponent the leading one
// is taken off again.
__device__ inline float from_e4m4(u32 code) {
    const bool tiny = code < 16;
    return __uint_as_float((code << 19) + ((tiny ? 117 : 116) << 23)) - (tiny ? 0x1p-10f : 0.0f);
}
__device__ inline float2 row_pair(const u8 (&pair)[2]) { return {from_e4m4(pair[0]), from_e4m4(pair[1])}; }

template <class Fields, class Book>
struct Codebook : Fields {
    using Codes = typename Fields::Codes;
    static constexpr int ZERO = 0;
    static constexpr bool HAS_MINIMUM = false;
    static constexpr int RAW_ZERO = 0, RAW_EXPONENT = Book::EXPONENT, RAW_SHIFT = 0;

    static __device__ Fragment raw(const Codes& codes, int step) {
        Fragment f;
        u32(&a)[4] = reinterpret_cast<u32(&)[4]>(f.a);
#pragma unroll
        for (int i = 0; i < 4; i += WORDS)
            load_words<WORDS>(a + i, reinterpret_cast<const u32*>(table() + offset(codes, (4 * step + i) / WORDS)));
        return f;
    }
    static __device__ Fragment fragment(const Codes& codes, int step) { return raw(codes, step); }
    // As floats, from memory.
    static __device__ Levels levels(const Codes& codes, int step) {
        Levels found;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 at = offset(codes, (4 * step + i) / WORDS) >> ROW_BITS;
            const u32 pair = at >> (i % WORDS * PAIR_BITS);
            found.a[i] = {Book::level(pair % Book::CODES), Book::level(pair / Book::CODES % Book::CODES)};
        }
        return found;
    }
    __device__ float2 scale(int group, int g, int block) const { return row_pair(this->absmax[group][g][block]); }
    __device__ float2 minimum(int, int, int) const { return {}; }

    // Levels times 2^-exponent, by all threads of a CTA, which must meet before they look anything up.
    template <class T>
    static __device__ void fill_table(int exponent) {
        const float factor = two_to(-exponent);
        constexpr int PER_ENTRY = (1 << ROW_BITS) / 16;  // stores of 16 bytes
        uint4* to = reinterpret_cast<uint4*>(table());
        for (int i = threadIdx.x; i < PER_ENTRY << Book::INDEX_BITS; i += blockDim.x) {
            const u32 index = i / PER_ENTRY;
            const u32 first = pair_of<T>(index, factor);
            const u32 last = WORDS == 1 ? first : pair_of<T>(index >> PAIR_BITS, factor);
            to[i] = {first, last, first, last};
        }
    }

private:
    static constexpr int BITS = sizeof(Codes::planes) / 4, PAIR_BITS = 2 * BITS;
    static constexpr int WORDS = Book::INDEX_BITS / PAIR_BITS;  // of an entry, two levels each
    static constexpr int PER_WORD = 32 / Book::INDEX_BITS, WHOLE = PER_WORD * BITS;  // indices within one word
    // The bytes of an entry's copies, as a power of two: the index stands above so many bits of an offset.
    static constexpr int ROW_BITS = Book::COPIES * WORDS == 32 ? 7 : 6;
    static_assert(4 * WORDS * Book::COPIES == 1 << ROW_BITS, "copies of an entry lie in one row or half a row of banks");

    static __device__ unsigned char* table() {
        extern __shared__ __align__(128) unsigned char memory[];
        return memory;
    }
    static __device__ u32 lane() {
        u32 lane;
        asm("mov.u32 %0, %%laneid;" : "=r"(lane));
        return lane;
    }
    // Where in the table this lane finds its entry of number i.
    static __device__ u32 offset(const Codes& codes, int i) {
        const u32 copy = lane() % Book::COPIES * (4 * WORDS);
        if (i < WHOLE) return moved<Book::INDEX_BITS>(codes.planes[i / PER_WORD], i % PER_WORD * Book::INDEX_BITS, 0) | copy;
        u32 found = copy;
#pragma unroll
        for (int word = 0; word < BITS; ++word) found |= moved<2>(codes.planes[word], 30, 2 * word);
        return found;
    }
    // COUNT bits of a word as bits of an index, in its place in an offset.
    template <int COUNT>
    static __device__ u32 moved(u32 word, int from, int to) {
        to += ROW_BITS;
        return (from > to ? word >> (from - to) : word << (to - from)) & (((1u << COUNT) - 1) << to);
    }
    // Two levels, of codes one above the other.
    template <class T>
    static __device__ u32 pair_of(u32 pair, float factor) {
        alignas(4) T both[2] = {from_float<T>(factor * Book::level(pair % Book::CODES)),
                                from_float<T>(factor * Book::level(pair / Book::CODES % Book::CODES))};
        return *reinterpret_cast<u32*>(both);
    }
};
