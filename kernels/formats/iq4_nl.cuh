// iq4_nl:  w = d * value(q),  q in 0..15.       Twin of qgemm/formats/iq4_nl.py.
#pragma once

#include "codes/half_scales.cuh"
#include "codes/iq4_encoder.cuh"
#include "codes/iq4_values.cuh"
#include "tiles/iq4_nl.cuh"

namespace qgemm {

template <int M16_TILES>
struct iq4_nl : Iq4Values<HalfScales<iq4_nl_fields<M16_TILES>>> {
    template <bool WEIGHTED>
    using GroupEncoder = Iq4Block<WEIGHTED>;
};

}  // namespace qgemm
