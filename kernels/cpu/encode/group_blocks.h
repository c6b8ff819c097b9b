// Encodes groups of two to eight bits a code, to nearest: the bytes of qgemm/codec/group_codes.py.
//
// Included by blocks.c, which defines job, not_finite_half and gather_bits.
#pragma once

// Packs bits shift to shift + part - 1 of each code of a group into a field, and returns the field's end.
INLINE uint8_t* pack_field(uint8_t* to, const uint8_t* codes, int weights, int part, int shift) {
    if (part == 1) {
        for (int i = 0; i < weights / 8; ++i) to[i] = gather_bits(codes + 8 * i, shift);
        return to + weights / 8;
    }
    const int bytes = weights * part / 8, mask = (1 << part) - 1;
    if (part == 8)
        for (int i = 0; i < bytes; ++i) to[i] = codes[i];
    else if (part == 4)
        for (int i = 0; i < bytes; ++i)
            to[i] = (uint8_t)((codes[i] >> shift & mask) | (codes[i + bytes] >> shift & mask) << 4);
    else
        for (int i = 0; i < bytes; ++i)
            to[i] = (uint8_t)((codes[i] >> shift & 3) | (codes[i + bytes] >> shift & 3) << 2 |
                              (codes[i + 2 * bytes] >> shift & 3) << 4 | (codes[i + 3 * bytes] >> shift & 3) << 6);
    return to + bytes;
}

INLINE float without_tiny(float d) { return fabsf(d) < 0x1p-125f ? 0 : d; }  // its reciprocal would overflow

// Encodes one group, with an integer zero or none. p: the number of bits, and the type of the scale.
INLINE int encode_group(uint8_t* to, const float* x, const job* p, int weights) {
    const int bits = p->group_bits, max_code = (1 << bits) - 1, middle = 1 << (bits - 1);
    const float largest = absmax(x, weights);
    uint8_t codes[256];
    float d, zero = 0;
    if (p->group_zero) {
        float least, greatest;
        find_range(x, weights, &least, &greatest);
        least = least < 0 ? least : 0, greatest = greatest > 0 ? greatest : 0;
        d = without_tiny((greatest - least) / (float)max_code);
        const float inverse = reciprocal(d), from_least = __builtin_ceilf(-least * inverse - 0.5f);
        zero = from_least < 0 ? 0 : from_least < 255 ? from_least : 255;
        for (int i = 0; i < weights; ++i) {
            const float place = x[i] * inverse + (zero + 0.5f);
            const int32_t code = truncate_to_code(place > 0 ? place : 0, max_code);
            codes[i] = (uint8_t)(d > 0 && x[i] == least ? 0 : code);
            if (d > 0 && x[i] == greatest) codes[i] = (uint8_t)max_code;
        }
    } else if (bits == 8) {
        d = without_tiny(largest / 127);
        const float inverse = reciprocal(d);
        for (int i = 0; i < weights; ++i)
            codes[i] = (uint8_t)(truncate_to_code(add_half_away(x[i] * inverse), 127) ^ 128);
    } else {
        d = without_tiny(signed_absmax(x, weights) / (float)-middle);
        const float inverse = reciprocal(d);
        for (int i = 0; i < weights; ++i)
            codes[i] = (uint8_t)truncate_to_code(x[i] * inverse + ((float)middle + 0.5f), max_code);
    }
    const uint32_t d_bits = (uint32_t)float_bits(d);
    const uint16_t stored = p->group_bf16 ? (uint16_t)((d_bits + 0x7fff + (d_bits >> 16 & 1)) >> 16) : float_to_half(d);
    memcpy(to, &stored, sizeof stored), to += sizeof stored;
    if (p->group_zero) *to++ = (uint8_t)zero;
    if (bits == 8)
        to = pack_field(to, codes, weights, 8, 0);
    else
        to = pack_field(to, codes, weights, bits < 4 ? 2 : 4, 0);
    if (bits == 6 || bits == 7) to = pack_field(to, codes, weights, 2, 4);
    if (bits != 8 && bits % 2) pack_field(to, codes, weights, 1, bits - 1);
    return !(largest < p->limit) | (!p->group_bf16 && not_finite_half(stored));
}

static int encode_groups(uint8_t* to, const float* x, const job* p) {
    switch (p->group_weights) {
        case 32:
            return encode_group(to, x, p, 32);
        case 64:
            return encode_group(to, x, p, 64);
        case 128:
            return encode_group(to, x, p, 128);
        default:
            return encode_group(to, x, p, 256);
    }
}
