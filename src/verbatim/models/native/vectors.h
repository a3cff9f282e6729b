/* Vectors of floats as wide as the processor's registers, and functions on them. */

#ifndef VERBATIM_VECTORS_H
#define VERBATIM_VECTORS_H

#include <math.h>
#include <stdint.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float vf __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t vi __attribute__((vector_size(4 * LANES), aligned(4)));

#define ALIGNED __attribute__((aligned(64)))
#define INLINE static inline __attribute__((always_inline))

INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vi splat_int(int32_t x) { return x - (vi){0}; }
INLINE vf choose(vi yes, vf a, vf b) { return (vf)((yes & (vi)a) | (~yes & (vi)b)); }

/* exp: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]; exactly 0 below -87; NaN stays NaN. ln 2 is subtracted in two
   parts: n times the first part is exact, and the second part adds the bits that a single float lacks. */
#if defined(__AVX512F__)
INLINE vf larger(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vf exponential(vf x) {
    __mmask16 some = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
    vf n = (vf)_mm512_roundscale_ps((__m512)(x * 1.44269504f), 8);
    vf f = x - n * 0.693359375f;
    f = f - n * -2.12194440e-4f;
    vf p = splat(1.3981999507e-3f);
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * f + 1.0f;
    p = p * f + 1.0f;
    return (vf)_mm512_maskz_scalef_ps(some, (__m512)p, (__m512)n);
}
#else
INLINE vf larger(vf a, vf b) { return choose(a > b, a, b); }
INLINE vf exponential(vf x) {
    const float shift = 12582912.0f; /* 1.5 * 2^23: rounds to the nearest integer */
    vf none = (vf)(x < -87.0f);
    x = choose(x > 88.0f, splat(88.0f), x);
    x = choose((vi)none, splat(-87.0f), x);
    vf n = (x * 1.44269504f + shift) - shift;
    vf f = x - n * 0.693359375f;
    f = f - n * -2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * f * f + f + 1.0f;
    vi power = (__builtin_convertvector(n, vi) + 127) << 23;
    return choose((vi)none, splat(0.0f), p * (vf)power);
}
#endif

INLINE float total(vf x) {
    float sum = 0.0f;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}

#endif
