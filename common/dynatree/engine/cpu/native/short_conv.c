/* A causal convolution of each channel over a token and its last ancestors: see `native_recurrence.py`.
 *
 * Inputs have the model's dtype. Sums are float64, and rounded to float32 and then to the dtype, as torch does.
 * Products of two such inputs are exact in float64. A token's sum has the same terms in the same order in any tree, so
 * it has the same bits. A task computes some channels.
 */
#include <stdlib.h>

#include "kernels.h"

#define TOGETHER 256 /* channels of a task; a multiple of LANES */

/* Find the inputs of each token's taps: rows of the state, of the kept tokens, and of the new ones. */
static void find_taps(const struct convolution *c, const char **taps) {
    int64_t bytes = c->channels * size_of(c->dtype), all = c->kept + c->tokens;
    for (int64_t i = 0; i < c->tokens; i++) {
        const uint8_t *mask = c->ancestors ? c->ancestors + i * all : NULL;
        int64_t left = c->width - 1, a = c->kept + i;
        for (taps[i * c->width + left] = c->x + i * bytes; left && a--;)
            if (!mask || mask[a])
                taps[i * c->width + --left] = a < c->kept ? c->kept_x + a * bytes : c->x + (a - c->kept) * bytes;
        for (int64_t tap = 0; tap < left; tap++) /* the last rows of the state */
            taps[i * c->width + tap] = c->state + (c->width - 1 - left + tap) * bytes;
    }
}

INLINE wide widened(vec x, int upper) {
#if LANES == 16
    return (wide)_mm512_cvtps_pd(upper ? _mm512_extractf32x8_ps((__m512)x, 1) : _mm512_castps512_ps256((__m512)x));
#else
    return (wide)_mm256_cvtps_pd(upper ? _mm256_extractf128_ps((__m256)x, 1) : _mm256_castps256_ps128((__m256)x));
#endif
}

INLINE vec narrowed(wide low, wide high) {
#if LANES == 16
    __m256 lower = _mm512_cvtpd_ps((__m512d)low), upper = _mm512_cvtpd_ps((__m512d)high);
    return (vec)_mm512_insertf32x8(_mm512_castps256_ps512(lower), upper, 1);
#else
    __m128 lower = _mm256_cvtpd_ps((__m256d)low), upper = _mm256_cvtpd_ps((__m256d)high);
    return (vec)_mm256_insertf128_ps(_mm256_castps128_ps256(lower), upper, 1);
#endif
}

/* Compute the task's channels from `first` on, of all tokens. */
INLINE void convolve(const struct convolution *c, int64_t first, const char *const *taps, int64_t dtype) {
    float weights[MOST_TAPS * TOGETHER], biases[TOGETHER];
    int64_t size = size_of(dtype), count = c->channels - first < TOGETHER ? c->channels - first : TOGETHER;
    for (int64_t i = 0; i < count; i++) {
        for (int64_t tap = 0; tap < c->width; tap++)
            weights[tap * TOGETHER + i] = load_one(c->weight + ((first + i) * c->width + tap) * size, dtype);
        biases[i] = c->bias ? load_one(c->bias + (first + i) * size, dtype) : 0.0f;
    }
    for (int64_t token = 0; token < c->tokens; token++, taps += c->width) {
        char *to = c->output + (token * c->channels + first) * size;
        int64_t i = 0;
        for (; i + LANES <= count; i += LANES) {
            wide low = {0}, high = {0};
            for (int64_t tap = 0; tap < c->width; tap++) {
                vec x = load(taps[tap] + (first + i) * size, dtype), weight = *(vec *)(weights + tap * TOGETHER + i);
                low += widened(x, 0) * widened(weight, 0), high += widened(x, 1) * widened(weight, 1);
            }
            vec bias = *(vec *)(biases + i);
            store(to + i * size, narrowed(low + widened(bias, 0), high + widened(bias, 1)), dtype);
        }
        for (; i < count; i++) {
            double sum = 0.0;
            for (int64_t tap = 0; tap < c->width; tap++)
                sum += (double)load_one(taps[tap] + (first + i) * size, dtype) * (double)weights[tap * TOGETHER + i];
            store_one(to + i * size, (float)(sum + (double)biases[i]), dtype);
        }
    }
}

/* Compute the convolution of new tokens on OpenMP's threads. Return 0, or -1 if memory cannot be allocated. */
int dynatree_convolution(const struct convolution *c) {
    int64_t next = 0;
    const char **taps = malloc(c->tokens * c->width * sizeof *taps + 1);
    if (!taps) return -1;
    find_taps(c, taps);
#pragma omp parallel
    TASKS(task, (c->channels + TOGETHER - 1) / TOGETHER, &next) {
        if (c->dtype == FLOAT32)
            convolve(c, task * TOGETHER, taps, FLOAT32);
        else if (c->dtype == BFLOAT16)
            convolve(c, task * TOGETHER, taps, BFLOAT16);
        else
            convolve(c, task * TOGETHER, taps, FLOAT16);
    }
    free(taps);
    return 0;
}
