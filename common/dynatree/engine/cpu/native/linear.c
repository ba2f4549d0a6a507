/* Linear layers over any number of rows: see `native_linear.py`.
 *
 * A task computes one panel of PANEL output features; each lane of a vector is one feature. The panel's weights are
 * read in blocks of inputs that fit the L1 cache. A block is multiplied with all rows, up to ROWS at a time, while the
 * next block is prefetched.
 *
 * Every sum has one order: over the inputs, from first to last, in one lane. So a row's result has the same bits
 * whatever other rows are computed with it.
 */
#include <stdlib.h>

#include "linear.h"

#define BEGINNING (64 * 1024) /* most bytes that `linear_prefetch` prefetches */

int64_t linear_floats(void) { return CHUNK * PANEL + BLOCK / 2; }

/* Whether rows are converted from 16 bits to float32; an instruction for pairs of bfloat16 takes them unconverted. */
INLINE int widened(const struct linear *l) {
    return !l->weights.bits && (l->dtype == FLOAT16 || (l->dtype == BFLOAT16 && !PAIRED));
}

int64_t linear_shared_floats(const struct linear *l, int64_t rows) {
    if (l->weights.bits) return quantized_bytes(l, rows) / 4;
    return widened(l) ? rows * l->inputs : 0;
}

void linear_prepare(const struct linear *l, const char *rows, int64_t count, float *shared) {
    if (l->weights.bits) quantize_rows(l, rows, count, (char *)shared);
    if (!widened(l)) return;
    int64_t all = count * l->inputs, threads = omp_get_num_threads(), thread = omp_get_thread_num();
    int64_t at = all * thread / threads, stop = all * (thread + 1) / threads;
    for (; at + LANES <= stop; at += LANES) *(vec *)(shared + at) = load(rows + at * 2, l->dtype);
    for (; at < stop; at++) shared[at] = load_one(rows + at * 2, l->dtype);
}

int linear_prepares_alike(const struct linear *one, const struct linear *other) {
    const struct weights *a = &one->weights, *b = &other->weights;
    if (one->dtype != other->dtype || one->inputs != other->inputs || !a->bits != !b->bits) return 0;
    if (!a->bits) return 1;
    return a->group == b->group && a->offset == b->offset && a->minimums == b->minimums;
}

void linear_prefetch(const struct linear *l) {
    int64_t thread = omp_get_thread_num();
    int64_t panel = l->weights.bits ? quantized_panel(l) : l->inputs * PANEL * size_of(l->dtype);
    if (thread * PANEL >= l->features) return;
    for (int64_t at = 0; at < panel && at < BEGINNING; at += 64)
        _mm_prefetch(l->weight + thread * panel + at, _MM_HINT_T1);
}

/* sums[rows][vectors] += left[rows][inputs] @ right[inputs][vectors]. Each step prefetches `lines` cache lines, which
 * begin at `ahead`. */
INLINE void meet(float *sums, const char *left, int64_t left_row, const char *right, int64_t inputs, int rows,
                 int vectors, int64_t dtype, const char *ahead, int lines) {
    const int pairs = dtype == BFLOAT16, paired = pairs && PAIRED;
    const int halves = pairs && !paired ? 2 : 1; /* the first number of a pair is the lower half of 32 bits */
    const int64_t steps = pairs ? inputs / 2 : inputs, stride = PANEL * (dtype == FLOAT16 ? 2 : 4);
    vec s[ROWS][PANEL / LANES];
    EACH(r, rows)
        EACH(c, vectors) s[r][c] = *(vec *)(sums + r * PANEL + c * LANES);
    for (int64_t step = 0; step < steps; step++, right += stride) {
        for (int line = 0; line < lines; line++, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T1);
        EACH(half, halves) {
            vec b[PANEL / LANES];
            EACH(c, vectors) {
                const char *at = right + c * LANES * (dtype == FLOAT16 ? 2 : 4);
                b[c] = dtype == FLOAT16 ? load(at, FLOAT16) : *(const vec *)at;
                if (halves == 2 && half) b[c] = (vec)((ivec)b[c] & (int32_t)0xffff0000);
                if (halves == 2 && !half) b[c] = (vec)((ivec)b[c] << 16);
            }
            EACH(r, rows) {
                vec a = splat(((const float *)(left + r * left_row))[halves * step + half]);
                EACH(c, vectors) s[r][c] = multiplied(s[r][c], a, b[c], paired);
            }
        }
    }
    EACH(r, rows)
        EACH(c, vectors) *(vec *)(sums + r * PANEL + c * LANES) = s[r][c];
}

