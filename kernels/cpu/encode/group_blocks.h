// Groups of two to eight bits a code: the encoders of qgemm/codec/group_codes.py to nearest, byte for byte.
//
// For blocks.c, whose job, endless and bits_of_bytes it takes.
#pragma once

// Codes below 2^part of a group as a field, their lowest bits above `shift` -> the end of the field.
INLINE uint8_t* pack_field(uint8_t* to, const uint8_t* codes, int weights, int part, int shift) {
    if (part == 1) {
        for (int i = 0; i < weights / 8; ++i) to[i] = bits_of_bytes(codes + 8 * i, shift);
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

INLINE float without_tiny(float d) { return fabsf(d) < 0x1p-125f ? 0 : d; }  // whose reciprocal overflows

// A group of two to eight bits, with an integer zero or none; p: how many bits and weights, and which scale.
INLINE int encode_group(uint8_t* to, const float* x, const job* p, int weights) {
    const int bits = p->group_bits, most = (1 << bits) - 1, middle = 1 << (bits - 1);
    const float largest = absmax(x, weights);
    uint8_t codes[256];
    float d, zero = 0;
    if (p->group_zero) {
        float least, greatest;
        range_of(x, weights, &least, &greatest);
        least = least < 0 ? least : 0, greatest = greatest > 0 ? greatest : 0;
        d = without_tiny((greatest - least) / (float)most);
        const float inverse = reciprocal(d), from_least = __builtin_ceilf(-least * inverse - 0.5f);
        zero = from_least < 0 ? 0 : from_least < 255 ? from_least : 255;
        for (int i = 0; i < weights; ++i) {
            const float place = x[i] * inverse + (zero + 0.5f);
            const int32_t code = code_of(place > 0 ? place : 0, most);
            codes[i] = (uint8_t)(d > 0 && x[i] == least ? 0 : code);
            if (d > 0 && x[i] == greatest) codes[i] = (uint8_t)most;
        }
    } else if (bits == 8) {
        d = without_tiny(largest / 127);
        const float inverse = reciprocal(d);
        for (int i = 0; i < weights; ++i) codes[i] = (uint8_t)(code_of(away_from_0(x[i] * inverse), 127) ^ 128);
    } else {
        d = without_tiny(signed_absmax(x, weights) / (float)-middle);
        const float inverse = reciprocal(d);
        for (int i = 0; i < weights; ++i) codes[i] = (uint8_t)code_of(x[i] * inverse + ((float)middle + 0.5f), most);
    }
    const uint32_t of_d = (uint32_t)float_bits(d);
    const uint16_t stored = p->group_bf16 ? (uint16_t)((of_d + 0x7fff + (of_d >> 16 & 1)) >> 16) : float_to_half(d);
    memcpy(to, &stored, sizeof stored), to += sizeof stored;
    if (p->group_zero) *to++ = (uint8_t)zero;
    if (bits == 8)
        to = pack_field(to, codes, weights, 8, 0);
    else
        to = pack_field(to, codes, weights, bits < 4 ? 2 : 4, 0);
    if (bits == 6 || bits == 7) to = pack_field(to, codes, weights, 2, 4);
    if (bits != 8 && bits % 2) pack_field(to, codes, weights, 1, bits - 1);
    return !(largest < p->limit) | (!p->group_bf16 && endless(stored));
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
