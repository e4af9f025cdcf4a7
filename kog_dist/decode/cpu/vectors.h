/* Vectors of float32, as wide as the processor has them, for the products and the attention of CPU ranks. Every multiplication whose
   result is added is fused, and the order of sums is written down: so all instruction sets give the same bits. */
#ifndef KOG_VECTORS_H
#define KOG_VECTORS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <immintrin.h>
#endif

#if defined __AVX512F__
enum { kWidth = 16 };
#elif defined __FMA__
enum { kWidth = 8 };
#else
enum { kWidth = 4 };
#endif
enum { kSums = 16, kParts = kSums / kWidth }; /* whatever the width, sums are made of 16 side by side */

typedef float floats __attribute__((vector_size(4 * kWidth)));
typedef uint32_t words __attribute__((vector_size(4 * kWidth)));
typedef int32_t integers __attribute__((vector_size(4 * kWidth)));

typedef struct {
    floats part[kParts];
} sixteen;

static inline floats loaded(const float *at) {
    floats values;
    memcpy(&values, at, sizeof values);
    return values;
}
static inline void store(float *at, floats values) { memcpy(at, &values, sizeof values); }
/* The value, in a register: compilers rather load it anew for each use, which takes as long as what it is used for. */
static inline floats in_register(floats value) {
#if defined __AVX512F__
    __asm__("" : "+v"(value));
#elif defined __SSE2__ && defined __FMA__
    __asm__("" : "+x"(value));
#endif
    return value;
}
static inline floats all(float value) { return (floats){} + value; }

#if defined __SSE2__ && !defined __FMA__
/* product + addend, rounded to odd: rounding that to float is then as good as rounding the sum itself. */
static inline __m128d odd_sum(__m128d product, __m128d addend) {
    const __m128i one = _mm_set1_epi64x(1);
    const __m128d sum = _mm_add_pd(product, addend), other = _mm_sub_pd(sum, product);
    const __m128d error = _mm_add_pd(_mm_sub_pd(product, _mm_sub_pd(sum, other)), _mm_sub_pd(addend, other));
    const __m128d is_inexact = _mm_and_pd(_mm_cmpneq_pd(error, _mm_setzero_pd()), _mm_cmpord_pd(error, error));
    const __m128i bits = _mm_castpd_si128(sum), is_even = _mm_sub_epi64(_mm_and_si128(bits, one), one);
    const __m128i differ = _mm_srli_epi64(_mm_xor_si128(bits, _mm_castpd_si128(error)), 63); /* their signs: 1 */
    const __m128i change = _mm_sub_epi64(one, _mm_add_epi64(differ, differ));
    return _mm_castsi128_pd(_mm_add_epi64(bits, _mm_and_si128(change, _mm_and_si128(is_even, _mm_castpd_si128(is_inexact)))));
}
#endif

/* a * b + c, rounded once. */
static inline floats fused(floats a, floats b, floats c) {
#if defined __AVX512F__
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined __FMA__
    return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined __SSE2__
    const __m128 x = (__m128)a, y = (__m128)b, z = (__m128)c; /* a product of two floats is exact in double */
    const __m128d low = _mm_mul_pd(_mm_cvtps_pd(x), _mm_cvtps_pd(y));
    const __m128d high = _mm_mul_pd(_mm_cvtps_pd(_mm_movehl_ps(x, x)), _mm_cvtps_pd(_mm_movehl_ps(y, y)));
    const __m128 first = _mm_cvtpd_ps(odd_sum(low, _mm_cvtps_pd(z)));
    const __m128 second = _mm_cvtpd_ps(odd_sum(high, _mm_cvtps_pd(_mm_movehl_ps(z, z))));
    return (floats)_mm_movelh_ps(first, second);
#else
    floats sum;
    for (unsigned int i = 0; i < kWidth; ++i) sum[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return sum;
#endif
}

static inline floats chosen(integers mask, floats yes, floats no) {
    return (floats)((mask & (integers)yes) | (~mask & (integers)no));
}

/* exp, to about one unit in the last place; 0 below 2^-126. */
static inline floats exponential(floats x) {
    const floats magic = all(0x1.8p23f), least = all(-87.3f), most = all(89);
    const floats bounded = chosen(x > most, most, x); /* exp(89) is infinite */
    const floats shifted = fused(bounded, all(0x1.715476p0f), magic), n = shifted - magic;
    const floats rest = fused(n, all(0x1.bd0106p-13f), fused(n, all(-0x1.63p-1f), bounded));
    floats p = fused(all(1.9875691500e-4f), rest, all(1.3981999507e-3f));
    p = fused(p, rest, all(8.3334519073e-3f));
    p = fused(p, rest, all(4.1665795894e-2f));
    p = fused(p, rest, all(1.6666665459e-1f));
    p = fused(p, rest, all(5.0000001201e-1f));
    p = fused(p, rest * rest, rest) + 1.0f;
    const integers power = (integers)((words)shifted - (words)magic), half = power >> 1; /* 2^128 is no float: two factors */
    const floats scaled = p * (floats)((half + 127) << 23) * (floats)((power - half + 127) << 23);
    return chosen(x < least, all(0), scaled);
}

/* The sum of 16 values as a tree: those 8 apart first. */
static inline float total(sixteen sum) {
#if defined __AVX512F__
    floats v = sum.part[0];
    v += __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    return v[0] + v[1];
#else
    float v[kSums];
    memcpy(v, &sum, sizeof v);
    for (unsigned int half = kSums / 2; half; half /= 2)
        for (unsigned int i = 0; i < half; ++i) v[i] += v[i + half];
    return v[0];
#endif
}

#endif