/* Multiply a block of a panel with up to ROWS rows, part by part. Return the address to prefetch next. */
INLINE const char *meet_all(float *sums, const char *left, int64_t left_row, const char *right, int64_t inputs,
                            int rows, int64_t dtype, const char *ahead, int lines) {
    int64_t steps = dtype == BFLOAT16 ? inputs / 2 : inputs;
    int parts = PANEL / LANES / across(rows);
    for (int part = 0; part < parts; part++) {
        int here = part < lines ? (lines + parts - 1) / parts : 0;
        int64_t at = part * across(rows) * LANES;
        meet(sums + at, left, left_row, right + at * (dtype == FLOAT16 ? 2 : 4), inputs, rows, across(rows), dtype,
             ahead, here);
        ahead += here * 64 * steps;
    }
    return ahead;
}

/* Convert a block of bfloat16 weights [inputs / 2, PANEL, 2] to float32 [inputs, PANEL]. */
INLINE void widen(float *to, const char *right, int64_t inputs) {
    for (int64_t i = 0; i < inputs; i += 2) {
        EACH(v, PANEL / LANES) {
            ivec pairs = *(const ivec *)(right + (i / 2 * PANEL + v * LANES) * 4);
            *(ivec *)(to + i * PANEL + v * LANES) = pairs << 16;
            *(ivec *)(to + (i + 1) * PANEL + v * LANES) = pairs & (int32_t)0xffff0000;
        }
    }
}

/* 1 - erf(x) for x >= 0, with a relative error of at most 1.2e-7 (Press et al., Numerical Recipes, section 6.2). */
INLINE vec erfc_of(vec x) {
    static const float terms[] = {-0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f, -0.18628806f,
                                  0.09678418f,  0.37409196f, 1.00002368f,  -1.26551223f};
    vec t = 1.0f / fused(splat(0.5f), x, splat(1.0f)), sum = splat(0.17087277f);
    EACH(i, 9) sum = fused(sum, t, splat(terms[i]));
    return t * exponential(fused(-x, x, sum));
}

/* x * logistic(slope * x) */
INLINE vec swish(vec x, float slope) {
    vec turned = slope * x, small = exponential(-magnitude(turned));
    return x * choose(turned > 0.0f, splat(1.0f), small) / (1.0f + small);
}

INLINE vec activated(vec x, const struct linear *l) {
    const int64_t activation = l->activation;
    const float cap = l->cap;
    if (activation == RELU) return choose(x < 0.0f, splat(0.0f), x);
    if (activation == SILU) return swish(x, 1.0f);
    if (activation == GELU) {
        vec rest = erfc_of(magnitude(x) * 0.70710678f);
        return 0.5f * x * choose(x > 0.0f, 2.0f - rest, rest);
    }
    if (activation == GELU_TANH) { /* 0.5 * (1 + tanh(u)) is the logistic function of 2 u */
        vec twice = 1.59576912f * fused(0.044715f * x * x, x, x), small = exponential(-magnitude(twice));
        return x * choose(twice > 0.0f, splat(1.0f), small) / (1.0f + small);
    }
    if (activation == CAPPED) return cap * tanh_of(x / cap);
    if (activation == CLAMPED_SWISH) return swish(choose(x > cap, splat(cap), x), l->slope);
    if (activation == CLAMPED_PLUS_ONE) {
        vec low = choose(x < -cap, splat(-cap), x);
        return choose(low > cap, splat(cap), low) + 1.0f;
    }
    return x;
}

/* Add the bias to a row's sums, apply the activation, combine with `other`, and store the result. */
INLINE void finish(const struct linear *l, int64_t panel, const float *sums, const char *other, char *output,
                   int64_t row, int64_t dtype) {
    int64_t first = panel * PANEL, size = size_of(dtype), place = (row * l->features + first) * size;
    for (int64_t c = 0; c < PANEL && first + c < l->features; c += LANES) {
        int64_t left = l->features - first - c, count = left < LANES ? left : LANES;
        char buffer[4 * LANES] = {0}; /* used if a vector would extend beyond the row */
        vec x = *(const vec *)(sums + c);
        if (l->bias) x += load(l->bias + (first + c) * size, dtype);
        x = activated(x, l);
        if (l->combination != ALONE) {
            const char *from = other + place + c * size;
            if (count < LANES) from = memcpy(buffer, from, count * size);
            vec y = load(from, dtype);
            x = l->combination == PLUS ? x + y : x * y;
        }
        if (count == LANES) {
            store(output + place + c * size, x, dtype);
        } else {
            store(buffer, x, dtype);
            memcpy(output + place + c * size, buffer, count * size);
        }
    }
}

