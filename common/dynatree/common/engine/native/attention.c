/* Attention of a few queries over long contexts on a CPU: see `native_attention.py`.
 *
 * A task is one head of one segment's keys. Keys are taken in tiles of TILE slots, counted from the segment's first
 * slot. A tile is transposed, so that a vector's lanes are keys, and blocks of ROWS queries meet it; softmax is summed
 * up tile by tile (online softmax, Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022).
 *
 * Every sum has one order: scores over the dimensions, weights and values over the slots. A masked slot adds an exact
 * zero. So a query's result depends on the slots that it sees, and has the same bits whatever else is computed.
 *
 * Built for AVX2, for AVX-512, and for AVX-512 with bfloat16, whose instructions multiply pairs of numbers.
 */
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#define ACROSS 4 /* vectors that a block of rows has in registers */
#else
#define LANES 8
#define ACROSS 2
#endif
#define ROWS 4  /* queries of a block */
#define TILE 64 /* slots; a multiple of ACROSS * LANES */
#define LOWEST -1e30f

#define UNROLL _Pragma("GCC unroll 16")
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

enum dtype { FLOAT32, BFLOAT16, FLOAT16 };

/* What one session puts through the forward; a range's slots are counted from its first. */
struct segment {
    int64_t first, tokens; /* its place in the row of tokens */
    int64_t base;          /* the arena's slot that is its range's first */
    int64_t start;         /* the slot of its first token */
    const uint8_t *mask;   /* [tokens, columns] over the last slots in use; NULL: causal */
    int64_t columns;
};

/* One layer's tensors; strides are in elements, and a head's dimensions lie side by side. */
struct layer {
    const char *query, *key, *value; /* of the new tokens: [heads, n, dim], and [kv_heads, n, dim] twice */
    int64_t query_head, query_token, key_head, key_token, value_head, value_token;
    char *keys, *values; /* the arena's: [kv_heads, slots, dim] */
    int64_t arena_head;
    char *output; /* [n, heads, dim] */
};

struct shape {
    int64_t heads, kv_heads, dim, dtype;
    float scale;
};

/* A thread's memory; wide is dim, filled up to whole vectors. With pairs two 16-bit numbers take a float's place. */
struct scratch {
    float *keys;    /* [dim, TILE]; of pairs [dim / 2, TILE] */
    float *values;  /* [TILE, wide]; of pairs [TILE / 2, wide] */
    float *queries; /* [rows, dim], scaled; of pairs [rows, dim / 2], not scaled */
    float *sums;    /* [rows, wide]: weights @ values so far */
    float *highest; /* [rows]: the highest score so far */
    float *totals;  /* [rows, LANES]: the sum of weights so far */
};

/* Numbers */

INLINE vec splat(float x) { return x - (vec){0}; }

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
    bits = (uint32_t) * (const uint16_t *)from << 16;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Rounds to the nearest, ties to even. */
INLINE void store_one(void *to, float x, int64_t dtype) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (dtype == FLOAT32)
        *(float *)to = x;
    else if (dtype == FLOAT16)
        *(uint16_t *)to = _cvtss_sh(x, 0);
    else
        *(uint16_t *)to = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE vec choose(ivec which, vec yes, vec no) { return (vec)(((ivec)yes & which) | ((ivec)no & ~which)); }

/* exp(x) for x <= 0, to within two units in the last place; 0 where it is below the smallest normal number. */
INLINE vec exponential(vec x) {
    vec power = x * 1.44269504f; /* of two */
    vec kept = choose(power > -126.0f, power, splat(-126.0f));
    vec shifted = kept + 12582912.0f; /* 1.5 * 2^23: the sum is rounded to a whole number */
    ivec whole = (ivec)shifted - (ivec)splat(12582912.0f);
    vec rest = kept - (shifted - 12582912.0f); /* in [-0.5, 0.5] */
    vec sum = splat(1.5353362e-4f);
    sum = sum * rest + 1.3398874e-3f;
    sum = sum * rest + 9.6184373e-3f;
    sum = sum * rest + 5.5503324e-2f;
    sum = sum * rest + 2.4022648e-1f;
    sum = sum * rest + 6.9314720e-1f;
    sum = sum * rest + 1.0f;
    return choose(power > -126.0f, (vec)((ivec)sum + (whole << 23)), splat(0.0f));
}

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif
#if LANES == 16
#define LOW1(a, b) SHUFFLE(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30)
#define HIGH1(a, b) SHUFFLE(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31)
#define LOW2(a, b) SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define HIGH2(a, b) SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#define LOW4(a, b) SHUFFLE(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27)
#define HIGH4(a, b) SHUFFLE(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31)
#define LOW8(a, b) SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
#define HIGH8(a, b) SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31)
#else
#define LOW1(a, b) SHUFFLE(a, b, 0, 8, 2, 10, 4, 12, 6, 14)
#define HIGH1(a, b) SHUFFLE(a, b, 1, 9, 3, 11, 5, 13, 7, 15)
#define LOW2(a, b) SHUFFLE(a, b, 0, 1, 8, 9, 4, 5, 12, 13)
#define HIGH2(a, b) SHUFFLE(a, b, 2, 3, 10, 11, 6, 7, 14, 15)
#define LOW4(a, b) SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11)
#define HIGH4(a, b) SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15)
#endif
#define SWAP(step, low, high)                        \
    UNROLL for (int i = 0; i < LANES; i++) {         \
        if (i & step) continue;                      \
        vec a = x[i], b = x[i + step];               \
        x[i] = low(a, b), x[i + step] = high(a, b);  \
    }

