// How the CTAs of a persistent grid share tiles of y: whole tiles in turn, and the rest cut along K so that all finish
// together (stream-K). Which CTA takes what depends on the sizes alone, so sums are added in the same order every time.
#pragma once

#include "types.cuh"

// Part of the sum over K of one tile, in units along K.
struct Segment {
    int tile, first, last;
};

// The segments of one CTA. Tiles from `whole` on are laid end to end and cut into a piece for each CTA, which goes
// through its piece backwards: the start of a tile whose rest the next CTA has is done first, the rest of one that the
// CTA before has begun last, when that one has long stored its part.
struct Segments {
    int units;       // along K, of a tile
    int begin, end;  // what is left of the piece, in units from the start of tile `whole`
    int whole, next;

    __device__ static int begin_of(int cta, int tiles, int units) { return int(i64(cta) * tiles * units / gridDim.x); }

    __device__ Segments(int tiles, int units, int whole)
        : units(units),
          begin(begin_of(blockIdx.x, tiles - whole, units)),
          end(begin_of(blockIdx.x + 1, tiles - whole, units)),
          whole(whole),
          next(blockIdx.x) {}

    __device__ bool take(Segment& s) {
        if (begin < end) {
            const int tile = (end - 1) / units;
            s = {whole + tile, max(begin - tile * units, 0), end - tile * units};
            end = tile * units + s.first;
            return true;
        }
        s = {next, 0, units};
        next += gridDim.x;
        return s.tile < whole;
    }
};

// Partial sums of the strips of each CTA in global memory, and flags that say they are complete. The flags are zero
// before the first kernel, and every kernel leaves them so.
struct alignas(16) Workspace {
    u32 flags[MOST_PARTS];
    __device__ float4* parts() { return reinterpret_cast<float4*>(this + 1); }
};

__device__ inline void raise_flag(u32* flag) {
    asm volatile("fence.acq_rel.gpu; st.relaxed.gpu.global.u32 [%0], 1;" ::"l"(flag) : "memory");
}

__device__ inline void await_flag(u32* flag) {
    u32 raised;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(raised) : "l"(flag) : "memory");
    } while (!raised);
    *flag = 0;
}