/* Compute one panel of the output for all rows. */
INLINE void compute(const struct linear *l, int64_t panel, const char *left, int64_t count, const char *other,
                    char *output, float *sums, int64_t dtype) {
    const int64_t width = PANEL * size_of(dtype); /* bytes of one input's weights */
    const int64_t left_size = dtype == BFLOAT16 && PAIRED ? 2 : 4, left_row = l->inputs * left_size;
    const char *weight = l->weight + panel * l->inputs * width;
    float *wide = sums + PANEL * CHUNK; /* a block of weights converted to float32 */
    for (int64_t first = 0; first < count; first += CHUNK) {
        int64_t rows = count - first < CHUNK ? count - first : CHUNK, groups = (rows + ROWS - 1) / ROWS;
        int streaming = groups == 1 && across(rows) * LANES == PANEL; /* the panel is read once, from end to end */
        int widening = LANES < 16 && dtype == BFLOAT16 && groups > 3; /* pays off over many rows */
        int64_t block = streaming ? l->inputs : BLOCK / width / 2 * 2;
        memset(sums, 0, rows * PANEL * sizeof(float));
        for (int64_t input = 0; input < l->inputs; input += block) {
            int64_t inputs = l->inputs - input < block ? l->inputs - input : block;
            const char *right = weight + input * width, *ahead = right + (streaming ? AHEAD : inputs * width);
            if (!streaming && inputs == l->inputs - input) ahead += (omp_get_num_threads() - 1) * l->inputs * width;
            if (widening) widen(wide, right, inputs);
            for (int64_t group = 0, row = 0, many; group < groups; group++, row += many) {
                float *to = sums + row * PANEL;
                const char *from = left + (first + row) * left_row + input * left_size;
                /* The groups of rows share the prefetching. Later chunks find the panel in a cache. */
                int lines = first ? 0 : groups > 3 ? group < 4 : groups == 3 ? 1 + !group : 4 / groups;
                if (dtype == FLOAT16 || widening) lines = (lines + 1) / 2;
                many = (rows - row) / (groups - group);
#define CASE(r)                                                                                         \
    case r:                                                                                             \
        ahead = widening ? meet_all(to, from, left_row, (char *)wide, inputs, r, FLOAT32, ahead, lines) \
                         : meet_all(to, from, left_row, right, inputs, r, dtype, ahead, lines);         \
        break;
                switch (many) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
            }
        }
        for (int64_t row = 0; row < rows; row++)
            finish(l, panel, sums + row * PANEL, other, output, first + row, dtype);
    }
}

/* Do the same as `compute`, for weights of 8 or 4 bits. */
INLINE void compute_quantized(const struct linear *l, int64_t panel, const char *quantized, int64_t count,
                              const char *other, char *output, float *sums, int64_t dtype) {
    for (int64_t first = 0; first < count; first += CHUNK) {
        int64_t rows = count - first < CHUNK ? count - first : CHUNK;
        quantized_sums(l, panel, quantized, count, first, rows, sums);
        for (int64_t row = 0; row < rows; row++)
            finish(l, panel, sums + row * PANEL, other, output, first + row, dtype);
    }
}

void linear_panel(const struct linear *l, int64_t panel, const char *rows, int64_t count, const char *other,
                  char *output, float *memory, const float *shared) {
    const char *left = widened(l) || l->weights.bits ? (const char *)shared : rows;
#define COMPUTE(with)                                                 \
    if (l->dtype == FLOAT32)                                          \
        with(l, panel, left, count, other, output, memory, FLOAT32);  \
    else if (l->dtype == BFLOAT16)                                    \
        with(l, panel, left, count, other, output, memory, BFLOAT16); \
    else                                                              \
        with(l, panel, left, count, other, output, memory, FLOAT16)
    if (l->weights.bits) {
        COMPUTE(compute_quantized);
    } else {
        COMPUTE(compute);
    }
}

void linear_tasks(const struct linear *l, const char *rows, int64_t count, const char *other, char *output,
                  float *memory, const float *shared, int64_t *next) {
    TASKS(panel, (l->features + PANEL - 1) / PANEL, next)
        linear_panel(l, panel, rows, count, other, output, memory, shared);
}

/* Compute one linear layer on OpenMP's threads. Return 0, or -1 if memory cannot be allocated. */
int dynatree_linear(const struct linear *linear, const char *rows, int64_t count, char *output) {
    int64_t next = 0, shared_bytes = linear_shared_floats(linear, count) * sizeof(float);
    float *shared = shared_bytes ? malloc(shared_bytes) : NULL;
    int failed = shared_bytes && !shared ? -1 : 0;
    if (failed) return failed;
#pragma omp parallel
    {
        float *memory = malloc(linear_floats() * sizeof(float));
        if (!memory) {
#pragma omp atomic write
            failed = -1;
        }
        linear_prepare(linear, rows, count, shared);
#pragma omp barrier
        if (memory) linear_tasks(linear, rows, count, NULL, output, memory, shared, &next);
        free(memory);
    }
    free(shared);
    return failed;
}
