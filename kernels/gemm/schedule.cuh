// Stream-K: a persistent grid of CTAs takes whole tiles of y round-robin and splits the rest along K, so that all
// finish together. Sizes alone decide which CTA computes what, so that partial sums are added in the same order every
// time.
#pragma once

#include "host.cuh"

namespace qgemm {

// number / by, for numbers from 0 to 2^31 - 1.
__device__ inline int divide(int number, const Divisor& by) { return __umulhi(2 * u32(number), by.factor) >> by.shift; }

// Work units first .. end - 1 along K of one tile of y.
struct WorkTile {
    int tile, first, end;
};

// The CTAs first .. first + count - 1 that share a tile of y, in the order of K. The finalizer, which has its end, sums
// all partials. Clustered: each CTA of a pair reduces half of the epilogue tiles, and the last pair finalizes.
template <int EPI_TILES>
struct TilePeers {
    static constexpr u32 ALL = (1u << EPI_TILES) - 1, HALF = (1u << (EPI_TILES + 1) / 2) - 1;  // a bit an epilogue tile
    int first, count;
    bool clustered = false;
    __device__ int step() const { return clustered ? 2 : 1; }
    __device__ bool is_finalizer(int cta) const { return cta + step() >= first + count; }
    __device__ u32 epi_tiles_of(int cta) const { return !clustered ? ALL : cta % 2 ? ALL & ~HALF : HALF; }
};

// The work tiles of a CTA. It goes through its segment backwards: the start of a tile, whose rest is the next CTA's,
// comes first; the rest of a tile that the CTA before has started comes last, when that has long stored its partials.
struct TileScheduler {
    const StreamK& stream_k;
    int work_units;  // of a tile, along K
    int next;        // number of the next whole tile
    int begin, end;  // what is left of the segment, in work units from the start of tile `whole_tiles`

    __device__ TileScheduler(const StreamK& stream_k, int work_units)
        : stream_k(stream_k),
          work_units(work_units),
          next(blockIdx.x),
          begin(begin_of(blockIdx.x)),
          end(begin_of(blockIdx.x + 1)) {}

    // The first of the split work units of a CTA: all of them * cta / CTAs.
    __device__ int begin_of(u32 cta) const {
        return stream_k.units_per_cta * cta + divide(stream_k.remainder * cta, stream_k.ctas);
    }

    // The CTAs that share a tile of which this CTA has a part.
    template <int EPI_TILES>
    __device__ TilePeers<EPI_TILES> peers(const WorkTile& s) const {
        const int me = blockIdx.x, start = (s.tile - stream_k.whole_tiles) * work_units;
        if (start < 0) return {me, 1};
        if (stream_k.cluster_split_k)
            return {me / stream_k.cluster_split_k * stream_k.cluster_split_k, stream_k.cluster_split_k, true};
        int first = me, last = me;
        while (begin_of(first) > start) --first;
        while (begin_of(last + 1) < start + work_units) ++last;
        return {first, last - first + 1};
    }

    // False if there is no further work tile.
    __device__ bool fetch(WorkTile& s) {
        if (begin < end) {
            const int tile = divide(end - 1, stream_k.work_units);
            s = {stream_k.whole_tiles + tile, max(begin - tile * work_units, 0), end - tile * work_units};
            end = tile * work_units + s.first;
            return true;
        }
        s = {next, 0, work_units};
        next += gridDim.x;
        return s.tile < stream_k.whole_tiles;
    }
};

}  // namespace qgemm
