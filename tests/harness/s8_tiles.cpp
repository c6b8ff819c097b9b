// The order of gemm_sm90_s8 on the host: tiles of y as clusters take them, units of W as makers do.
#include "gemm/sm90/s8_tiles.cuh"

using namespace qgemm;

// Tiles in order -> their number.
extern "C" int s8_tiles(const S8Sizes& size, S8Tile* found) {
    for (int i = 0; i < S8Tile::count(size); ++i) found[i] = S8Tile::at(size, i);
    return S8Tile::count(size);
}

// The units that a warp makes which takes every step-th from `first` on, the last one once more at the end -> their number.
extern "C" int s8_units(const S8Sizes& size, unsigned first, unsigned step, S8Unit* found) {
    S8UnitCursor<2, 8> cursor(size);
    int count = 0;
    for (unsigned number = first; number < cursor.count(size); number += step)
        found[count++] = cursor.advance(number, size);
    found[count] = cursor.advance(cursor.count(size) + step, size);
    return count;
}
