// y for rows of x from `token` on by rows first to last - 1 of W: four rows of x at a time, then two, then one. Defines
// multiply_rows_DIGITS, and by ROWS_HEADER the functions rows_DIGITS_TOKENS for each number of rows.
//
// Macros:
//
// DIGITS        int8 digits of x; 0: floats; lanes_1, lanes_3: one and three digits by interleaved weights
// MAX_TOKENS    the largest number of rows of x at a time, 4, 2 or 1
// ROWS_HEADER   defines ROWS_NAME(rows), the product of TOKENS rows of x
#ifndef ROWS_NAME
#define ROWS_NAME(name) JOIN_3(name, DIGITS, TOKENS)
#define JOIN_2(name, digits) JOIN_2_(name, digits)
#define JOIN_2_(name, digits) name##_##digits
#define JOIN_3(name, digits, tokens) JOIN_3_(name, digits, tokens)
#define JOIN_3_(name, digits, tokens) name##_##digits##_##tokens
#endif

#if MAX_TOKENS == 4
#define TOKENS 4
#include ROWS_HEADER
#undef TOKENS
#endif
#if MAX_TOKENS >= 2
#define TOKENS 2
#include ROWS_HEADER
#undef TOKENS
#endif
#define TOKENS 1
#include ROWS_HEADER
#undef TOKENS

INLINE void JOIN_2(multiply_rows, DIGITS)(const product* p, int64_t token, int64_t first, int64_t last) {
#if MAX_TOKENS == 4
    for (; token + 4 <= p->m; token += 4) JOIN_3(rows, DIGITS, 4)(p, token, first, last);
#endif
#if MAX_TOKENS >= 2
    for (; token + 2 <= p->m; token += 2) JOIN_3(rows, DIGITS, 2)(p, token, first, last);
#endif
    for (; token < p->m; ++token) JOIN_3(rows, DIGITS, 1)(p, token, first, last);
}
