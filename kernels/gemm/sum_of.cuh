// The type of sums of products of bytes: int of signed bytes, float of e4m3.
#pragma once

namespace qgemm {

template <bool E4M3>
struct SumOf {
    using Type = int;
};
template <>
struct SumOf<true> {
    using Type = float;
};

}  // namespace qgemm