/* LANES x LANES numbers of 32 bits, in place: ever larger blocks change sides. */
INLINE void transpose(vec *x) {
    SWAP(1, LOW1, HIGH1)
    SWAP(2, LOW2, HIGH2)
    SWAP(4, LOW4, HIGH4)
#if LANES == 16
    SWAP(8, LOW8, HIGH8)
#endif
}

INLINE float greatest(vec x) {
#if LANES == 16
    return _mm512_reduce_max_ps((__m512)x);
#else
    __m128 half = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
#endif
}

/* `paired`: two products of bfloat16 in every lane. */
INLINE vec multiplied(vec sum, vec a, vec b, int paired) {
#ifdef __AVX512BF16__
    if (paired) return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    (void)paired;
#endif
    return sum + a * b;
}

/* sums[rows][count vectors] += left[rows][steps] @ right[steps][count vectors], at these strides. */
INLINE void accumulate(vec (*sums)[ACROSS + 1], const float *left, int64_t left_row, const float *right,
                       int64_t right_step, int64_t steps, int rows, int count, int paired) {
    for (int64_t step = 0; step < steps; step++) {
        vec b[ACROSS + 1];
        UNROLL for (int c = 0; c < count; c++) b[c] = *(const vec *)(right + step * right_step + c * LANES);
        UNROLL for (int r = 0; r < rows; r++) {
            vec a = splat(left[r * left_row + step]);
            UNROLL for (int c = 0; c < count; c++) sums[r][c] = multiplied(sums[r][c], a, b[c], paired);
        }
    }
}

/* Queries and a tile */

/* weights[rows][TILE] = the scores of a block of queries. */
INLINE void score(const struct scratch *s, int64_t row, int64_t dim, float scale, float (*weights)[TILE], int rows,
                  int paired) {
    int64_t steps = paired ? dim / 2 : dim;
    for (int at = 0; at < TILE; at += ACROSS * LANES) {
        vec sums[ROWS][ACROSS + 1] = {0};
        accumulate(sums, s->queries + row * steps, steps, s->keys + at, TILE, steps, rows, ACROSS, paired);
        UNROLL for (int r = 0; r < rows; r++) UNROLL for (int c = 0; c < ACROSS; c++)
            *(vec *)(weights[r] + at + c * LANES) = sums[r][c] * (paired ? scale : 1.0f);
    }
}

/* Scores become weights, relative to the highest score so far; what was summed up before is brought to it. */
INLINE void weigh(const struct scratch *s, int64_t row, int64_t wide, float *weights, const uint8_t *visible) {
    vec scores[TILE / LANES], top = splat(LOWEST);
    ivec seen[TILE / LANES];
    UNROLL for (int i = 0; i < TILE / LANES; i++) {
        const __m128i *bytes = (const __m128i *)(visible + i * LANES);
#if LANES == 16
        seen[i] = (ivec)_mm512_cvtepu8_epi32(_mm_loadu_si128(bytes)) != 0;
#else
        seen[i] = (ivec)_mm256_cvtepu8_epi32(_mm_loadl_epi64(bytes)) != 0;
#endif
        scores[i] = choose(seen[i], *(vec *)(weights + i * LANES), splat(LOWEST));
        top = choose(scores[i] > top, scores[i], top);
    }
    float highest = greatest(top);
    vec total = *(vec *)(s->totals + row * LANES);
    if (highest > s->highest[row]) {
        vec smaller = exponential(splat(s->highest[row] - highest));
        for (int64_t d = 0; d < wide; d += LANES) *(vec *)(s->sums + row * wide + d) *= smaller;
        total *= smaller;
        s->highest[row] = highest;
    }
    UNROLL for (int i = 0; i < TILE / LANES; i++) {
        vec weight = choose(seen[i], exponential(scores[i] - s->highest[row]), splat(0.0f));
        total += weight;
        *(vec *)(weights + i * LANES) = weight;
    }
    *(vec *)(s->totals + row * LANES) = total;
}

