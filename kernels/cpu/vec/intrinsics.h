// The intrinsics of AVX2, F16C, FMA and AVX-VNNI, or of all extensions where the target has AVX-512. <immintrin.h> has
// all of them, ten times the text: GCC needs 0.6 s to read it, as long as to compile the activations.
#pragma once

#if defined(__AVX512F__) || defined(_WIN32) || !__has_include(<avx2intrin.h>)
#include <immintrin.h>
#else
#define _IMMINTRIN_H_INCLUDED  // for GCC, whose headers of extensions refuse to be included from elsewhere
#define __IMMINTRIN_H          // for clang, whose do so too
#include <smmintrin.h>
//
#include <avxintrin.h>
//
#include <avx2intrin.h>
#include <f16cintrin.h>
#include <fmaintrin.h>
#if __has_include(<avxvnniintrin.h>)
#include <avxvnniintrin.h>
#endif
#endif
