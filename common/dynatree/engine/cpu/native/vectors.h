/* Vector types and operations for AVX2, AVX-512, and AVX-512 with bfloat16. */
#ifndef DYNATREE_VECTORS_H
#define DYNATREE_VECTORS_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#define ACROSS 4 /* vectors of each row of a block that are kept in registers */
#else
#define LANES 8
#define ACROSS 2
#endif

/* Unrolled loop with a small `count` that is known at compile time. */
#define EACH(i, count) _Pragma("GCC unroll 16") for (int i = 0; i < (count); i++)
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

enum dtype { FLOAT32, BFLOAT16, FLOAT16 };

/* 1 if an instruction adds the products of two pairs of bfloat16 numbers. */
#ifdef __AVX512BF16__
#define PAIRED 1
#else
#define PAIRED 0
#endif

INLINE int64_t size_of(int64_t dtype) { return dtype == FLOAT32 ? 4 : 2; }

INLINE vec splat(float x) { return x - (vec){0}; }

/* a * b + c, rounded once. It is explicit because compilers decide differently for each build, for example where only
 * one build vectorizes a loop, and results would differ. */
INLINE float fused_one(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
INLINE vec fused(vec a, vec b, vec c) {
#if LANES == 16
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#endif
}

/* Doubles, half as many as LANES. */
#define WIDE (LANES / 2)
typedef double wide __attribute__((vector_size(4 * LANES), aligned(8), may_alias));

INLINE wide wide_splat(double x) { return x - (wide){0}; }

INLINE double fused_double(double a, double b, double c) { return __builtin_fma(a, b, c); }
INLINE wide fused_wide(wide a, wide b, wide c) {
#if LANES == 16
    return (wide)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#else
    return (wide)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#endif
}

INLINE vec load(const void *from, int64_t dtype) {
#if LANES == 16
    if (dtype == BFLOAT16) return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(from)), 16);
    if (dtype == FLOAT16) return (vec)_mm512_cvtph_ps(_mm256_loadu_si256(from));
#else
    if (dtype == BFLOAT16) return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(from)), 16);
    if (dtype == FLOAT16) return (vec)_mm256_cvtph_ps(_mm_loadu_si128(from));
#endif
    return *(const vec *)from;
}

INLINE float load_one(const void *from, int64_t dtype) {
    uint32_t bits;
    float x;
    if (dtype == FLOAT32) return *(const float *)from;
    if (dtype == FLOAT16) return _cvtsh_ss(*(const uint16_t *)from);
    bits = (uint32_t)*(const uint16_t *)from << 16;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Store a number, rounded to nearest, ties to even. */
INLINE void store_one(void *to, float x, int64_t dtype) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (dtype == FLOAT32)
        *(float *)to = x;
    else if (dtype == FLOAT16)
        *(uint16_t *)to = _cvtss_sh(x, 0);
    else
        *(uint16_t *)to = x == x ? (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) : 0x7fc0;
}

/* Store a vector, each number rounded to nearest, ties to even. */
INLINE void store(void *to, vec x, int64_t dtype) {
    ivec bits = (ivec)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    if (dtype == BFLOAT16) bits = (rounded & (ivec)(x == x)) | (0x7fc0 & (ivec)(x != x));
#if LANES == 16
    if (dtype == BFLOAT16) _mm256_storeu_si256(to, _mm512_cvtepi32_epi16((__m512i)bits));
    if (dtype == FLOAT16) _mm256_storeu_si256(to, _mm512_cvtps_ph((__m512)x, 0));
#else
    __m256i low = _mm256_and_si256((__m256i)bits, _mm256_set1_epi32(0xffff));
    if (dtype == BFLOAT16)
        _mm_storeu_si128(to, _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1)));
    if (dtype == FLOAT16) _mm_storeu_si128(to, _mm256_cvtps_ph((__m256)x, 0));
#endif
    if (dtype == FLOAT32) *(vec *)to = x;
}

INLINE vec choose(ivec which, vec yes, vec no) { return (vec)(((ivec)yes & which) | ((ivec)no & ~which)); }

/* exp(x) for x <= 0, with an error of at most two units in the last place; 0 below the smallest normal number. */
INLINE vec exponential(vec x) {
    vec power = x * 1.44269504f; /* exponent to base 2 */
    vec kept = choose(power > -126.0f, power, splat(-126.0f));
    vec shifted = kept + 12582912.0f; /* 1.5 * 2^23; the sum is rounded to an integer */
    ivec whole = (ivec)shifted - (ivec)splat(12582912.0f);
    vec rest = kept - (shifted - 12582912.0f); /* in [-0.5, 0.5] */
    vec sum = splat(1.5353362e-4f);
    sum = fused(sum, rest, splat(1.3398874e-3f));
    sum = fused(sum, rest, splat(9.6184373e-3f));
    sum = fused(sum, rest, splat(5.5503324e-2f));
    sum = fused(sum, rest, splat(2.4022648e-1f));
    sum = fused(sum, rest, splat(6.9314720e-1f));
    sum = fused(sum, rest, splat(1.0f));
    return choose(power > -126.0f, (vec)((ivec)sum + (whole << 23)), splat(0.0f));
}

INLINE vec magnitude(vec x) { return (vec)((ivec)x & 0x7fffffff); }

/* tanh(x), with a relative error of at most 2e-7 (Moshier, Cephes, tanhf). */
INLINE vec tanh_of(vec x) {
    vec square = x * x, small = exponential(-2.0f * magnitude(x)), sum = splat(-5.70498872745e-3f);
    sum = fused(sum, square, splat(2.06390887954e-2f));
    sum = fused(sum, square, splat(-5.37397155531e-2f));
    sum = fused(sum, square, splat(1.33314422036e-1f));
    sum = fused(sum, square, splat(-3.33332819422e-1f));
    vec large = (1.0f - small) / (1.0f + small);
    return choose(magnitude(x) > 0.625f, choose(x < 0.0f, -large, large), fused(sum * square, x, x));
}

/* sum + a * b. If `paired`, each lane of a and b holds two bfloat16 numbers, and both products are added. */
INLINE vec multiplied(vec sum, vec a, vec b, int paired) {
#ifdef __AVX512BF16__
    if (paired) return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    (void)paired;
#endif
    /* -ffp-contract=fast fuses this into one rounding; with `fused`, gcc keeps fewer sums in AVX2's registers. */
    return sum + a * b;
}

#endif