/* sums[rows] += weights @ values, `count` vectors of it from dimension `at` on. */
INLINE void gather(const struct scratch *s, int64_t row, int64_t wide, int64_t at, const float *weights, int keys,
                   int rows, int count, int paired) {
    vec sums[ROWS][ACROSS + 1];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int c = 0; c < count; c++)
        sums[r][c] = *(vec *)(s->sums + (row + r) * wide + at + c * LANES);
    int64_t steps = paired ? (keys + 1) / 2 : keys;
    accumulate(sums, weights, paired ? TILE / 2 : TILE, s->values + at, wide, steps, rows, count, paired);
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int c = 0; c < count; c++)
        *(vec *)(s->sums + (row + r) * wide + at + c * LANES) = sums[r][c];
}

INLINE void meet(const struct scratch *s, int64_t row, int64_t dim, int64_t wide, float scale, int keys,
                 const uint8_t *visible, int rows, int paired) {
    float weights[ROWS][TILE] __attribute__((aligned(64)));
    const float *given = weights[0];
    score(s, row, dim, scale, weights, rows, paired);
    for (int r = 0; r < rows; r++) weigh(s, row + r, wide, weights[r], visible + r * TILE);
#ifdef __AVX512BF16__
    float pairs[ROWS][TILE / 2] __attribute__((aligned(64)));
    if (paired) {
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < TILE; i += 2 * LANES)
                *(vec *)(pairs[r] + i / 2) = (vec)_mm512_cvtne2ps_pbh((__m512) * (vec *)(weights[r] + i + LANES),
                                                                      (__m512) * (vec *)(weights[r] + i));
        given = pairs[0];
    }
#endif
    int64_t vectors = wide / LANES, parts = (vectors + ACROSS) / (ACROSS + 1);
    for (int64_t part = 0, at = 0, count; part < parts; part++, at += count * LANES) {
        count = (vectors - at / LANES) / (parts - part);
        switch (count) {
        case 1: gather(s, row, wide, at, given, keys, rows, 1, paired); break;
        case 2: gather(s, row, wide, at, given, keys, rows, 2, paired); break;
#if ACROSS == 4
        case 3: gather(s, row, wide, at, given, keys, rows, 3, paired); break;
        case 4: gather(s, row, wide, at, given, keys, rows, 4, paired); break;
#endif
        default: gather(s, row, wide, at, given, keys, rows, ACROSS + 1, paired);
        }
    }
}

/* The arena */

/* Copy a head's new keys or values into its slots, with 0 in place of what is not finite. */
static void put(char *to, const char *from, int64_t token, int64_t tokens, int64_t dim, int64_t dtype) {
    for (int64_t t = 0; t < tokens; t++) {
        if (dtype == FLOAT32) {
            const uint32_t *bits = (const uint32_t *)from + t * token;
            for (int64_t d = 0; d < dim; d++)
                ((uint32_t *)to)[t * dim + d] = (bits[d] & 0x7f800000) == 0x7f800000 ? 0 : bits[d];
        } else {
            const uint16_t *bits = (const uint16_t *)from + t * token, exponent = dtype == BFLOAT16 ? 0x7f80 : 0x7c00;
            for (int64_t d = 0; d < dim; d++)
                ((uint16_t *)to)[t * dim + d] = (bits[d] & exponent) == exponent ? 0 : bits[d];
        }
    }
}

/* The keys of a tile, transposed; zeros past the last one. */
INLINE void read_keys(float *to, const char *keys, int64_t dim, int count, int64_t dtype) {
    int64_t size = dtype == FLOAT32 ? 4 : 2, whole = dim / LANES * LANES;
    for (int k = 0; k < TILE; k += LANES) {
        for (int64_t d = 0; d < whole; d += LANES) {
            vec x[LANES];
            UNROLL for (int i = 0; i < LANES; i++)
                x[i] = k + i < count ? load(keys + ((k + i) * dim + d) * size, dtype) : splat(0.0f);
            transpose(x);
            UNROLL for (int i = 0; i < LANES; i++) *(vec *)(to + (d + i) * TILE + k) = x[i];
        }
        for (int64_t d = whole; d < dim; d++)
            for (int i = 0; i < LANES; i++)
                to[d * TILE + k + i] = k + i < count ? load_one(keys + ((k + i) * dim + d) * size, dtype) : 0.0f;
    }
}

