// A tile as it lies in memory: the codes of its spans of SPAN_COLUMNS columns, then its fields per block. See
// qgemm/cuda/layout/tile.py; the spans and the fields are generated from it, the functions on them are the format's header.
#pragma once

#include "fragment.cuh"

using Format = FormatOf<WARPS>;

constexpr int TILE_COLUMNS = SPANS * SPAN_COLUMNS;
constexpr int SPAN_STEPS = SPAN_COLUMNS / 16;
constexpr int SPAN_SCALES = SPAN_COLUMNS / Format::GROUP;  // of a row
constexpr int SCALE_STEPS = Format::GROUP / 16;            // steps that share a scale

struct Tile {
    SpanOf<WARPS> spans[SPANS];
    Format fields;
};
