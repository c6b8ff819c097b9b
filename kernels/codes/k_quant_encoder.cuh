// Kinds of K-quants: parameters of their encoders (group_encoder.cuh) and the bytes of their blocks. Twins of KIND and
// `pack` in qgemm/formats/qN_k.py.
#pragma once

#include "codes/group_encoder.cuh"

namespace qgemm {

// Scales and minimums of 6 bits of eight groups in 12 bytes, as q4_k and q5_k have them.
__device__ inline void write_sixes(u8 (&scales)[12], int sc, int m) {
    using Lanes = GroupLanes<8>;
    const int group = Lanes::group(), upper_sc = Lanes::of(sc, group + 4), upper_m = Lanes::of(m, group + 4);
    if (group >= 4) return;
    scales[group] = sc | upper_sc >> 4 << 6;
    scales[4 + group] = m | upper_m >> 4 << 6;
    scales[8 + group] = (upper_sc & 15) | (upper_m & 15) << 4;
}

// The integer of a group that these bytes return: bits above six end up in the group four further.
__device__ inline int stored_six(int own) {
    using Lanes = GroupLanes<8>;
    const int group = Lanes::group(), other = Lanes::of(own, group ^ 4);
    const bool upper = group >= 4;
    const int packed = ((upper ? other : own) | (upper ? own : other) >> 4 << 6) & 0xff;
    return upper ? (own & 15) | packed >> 6 << 4 : packed & 63;
}

// store(sc, m) replaces an sc or m beyond MAX_SCALE, which can occur where all weights are 0, by the integer that a
// block returns.
struct Q2KKind {
    static constexpr int MOST = 3, GROUPS = 16, MAX_SCALE = 15, TRIES = 16, MEANS = 1;
    static constexpr float FIRST = -0.5f, STEP = 0.1f;
    static constexpr bool ABSOLUTE = true, ROOTED = false;

    static __device__ void store(int& sc, int& m) {
        const int both = (sc | m << 4) & 0xff;
        sc = both & 15, m = both >> 4;
    }
    template <class Block>
    static __device__ void write(Block& block, const u8* codes, int sc, int m) {
        write_planes<2, 0, 32, 64, GROUPS>(block.qs, codes);
        block.scales[GroupLanes<GROUPS>::group()] = sc | m << 4;
    }
};

struct Q4KKind {
    static constexpr int MOST = 15, GROUPS = 8, MAX_SCALE = 63, TRIES = 21, MEANS = 2;
    static constexpr float FIRST = -1, STEP = 0.1f;
    static constexpr bool ABSOLUTE = false, ROOTED = true;

    static __device__ void store(int& sc, int& m) { sc = stored_six(sc), m = stored_six(m); }
    template <class Block>
    static __device__ void write(Block& block, const u8* codes, int sc, int m) {
        write_planes<4, 0, 32, 128, GROUPS>(block.qs, codes);
        write_sixes(block.scales, sc, m);
    }
};

struct Q5KKind {
    static constexpr int MOST = 31, GROUPS = 8, MAX_SCALE = 63, TRIES = 16, MEANS = 2;
    static constexpr float FIRST = -0.5f, STEP = 0.1f;
    static constexpr bool ABSOLUTE = false, ROOTED = true;

    static __device__ void store(int& sc, int& m) { sc = min(sc, MAX_SCALE), m = min(m, MAX_SCALE); }
    template <class Block>
    static __device__ void write(Block& block, const u8* codes, int sc, int m) {
        write_planes<4, 0, 32, 128, GROUPS>(block.qs, codes);
        write_planes<1, 4, 32, 32, GROUPS>(block.qh, codes);
        write_sixes(block.scales, sc, m);
    }
};

struct Q3KKind {
    static constexpr int GROUPS = 16, ZERO = 4, MAX_SCALE = 32, MEANS = 2, EMPTY = -MAX_SCALE;
    static constexpr float LEAST = 1e-45f;
    static constexpr bool MOVED = true;

    template <class Block>
    static __device__ void write(Block& block, const u8* codes, int sc) {
        using Lanes = GroupLanes<GROUPS>;
        write_planes<2, 0, 32, 64, GROUPS>(block.qs, codes);
        write_planes<1, 2, 32, 32, GROUPS>(block.hmask, codes);
        const int group = Lanes::group(), biased = sc + MAX_SCALE, opposite = Lanes::of(biased, group + 8);
        u32 high = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) high |= u32(Lanes::of(biased, group % 4 + 4 * i) >> 4) << 2 * i;
        if (group < 8) block.scales[group] = (biased & 15) | (opposite & 15) << 4;
        if (group < 4) block.scales[8 + group] = high;
    }
};

struct Q6KKind {
    static constexpr int GROUPS = 16, ZERO = 32, MAX_SCALE = 128, MEANS = -1, EMPTY = 0;
    static constexpr float LEAST = 1e-15f;
    static constexpr bool MOVED = false;

    template <class Block>
    static __device__ void write(Block& block, const u8* codes, int sc) {
        write_planes<4, 0, 64, 128, GROUPS>(block.ql, codes);
        write_planes<2, 4, 32, 64, GROUPS>(block.qh, codes);
        block.scales[GroupLanes<GROUPS>::group()] = sc;
    }
};

}  // namespace qgemm