INLINE void read_values(float *to, const char *values, int64_t dim, int64_t wide, int count, int64_t dtype) {
    int64_t size = dtype == FLOAT32 ? 4 : 2, whole = dim / LANES * LANES;
    for (int k = 0; k < count; k++) {
        for (int64_t d = 0; d < whole; d += LANES)
            *(vec *)(to + k * wide + d) = load(values + (k * dim + d) * size, dtype);
        for (int64_t d = whole; d < wide; d++)
            to[k * wide + d] = d < dim ? load_one(values + (k * dim + d) * size, dtype) : 0.0f;
    }
}

#ifdef __AVX512BF16__
/* Likewise in pairs: of neighbouring dimensions of a key, and of neighbouring slots' values. */
INLINE void read_key_pairs(float *to, const char *keys, int64_t dim, int count) {
    int64_t pairs = dim / 2;
    for (int k = 0; k < TILE; k += LANES)
        for (int64_t p = 0; p < pairs; p += LANES) {
            __mmask16 there = pairs - p < LANES ? (1 << (pairs - p)) - 1 : -1;
            vec x[LANES];
            UNROLL for (int i = 0; i < LANES; i++)
                x[i] = k + i < count ? (vec)_mm512_maskz_loadu_epi32(there, keys + ((k + i) * pairs + p) * 4) : splat(0);
            transpose(x);
            UNROLL for (int i = 0; i < LANES; i++) if (p + i < pairs) *(vec *)(to + (p + i) * TILE + k) = x[i];
        }
}

INLINE void read_value_pairs(float *to, const char *values, int64_t dim, int64_t wide, int count) {
    for (int k = 0; k < count; k += 2)
        for (int64_t d = 0; d < wide; d += LANES) {
            __mmask16 there = dim - d < LANES ? (1 << (dim - d)) - 1 : -1;
            const char *at = values + (k * dim + d) * 2;
            __m512i even = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, at));
            __m512i odd = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(k + 1 < count ? there : 0, at + 2 * dim));
            *(vec *)(to + k / 2 * wide + d) = (vec)_mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
        }
}
#endif

/* Which slots of a tile a token sees: bytes. */
INLINE void look(uint8_t *visible, const struct segment *segment, int64_t token, int64_t tile, int count) {
    int64_t stop = segment->start + segment->tokens;
    int64_t before = segment->mask ? stop - segment->columns : segment->start + token + 1; /* slots that it sees */
    memset(visible, 0, TILE);
    if (before > tile) memset(visible, 1, before - tile < count ? before - tile : count);
    if (segment->mask)
        for (int64_t slot = before > tile ? before : tile; slot < tile + count; slot++)
            visible[slot - tile] = segment->mask[token * segment->columns + slot - before];
}

