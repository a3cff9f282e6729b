/* The parts of decoder layers that are not matrix products, forward and backward, each in one pass over its data. */

#include <string.h>

#include "vectors.h"

#define AT(array, i) (*(vf *)((array) + (i)))
#define READ(array, i) (*(const vf *)((array) + (i)))

/* out = x r weight with r = 1 / sqrt(mean(x^2) + eps), for rows of `size` numbers, a multiple of 16. Saves r. */
void norm_forward(int64_t rows, int64_t size, float eps, const float *x, const float *weight, float *out, float *scales) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const float *from = x + row * size;
        float *to = out + row * size;
        vf sum = splat(0.0f);
        for (int64_t i = 0; i < size; i += LANES) sum += READ(from, i) * READ(from, i);
        float scale = 1.0f / sqrtf(total(sum) / (float)size + eps);
        scales[row] = scale;
        for (int64_t i = 0; i < size; i += LANES) AT(to, i) = READ(from, i) * scale * READ(weight, i);
    }
}

/* With g = grad weight: grad_x = r (g - x r^2 mean(g x)); grad_weights[part] is the sum of grad x r over its rows. How
   rows are divided into parts depends on their number alone, so the sums do not depend on the number of threads. */
void norm_backward(int64_t rows, int64_t size, int64_t parts, const float *x, const float *weight, const float *scales,
                   const float *grad, float *grad_x, float *grad_weights) {
#pragma omp parallel for schedule(static)
    for (int64_t part = 0; part < parts; part++) {
        float *sums = grad_weights + part * size;
        memset(sums, 0, sizeof(float) * size);
        for (int64_t row = part * rows / parts; row < (part + 1) * rows / parts; row++) {
            const float *from = x + row * size, *slope = grad + row * size;
            float *to = grad_x + row * size, scale = scales[row];
            vf sum = splat(0.0f);
            for (int64_t i = 0; i < size; i += LANES) sum += READ(slope, i) * READ(weight, i) * READ(from, i);
            float back = total(sum) / (float)size * scale * scale;
            for (int64_t i = 0; i < size; i += LANES) {
                vf value = READ(from, i), mine = READ(slope, i);
                AT(to, i) = scale * (mine * READ(weight, i) - value * back);
                AT(sums, i) += mine * value * scale;
            }
        }
    }
}

/* out = gate sigmoid(gate) up, for `count` numbers, a multiple of 16 */
void swiglu_forward(int64_t count, const float *gate, const float *up, float *out) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < count; i += LANES) {
        vf g = READ(gate, i);
        AT(out, i) = g / (1.0f + exponential(-g)) * READ(up, i);
    }
}

void swiglu_backward(int64_t count, const float *gate, const float *up, const float *grad, float *grad_gate,
                     float *grad_up) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < count; i += LANES) {
        vf g = READ(gate, i), mine = READ(grad, i);
        vf s = 1.0f / (1.0f + exponential(-g));
        AT(grad_up, i) = mine * g * s;
        AT(grad_gate, i) = mine * READ(up, i) * s * (1.0f + g * (1.0f - s));
    }
}

/* As above, with all numbers in bfloat16, and in float32 between reading and writing. */
typedef uint16_t vh __attribute__((vector_size(2 * LANES), aligned(2)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES), aligned(4)));

INLINE vf widened(const uint16_t *from) { return (vf)(__builtin_convertvector(*(const vh *)from, vu) << 16); }

/* rounds to the nearest, to even in the middle; NaN stays NaN */
INLINE void narrow(uint16_t *to, vf x) {
    vu bits = (vu)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    *(vh *)to = __builtin_convertvector((vu)choose((vi)(x == x), (vf)rounded, (vf)(splat_int(0x7fc0))), vh);
}

void swiglu_forward_half(int64_t count, const uint16_t *gate, const uint16_t *up, uint16_t *out) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < count; i += LANES) {
        vf g = widened(gate + i);
        narrow(out + i, g / (1.0f + exponential(-g)) * widened(up + i));
    }
}

void swiglu_backward_half(int64_t count, const uint16_t *gate, const uint16_t *up, const uint16_t *grad,
                          uint16_t *grad_gate, uint16_t *grad_up) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < count; i += LANES) {
        vf g = widened(gate + i), mine = widened(grad + i);
        vf s = 1.0f / (1.0f + exponential(-g));
        narrow(grad_up + i, mine * g * s);
        narrow(grad_gate + i, mine * widened(up + i) * s * (1.0f + g * (1.0f - s)));
    }
}

/* Rotates each pair (x[d], x[d + size / 2]) of each head by its token's angle: x cos + rotated x sin. `direction` is 1
   for the forward pass and -1 for the inverse. The tables have `size` numbers per token; the second half repeats the
   first. */
void rotate(int64_t tokens, int64_t heads, int64_t size, float direction, const float *x, const float *cosines,
            const float *sines, float *out) {
    int64_t half = size / 2;
#pragma omp parallel for schedule(static)
    for (int64_t token = 0; token < tokens; token++) {
        const float *c = cosines + token * size, *s = sines + token * size;
        for (int64_t head = 0; head < heads; head++) {
            const float *from = x + (token * heads + head) * size;
            float *to = out + (token * heads + head) * size;
            for (int64_t d = 0; d < half; d++) {
                float a = from[d], b = from[d + half], sine = direction * s[d];
                to[d] = a * c[d] - b * sine;
                to[d + half] = b * c[d] + a * sine;
            }
        }
    }
}
