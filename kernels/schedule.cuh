// How the CTAs of a persistent grid share tiles of y: whole tiles in turn, and the rest cut along K so that all finish
// together (stream-K). Which CTA takes what depends on the sizes alone, so sums are added in the same order every time.
#pragma once

#include "types.cuh"

// Part of the sum over K of one tile, in units along K.
struct WorkTile {
    int tile, first, end;
};

// The CTAs that share a tile. That which has the end of it, and is the last to finish, adds up what all have; or, of
// pairs of CTAs that have added up a half each, both of the last pair do so.
struct TilePeers {
    // Epilogue tiles, a bit for each.
    static constexpr u32 ALL = (1u << EPI_TILES) - 1, HALF = (1u << (EPI_TILES + 1) / 2) - 1;
    int first, count;
    bool clustered = false;
    __device__ int step() const { return clustered ? 2 : 1; }
    __device__ bool is_finalizer(int cta) const { return cta + step() >= first + count; }
    __device__ u32 epi_tiles_of(int cta) const { return !clustered ? ALL : cta % 2 ? ALL & ~HALF : HALF; }
};

// Divides numbers from 0 to 2^31 - 1 by one that the host knows: `factor` is 2^(31 + shift) by it, rounded up.
struct Divisor {
    u32 factor, shift;
    __device__ int divide(int number) const { return __umulhi(2 * u32(number), factor) >> shift; }
};

// Tiles from `whole_tiles` on are laid end to end and cut into a piece for each CTA. cluster_split_k: pieces of each
// tile, an even number of equal ones, whose CTAs are pairs; or 0. units_per_cta, remainder: units along K of all that
// is cut / CTAs. The divisors: CTAs, units of a tile, tiles of y side by side.
struct StreamK {
    int whole_tiles, cluster_split_k;
    u32 units_per_cta, remainder;
    Divisor ctas, work_units, row_tiles;
};

// The segments of one CTA, which goes through its piece backwards: the start of a tile whose rest the next CTA has is
// done first, the rest of one that the CTA before has begun last, when that one has long stored its part.
struct TileScheduler {
    const StreamK& stream_k;
    int work_units;  // along K, of a tile
    int next;
    int begin, end;  // what is left of the piece, in units from the start of tile `whole_tiles`

    __device__ TileScheduler(const StreamK& stream_k, int work_units)
        : stream_k(stream_k),
          work_units(work_units),
          next(blockIdx.x),
          begin(begin_of(blockIdx.x)),
          end(begin_of(blockIdx.x + 1)) {}

    // Units of all that is cut * cta / CTAs.
    __device__ int begin_of(u32 cta) const {
        return stream_k.units_per_cta * cta + stream_k.ctas.divide(stream_k.remainder * cta);
    }

    // Of a tile of which this CTA has a segment.
    __device__ TilePeers peers(const WorkTile& s) const {
        const int me = blockIdx.x, start = (s.tile - stream_k.whole_tiles) * work_units;
        if (start < 0) return {me, 1};
        if (stream_k.cluster_split_k)
            return {me / stream_k.cluster_split_k * stream_k.cluster_split_k, stream_k.cluster_split_k, true};
        int first = me, last = me;
        while (begin_of(first) > start) --first;
        while (begin_of(last + 1) < start + work_units) ++last;
        return {first, last - first + 1};
    }

    __device__ bool fetch(WorkTile& s) {
        if (begin < end) {
            const int tile = stream_k.work_units.divide(end - 1);
            s = {stream_k.whole_tiles + tile, max(begin - tile * work_units, 0), end - tile * work_units};
            end = tile * work_units + s.first;
            return true;
        }
        s = {next, 0, work_units};
        next += gridDim.x;
        return s.tile < stream_k.whole_tiles;
    }
};

// Partial sums of the row_blocks of each CTA in global memory, and flags that say they are complete. The flags are zero
// before the first kernel, and every kernel leaves them so.
struct alignas(16) Workspace {
    u32 flags[MAX_PARTIALS];
    __device__ float4* partials() { return reinterpret_cast<float4*>(this + 1); }
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