/* One head: store its new keys and values, then attend. The query heads of one head of keys are further rows. */
INLINE void attend(const struct layer *l, const struct shape *shape, const struct segment *segment, int64_t head,
                   struct scratch *s, int64_t dtype, int paired) {
    uint8_t visible[ROWS * TILE] __attribute__((aligned(64)));
    int64_t dim = shape->dim, wide = (dim + LANES - 1) / LANES * LANES, size = dtype == FLOAT32 ? 4 : 2;
    int64_t group = shape->heads / shape->kv_heads, rows = segment->tokens * group;
    int64_t stop = segment->start + segment->tokens, range = (head * l->arena_head + segment->base * dim) * size;
    put(l->keys + range + segment->start * dim * size,
        l->key + (head * l->key_head + segment->first * l->key_token) * size, l->key_token, segment->tokens, dim, dtype);
    put(l->values + range + segment->start * dim * size,
        l->value + (head * l->value_head + segment->first * l->value_token) * size, l->value_token, segment->tokens, dim,
        dtype);
    for (int64_t row = 0; row < rows; row++) {
        const char *query = l->query + ((head * group + row % group) * l->query_head +
                                        (segment->first + row / group) * l->query_token) * size;
        if (paired)
            memcpy(s->queries + row * dim / 2, query, dim * size);
        else
            for (int64_t d = 0; d < dim; d++)
                s->queries[row * dim + d] = load_one(query + d * size, dtype) * shape->scale;
        s->highest[row] = LOWEST;
    }
    memset(s->sums, 0, rows * wide * sizeof(float));
    memset(s->totals, 0, rows * LANES * sizeof(float));
    for (int64_t tile = 0; tile < stop; tile += TILE) {
        int count = stop - tile < TILE ? stop - tile : TILE;
        if (stop - tile > TILE) { /* the next tile comes from memory meanwhile */
            int64_t bytes = (stop - tile - TILE < TILE ? stop - tile - TILE : TILE) * dim * size;
            int64_t next = range + (tile + TILE) * dim * size;
            for (int64_t at = 0; at < bytes; at += 64) {
                _mm_prefetch(l->keys + next + at, _MM_HINT_T1);
                _mm_prefetch(l->values + next + at, _MM_HINT_T1);
            }
        }
        const char *keys = l->keys + range + tile * dim * size, *values = l->values + range + tile * dim * size;
#ifdef __AVX512BF16__
        if (paired) {
            read_key_pairs(s->keys, keys, dim, count);
            read_value_pairs(s->values, values, dim, wide, count);
        }
#endif
        if (!paired) {
            read_keys(s->keys, keys, dim, count, dtype);
            read_values(s->values, values, dim, wide, count, dtype);
        }
        for (int64_t row = 0; row < rows; row += ROWS) {
            int many = rows - row < ROWS ? rows - row : ROWS;
            if (!segment->mask && segment->start + (row + many - 1) / group < tile) continue; /* none sees any of it */
            for (int r = 0; r < many; r++) look(visible + r * TILE, segment, (row + r) / group, tile, count);
            if (many == ROWS)
                meet(s, row, dim, wide, shape->scale, count, visible, ROWS, paired);
            else
                for (int r = 0; r < many; r++)
                    meet(s, row + r, dim, wide, shape->scale, count, visible + r * TILE, 1, paired);
        }
    }
    for (int64_t row = 0; row < rows; row++) {
        float total = 0.0f;
        for (int i = 0; i < LANES; i++) total += s->totals[row * LANES + i];
        char *to = l->output + ((segment->first + row / group) * shape->heads + head * group + row % group) * dim * size;
        for (int64_t d = 0; d < dim; d++) store_one(to + d * size, s->sums[row * wide + d] / total, dtype);
    }
}

static float *part(char **at, int64_t count) {
    float *here = (float *)*at;
    *at += (count * sizeof(float) + 63) / 64 * 64;
    return here;
}

/* One layer's attention of all segments, on OpenMP's threads. Returns 0, or -1 where there is no memory. */
int dynatree_attention(const struct layer *layer, const struct shape *shape, const struct segment *segments,
                       int64_t count) {
    int64_t dim = shape->dim, wide = (dim + LANES - 1) / LANES * LANES, rows = 0;
    for (int64_t i = 0; i < count; i++) rows = segments[i].tokens > rows ? segments[i].tokens : rows;
    rows *= shape->heads / shape->kv_heads;
    int64_t floats = (dim + wide) * TILE + rows * (dim + wide + 1 + LANES);
    int failed = 0;
#pragma omp parallel
    {
        char *memory = aligned_alloc(64, (floats * sizeof(float) + 6 * 64 + 63) / 64 * 64), *at = memory;
        struct scratch s = {0};
        if (memory) {
            s.keys = part(&at, dim * TILE);
            s.values = part(&at, wide * TILE);
            s.queries = part(&at, rows * dim);
            s.sums = part(&at, rows * wide);
            s.highest = part(&at, rows);
            s.totals = part(&at, rows * LANES);
        } else {
#pragma omp atomic write
            failed = -1;
        }
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < count * shape->kv_heads; task++) {
            const struct segment *segment = &segments[task / shape->kv_heads];
            int64_t head = task % shape->kv_heads;
            if (!memory) continue;
            if (shape->dtype == FLOAT32)
                attend(layer, shape, segment, head, &s, FLOAT32, 0);
            else if (shape->dtype == FLOAT16)
                attend(layer, shape, segment, head, &s, FLOAT16, 0);
#ifdef __AVX512BF16__
            else if (dim % 2 == 0)
                attend(layer, shape, segment, head, &s, BFLOAT16, 1);
#endif
            else
                attend(layer, shape, segment, head, &s, BFLOAT16, 0);
        }
        free(memory);
    }
    return failed;
}
