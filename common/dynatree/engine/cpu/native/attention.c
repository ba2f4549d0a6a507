/* Attention of a few queries over long contexts on a CPU: see `native_attention.py`.
 *
 * A task computes one key-value head of one segment. Keys are read in tiles of TILE slots. A tile is transposed, so
 * that each lane of a vector is one key, and multiplied with blocks of ROWS queries. The scores of a chunk of queries
 * are kept until all keys are read. Then their softmax weights are multiplied with the values, tile by tile. Tiles that
 * no query of the chunk sees, because they lie outside its window, are not read.
 *
 * Every sum has one order: scores over the dimensions, weights and values over the slots. A masked slot adds an exact
 * zero. So a query's result has the same bits whatever else is computed, and wherever its visible slots lie. An online
 * softmax would not have this property: when a tile has a higher score, it rounds the earlier sums again.
 *
 * There are builds for AVX2, AVX-512, and AVX-512 with bfloat16, whose instructions multiply pairs of numbers.
 */
#include <stdlib.h>

#include "kernels.h"

#define ROWS 4              /* queries of a block */
#define TILE 64             /* slots of a tile; a multiple of ACROSS * LANES */
#define LOWEST -1e30f       /* score of a masked slot */
#define WEIGHTS (64 * 1024) /* most scores of a chunk of queries, unless it is a single block */

/* A thread's working memory for a chunk of queries. `wide` is dim rounded up to whole vectors; `slots` is the number of
 * slots rounded up to whole tiles. A pair of bfloat16 numbers takes the place of one float. */
struct scratch {
    float *keys;    /* [dim, TILE]; pairs: [dim / 2, TILE] */
    float *values;  /* [TILE, wide]; pairs: [TILE / 2, wide] */
    float *queries; /* [chunk, dim], scaled; pairs: [chunk, dim / 2], rows of dim floats, unscaled */
    float *weights; /* [chunk, slots]: scores, then softmax weights; pairs: [chunk, slots / 2], rows of slots floats */
    float *sums;    /* [chunk, wide]: weights @ values so far */
    float *sinks;   /* [chunk]: each query's sink; LOWEST if it has none */
    double *totals; /* [chunk]: sums of weights. Beside a large weight, a float would lose many small ones. */
    int64_t slots;
};

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
#define SWAP(step, low, high)                       \
    EACH(i, LANES) {                                \
        if (i & step) continue;                     \
        vec a = x[i], b = x[i + step];              \
        x[i] = low(a, b), x[i + step] = high(a, b); \
    }

/* Transpose LANES x LANES numbers of 32 bits in place, by exchanging ever larger off-diagonal blocks. */
INLINE void transpose(vec *x){SWAP(1, LOW1, HIGH1) SWAP(2, LOW2, HIGH2) SWAP(4, LOW4, HIGH4)
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

/* sums[rows][count vectors] += left[rows][steps] @ right[steps][count vectors]; left_row, right_step: strides. */
INLINE void accumulate(vec (*sums)[ACROSS + 1], const float *left, int64_t left_row, const float *right,
                       int64_t right_step, int64_t steps, int rows, int count, int paired) {
    for (int64_t step = 0; step < steps; step++) {
        vec b[ACROSS + 1];
        EACH(c, count) b[c] = *(const vec *)(right + step * right_step + c * LANES);
        EACH(r, rows) {
            vec a = splat(left[r * left_row + step]);
            EACH(c, count) sums[r][c] = multiplied(sums[r][c], a, b[c], paired);
        }
    }
}

/* Queries and tiles */

/* Compute the scores of `rows` queries for a tile of keys; LOWEST for slots that a query does not see. */
INLINE void score(const struct scratch *s, int64_t row, int64_t tile, int64_t dim, float scale, const uint8_t *visible,
                  int rows, int paired) {
    int64_t steps = paired ? dim / 2 : dim;
    for (int at = 0; at < TILE; at += ACROSS * LANES) {
        vec sums[ROWS][ACROSS + 1] = {0};
        accumulate(sums, s->queries + row * dim, paired ? 2 * steps : steps, s->keys + at, TILE, steps, rows, ACROSS,
                   paired);
        EACH(r, rows)
            EACH(c, ACROSS) {
                const __m128i *bytes = (const __m128i *)(visible + r * TILE + at + c * LANES);
#if LANES == 16
                ivec seen = (ivec)_mm512_cvtepu8_epi32(_mm_loadu_si128(bytes)) != 0;
#else
                ivec seen = (ivec)_mm256_cvtepu8_epi32(_mm_loadl_epi64(bytes)) != 0;
#endif
                vec scores = sums[r][c] * (paired ? scale : 1.0f);
                *(vec *)(s->weights + (row + r) * s->slots + tile + at + c * LANES) =
                    choose(seen, scores, splat(LOWEST));
            }
    }
}

/* Replace a query's scores x for slots `from` to `stop`, multiples of TILE, by cap * tanh(x / cap). */
static void limit(const struct scratch *s, int64_t row, int64_t from, int64_t stop, float cap) {
    for (int64_t i = from; i < stop; i += LANES) {
        vec *scores = (vec *)(s->weights + row * s->slots + i), x = *scores;
        *scores = choose(x > LOWEST, cap * tanh_of(x / cap), x);
    }
}

/* Replace each of `rows` queries' scores for slots `from` to `stop`, multiples of TILE, by exp(score - the query's
 * highest). Their total is summed slot by slot, after the sink; a masked slot adds an exact zero, wherever it lies. */
INLINE void weigh(const struct scratch *s, int64_t row, int64_t from, int64_t stop, int rows, int paired) {
    double totals[ROWS] = {0};
    for (int r = 0; r < rows; r++) {
        float *weights = s->weights + (row + r) * s->slots;
        float sink = s->sinks[row + r];
        vec top = splat(sink);
        for (int64_t i = from; i < stop; i += LANES)
            top = choose(*(vec *)(weights + i) > top, *(vec *)(weights + i), top);
        float highest = greatest(top);
        if (sink > LOWEST) totals[r] = exponential(splat(sink - highest))[0];
        for (int64_t i = from; i < stop; i += LANES) {
            vec scores = *(vec *)(weights + i);
            *(vec *)(weights + i) = choose(scores > LOWEST, exponential(scores - highest), splat(0.0f));
        }
    }
    for (int64_t i = from; i < stop; i++)
        EACH(r, rows) totals[r] += s->weights[(row + r) * s->slots + i];
    for (int r = 0; r < rows; r++) s->totals[row + r] = totals[r];
#ifdef __AVX512BF16__
    if (paired)
        for (int r = 0; r < rows; r++) {
            float *weights = s->weights + (row + r) * s->slots;
            for (int64_t i = from; i < stop; i += 2 * LANES)
                *(vec *)(weights + i / 2) =
                    (vec)_mm512_rol_epi32((__m512i)_mm512_cvtne2ps_pbh((__m512) * (vec *)(weights + i + LANES),
                                                                       (__m512) * (vec *)(weights + i)),
                                          16);
        }
#else
    (void)paired;
#endif
}

/* sums[rows] += weights @ values of a tile, for `count` vectors from dimension `at` on. */
INLINE void gather(const struct scratch *s, int64_t row, int64_t tile, int64_t wide, int64_t at, int keys, int rows,
                   int count, int paired) {
    vec sums[ROWS][ACROSS + 1];
    EACH(r, rows)
        EACH(c, count) sums[r][c] = *(vec *)(s->sums + (row + r) * wide + at + c * LANES);
    accumulate(sums, s->weights + row * s->slots + (paired ? tile / 2 : tile), s->slots, s->values + at, wide,
               paired ? (keys + 1) / 2 : keys, rows, count, paired);
    EACH(r, rows)
        EACH(c, count) *(vec *)(s->sums + (row + r) * wide + at + c * LANES) = sums[r][c];
}

/* sums[rows] += weights @ values of a tile, for all dimensions. */
INLINE void gather_all(const struct scratch *s, int64_t row, int64_t tile, int64_t wide, int keys, int rows,
                       int paired) {
    int64_t vectors = wide / LANES, parts = (vectors + ACROSS) / (ACROSS + 1);
    for (int64_t part = 0, at = 0, count; part < parts; part++, at += count * LANES) {
        count = (vectors - at / LANES) / (parts - part);
        switch (count) {
            case 1: gather(s, row, tile, wide, at, keys, rows, 1, paired); break;
            case 2: gather(s, row, tile, wide, at, keys, rows, 2, paired); break;
#if ACROSS == 4
            case 3: gather(s, row, tile, wide, at, keys, rows, 3, paired); break;
            case 4: gather(s, row, tile, wide, at, keys, rows, 4, paired); break;
#endif
            default: gather(s, row, tile, wide, at, keys, rows, ACROSS + 1, paired);
        }
    }
}

/* Reading and writing the cache */

/* Copy a head's new keys or values into its slots. A number that is not finite becomes 0, and its token is marked: the
 * weight 0 of a masked slot times such a number would be NaN. */
static void put(char *to, const char *from, int64_t token, int64_t tokens, int64_t dim, int64_t dtype,
                uint8_t *faulty) {
    for (int64_t t = 0; t < tokens; t++) {
        int found;
        if (dtype == FLOAT32) {
            const uint32_t *bits = (const uint32_t *)from + t * token;
            uint32_t any = 0;
            for (int64_t d = 0; d < dim; d++) {
                uint32_t finite = (bits[d] & 0x7f800000) != 0x7f800000;
                ((uint32_t *)to)[t * dim + d] = finite ? bits[d] : 0;
                any |= !finite;
            }
            found = any;
        } else {
            const uint16_t *bits = (const uint16_t *)from + t * token, exponent = dtype == BFLOAT16 ? 0x7f80 : 0x7c00;
            uint16_t any = 0;
            for (int64_t d = 0; d < dim; d++) {
                uint16_t finite = (bits[d] & exponent) != exponent;
                ((uint16_t *)to)[t * dim + d] = finite ? bits[d] : 0;
                any |= !finite;
            }
            found = any;
        }
        if (found) __atomic_store_n(faulty + t, 1, __ATOMIC_RELAXED); /* threads of several heads may mark a token */
    }
}

/* Keys or values that are read after a tile, and prefetched while the tile is read. */
struct ahead {
    const char *from;
    int64_t slots;
};

/* Prefetch slots `first` to `stop`, each of `bytes` bytes. */
INLINE void ask(const struct ahead *ahead, int64_t first, int64_t stop, int64_t bytes) {
    stop = stop < ahead->slots ? stop : ahead->slots;
    for (int64_t at = first * bytes; at < stop * bytes; at += 64) _mm_prefetch(ahead->from + at, _MM_HINT_T1);
}

/* Read the keys of a tile, transposed, with zeros past the last key. */
INLINE void read_keys(float *to, const char *keys, int64_t dim, int count, int64_t dtype, const struct ahead *ahead) {
    int64_t size = size_of(dtype), whole = dim / LANES * LANES;
    for (int k = 0; k < TILE; k += LANES) {
        ask(ahead, k, k + LANES, dim * size);
        for (int64_t d = 0; d < whole; d += LANES) {
            vec x[LANES];
            EACH(i, LANES) x[i] = k + i < count ? load(keys + ((k + i) * dim + d) * size, dtype) : splat(0.0f);
            transpose(x);
            EACH(i, LANES) *(vec *)(to + (d + i) * TILE + k) = x[i];
        }
        for (int64_t d = whole; d < dim; d++)
            for (int i = 0; i < LANES; i++)
                to[d * TILE + k + i] = k + i < count ? load_one(keys + ((k + i) * dim + d) * size, dtype) : 0.0f;
    }
}

/* Read the values of a tile, each padded with zeros to `wide`. */
INLINE void read_values(float *to, const char *values, int64_t dim, int64_t wide, int count, int64_t dtype,
                        const struct ahead *ahead) {
    int64_t size = size_of(dtype), whole = dim / LANES * LANES;
    for (int k = 0; k < count; k++) {
        ask(ahead, k, k + 1, dim * size);
        for (int64_t d = 0; d < whole; d += LANES)
            *(vec *)(to + k * wide + d) = load(values + (k * dim + d) * size, dtype);
        for (int64_t d = whole; d < wide; d++)
            to[k * wide + d] = d < dim ? load_one(values + (k * dim + d) * size, dtype) : 0.0f;
    }
}

#ifdef __AVX512BF16__
/* The same in pairs: two adjacent dimensions of a key, or the values of two adjacent slots. VDPBF16PS adds the product
 * of the upper halves first (Intel's manual), so the upper half holds the earlier slot. */
INLINE void read_key_pairs(float *to, const char *keys, int64_t dim, int count, const struct ahead *ahead) {
    int64_t pairs = dim / 2;
    for (int k = 0; k < TILE; k += LANES) {
        ask(ahead, k, k + LANES, 4 * pairs);
        for (int64_t p = 0; p < pairs; p += LANES) {
            __mmask16 there = pairs - p < LANES ? (1 << (pairs - p)) - 1 : -1;
            vec x[LANES];
            EACH(i, LANES)
                x[i] =
                    k + i < count ? (vec)_mm512_maskz_loadu_epi32(there, keys + ((k + i) * pairs + p) * 4) : splat(0);
            transpose(x);
            EACH(i, LANES)
                if (p + i < pairs) *(vec *)(to + (p + i) * TILE + k) = x[i];
        }
    }
}

INLINE void read_value_pairs(float *to, const char *values, int64_t dim, int64_t wide, int count,
                             const struct ahead *ahead) {
    for (int k = 0; k < count; k += 2) {
        ask(ahead, k, k + 2, 2 * dim);
        for (int64_t d = 0; d < wide; d += LANES) {
            __mmask16 there = dim - d < LANES ? (1 << (dim - d)) - 1 : -1;
            const char *at = values + (k * dim + d) * 2;
            __m512i even = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, at));
            __m512i odd = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(k + 1 < count ? there : 0, at + 2 * dim));
            *(vec *)(to + k / 2 * wide + d) = (vec)_mm512_or_si512(odd, _mm512_slli_epi32(even, 16));
        }
    }
}
#endif

/* Write to visible[TILE] 1 for each slot of a tile that a token sees, and 0 for the others. */
INLINE void look(uint8_t *visible, const struct segment *segment, int64_t token, int64_t tile, int count) {
    int64_t stop = segment->start + segment->tokens;
    int64_t lowest = segment->lowest ? segment->lowest[token] : 0; /* all slots from it to `before` are visible */
    int64_t before = segment->mask ? stop - segment->columns : segment->start + token + 1;
    int64_t first = lowest > tile ? lowest - tile : 0, last = before - tile < count ? before - tile : count;
    memset(visible, 0, TILE);
    if (first < last) memset(visible + first, 1, last - first);
    if (segment->mask)
        for (int64_t slot = before > tile ? before : tile; slot < tile + count; slot++)
            visible[slot - tile] = segment->mask[token * segment->columns + slot - before];
}

/* Apply the rotary embedding to a head's new vectors, in place. */
static void rotate(char *vectors, int64_t token, const struct rotary *rotary, int64_t first, int64_t tokens,
                   int64_t dtype) {
    int64_t half = rotary->size / 2, size = size_of(dtype);
    for (int64_t t = 0; t < tokens; t++) {
        int64_t place = rotary->positions[first + t] * rotary->size * size;
        const char *cosines = rotary->cosines + place, *sines = rotary->sines + place;
        char *x = vectors + t * token * size, *y = x + half * size;
        for (int64_t d = 0; d < half; d++) {
            float a = load_one(x + d * size, dtype), b = load_one(y + d * size, dtype);
            float first = b * load_one(sines + d * size, dtype);
            float second = a * load_one(sines + (half + d) * size, dtype);
            store_one(x + d * size, fused_one(a, load_one(cosines + d * size, dtype), -first), dtype);
            store_one(y + d * size, fused_one(b, load_one(cosines + (half + d) * size, dtype), second), dtype);
        }
    }
}

/* The slots to prefetch during the tile that begins at slot `tile`: the rest of its tensor, or `then` at its end. */
INLINE struct ahead after(const char *from, int64_t tile, int64_t stop, int64_t bytes, struct ahead then) {
    if (tile + TILE >= stop) return then;
    return (struct ahead){from + (tile + TILE) * bytes, stop - tile - TILE};
}

/* Number of queries of the block that begins at `row`. */
INLINE int together(int64_t row, int64_t rows) { return rows - row < ROWS ? rows - row : ROWS; }

/* One past the last slot that a query up to `last_row` may see. */
INLINE int64_t reach(const struct segment *segment, int64_t last_row, int64_t group) {
    return segment->start + (segment->mask ? segment->tokens : last_row / group + 1);
}

/* The first tile that one of `rows` queries from row `first` on may see. */
INLINE int64_t bottom(const struct segment *segment, int64_t first, int64_t rows, int64_t group) {
    if (!segment->lowest) return 0;
    int64_t lowest = segment->lowest[first / group];
    for (int64_t token = first / group + 1; token <= (first + rows - 1) / group; token++)
        lowest = segment->lowest[token] < lowest ? segment->lowest[token] : lowest;
    return lowest / TILE * TILE;
}

/* Whether none of `rows` queries from row `first` on sees a tile. */
INLINE int unseen(const struct segment *segment, int64_t tile, int64_t first, int64_t rows, int64_t group) {
    return reach(segment, first + rows - 1, group) <= tile || bottom(segment, first, rows, group) > tile;
}

/* Attention of `rows` queries of one head from row `first` on: the scores of all keys, the weights, then all values. */
INLINE void attend_chunk(const struct layer *l, const struct shape *shape, const struct segment *segment, int64_t head,
                         int64_t first, int64_t rows, const char *keys, const char *values, struct ahead then,
                         struct scratch *s, int64_t dtype, int paired) {
    uint8_t visible[ROWS * TILE] __attribute__((aligned(64)));
    int64_t dim = shape->dim, wide = (dim + LANES - 1) / LANES * LANES, size = size_of(dtype);
    int64_t group = shape->heads / shape->kv_heads, stop = reach(segment, first + rows - 1, group);
    int64_t from = bottom(segment, first, rows, group);
    struct ahead values_next = {values + from * dim * size, stop - from};
    for (int64_t r = 0; r < rows; r++) {
        int64_t row = first + r;
        const char *query =
            l->query +
            ((head * group + row % group) * l->query_head + (segment->first + row / group) * l->query_token) * size;
        if (paired)
            memcpy(s->queries + r * dim, query, dim * size);
        else
            for (int64_t d = 0; d < dim; d++)
                s->queries[r * dim + d] = load_one(query + d * size, dtype) * shape->scale;
        s->sinks[r] = l->sinks ? l->sinks[head * group + row % group] : LOWEST;
    }
    for (int64_t tile = from; tile < stop; tile += TILE) {
        int count = stop - tile < TILE ? stop - tile : TILE;
        struct ahead ahead = after(keys, tile, stop, dim * size, values_next);
#ifdef __AVX512BF16__
        if (paired) read_key_pairs(s->keys, keys + tile * dim * size, dim, count, &ahead);
#endif
        if (!paired) read_keys(s->keys, keys + tile * dim * size, dim, count, dtype, &ahead);
        for (int64_t r = 0; r < rows; r += ROWS) {
            int many = together(r, rows);
            if (unseen(segment, tile, first + r, many, group)) continue;
            for (int i = 0; i < many; i++) look(visible + i * TILE, segment, (first + r + i) / group, tile, count);
            if (many == ROWS)
                score(s, r, tile, dim, shape->scale, visible, ROWS, paired);
            else
                for (int i = 0; i < many; i++) score(s, r + i, tile, dim, shape->scale, visible + i * TILE, 1, paired);
        }
    }
    for (int64_t r = 0; r < rows; r += ROWS) {
        int many = together(r, rows);
        int64_t lowest = bottom(segment, first + r, many, group);
        int64_t slots = (reach(segment, first + r + many - 1, group) + TILE - 1) / TILE * TILE;
        if (shape->cap != 0.0f)
            for (int i = 0; i < many; i++) limit(s, r + i, lowest, slots, shape->cap);
        if (many == ROWS)
            weigh(s, r, lowest, slots, ROWS, paired);
        else
            for (int i = 0; i < many; i++) weigh(s, r + i, lowest, slots, 1, paired);
    }
    memset(s->sums, 0, rows * wide * sizeof(float));
    for (int64_t tile = from; tile < stop; tile += TILE) {
        int count = stop - tile < TILE ? stop - tile : TILE;
        struct ahead ahead = after(values, tile, stop, dim * size, then);
#ifdef __AVX512BF16__
        if (paired) read_value_pairs(s->values, values + tile * dim * size, dim, wide, count, &ahead);
#endif
        if (!paired) read_values(s->values, values + tile * dim * size, dim, wide, count, dtype, &ahead);
        for (int64_t r = 0; r < rows; r += ROWS) {
            int many = together(r, rows);
            if (unseen(segment, tile, first + r, many, group)) continue;
            if (many == ROWS)
                gather_all(s, r, tile, wide, count, ROWS, paired);
            else
                for (int i = 0; i < many; i++) gather_all(s, r + i, tile, wide, count, 1, paired);
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        int64_t row = first + r;
        char *to =
            l->output + ((segment->first + row / group) * shape->heads + head * group + row % group) * dim * size;
        for (int64_t d = 0; d < dim; d++) store_one(to + d * size, s->sums[r * wide + d] / (float)s->totals[r], dtype);
    }
}

/* Number of queries of a chunk, whose weights stay in a core's L2 cache. */
INLINE int64_t chunk_of(int64_t rows, int64_t slots) {
    int64_t chunk = slots ? WEIGHTS / slots / ROWS * ROWS : 0;
    chunk = chunk < ROWS ? ROWS : chunk;
    return rows < chunk ? rows : chunk;
}

/* One key-value head: store its new keys and values, then attend. Rows are the queries of all its query heads. */
INLINE void attend(const struct layer *l, const struct shape *shape, const struct rotary *rotary,
                   const struct segment *segment, int64_t head, struct scratch *s, int64_t dtype, int paired) {
    int64_t dim = shape->dim, size = size_of(dtype), group = shape->heads / shape->kv_heads;
    int64_t rows = segment->tokens * group, range = (head * l->cache_head + segment->base * dim) * size;
    char *key = l->key + (head * l->key_head + segment->first * l->key_token) * size;
    const char *value = l->value + (head * l->value_head + segment->first * l->value_token) * size;
    char *keys = l->keys + range, *values = l->values + range;
    if (rotary && rotary->size) {
        rotate(key, l->key_token, rotary, segment->first, segment->tokens, dtype);
        for (int64_t each = head * group; each < (head + 1) * group; each++)
            rotate(l->query + (each * l->query_head + segment->first * l->query_token) * size, l->query_token, rotary,
                   segment->first, segment->tokens, dtype);
    }
    uint8_t *faulty = l->faulty + segment->first;
    put(keys + segment->start * dim * size, key, l->key_token, segment->tokens, dim, dtype, faulty);
    put(values + segment->start * dim * size, value, l->value_token, segment->tokens, dim, dtype, faulty);
    s->slots = (segment->start + segment->tokens + TILE - 1) / TILE * TILE;
    int64_t chunk = chunk_of(rows, s->slots);
    for (int64_t first = 0; first < rows; first += chunk) {
        /* the keys for the next chunk; after the last chunk, the keys of the head that this thread likely takes next */
        int64_t lowest = bottom(segment, first + chunk < rows ? first + chunk : 0, 1, group);
        struct ahead then = {keys + lowest * dim * size, s->slots - lowest};
        if (first + chunk >= rows) then.from += omp_get_num_threads() * l->cache_head * size;
        if (first + chunk >= rows && head + omp_get_num_threads() >= shape->kv_heads) then.slots = 0;
        attend_chunk(l, shape, segment, head, first, rows - first < chunk ? rows - first : chunk, keys, values, then, s,
                     dtype, paired);
    }
}

/* Take `count` floats of the memory at `*at`, in whole cache lines. */
static float *part(char **at, int64_t count) {
    float *here = (float *)*at;
    *at += (count * sizeof(float) + 63) / 64 * 64;
    return here;
}

/* The most queries and the most weights of a chunk of any segment. */
INLINE void most(const struct shape *shape, const struct segment *segments, int64_t count, int64_t *chunk,
                 int64_t *weights) {
    *chunk = *weights = 0;
    for (int64_t i = 0; i < count; i++) {
        int64_t slots = (segments[i].start + segments[i].tokens + TILE - 1) / TILE * TILE;
        int64_t rows = chunk_of(segments[i].tokens * (shape->heads / shape->kv_heads), slots);
        *chunk = rows > *chunk ? rows : *chunk;
        *weights = rows * slots > *weights ? rows * slots : *weights;
    }
}

int64_t attention_floats(const struct shape *shape, const struct segment *segments, int64_t count) {
    int64_t dim = shape->dim, wide = (dim + LANES - 1) / LANES * LANES, chunk, weights;
    most(shape, segments, count, &chunk, &weights);
    /* each of the seven parts begins at a cache line of 16 floats */
    return (dim + wide) * TILE + weights + chunk * (dim + wide + 3) + 7 * 16;
}

void attention_tasks(const struct layer *layer, const struct shape *shape, const struct rotary *rotary,
                     const struct segment *segments, int64_t count, float *memory, int64_t *next) {
    int64_t dim = shape->dim, wide = (dim + LANES - 1) / LANES * LANES, chunk, weights;
    char *at = (char *)memory;
    struct scratch s;
    most(shape, segments, count, &chunk, &weights);
    s.keys = part(&at, dim * TILE);
    s.values = part(&at, wide * TILE);
    s.queries = part(&at, chunk * dim);
    s.weights = part(&at, weights);
    s.sums = part(&at, chunk * wide);
    s.sinks = part(&at, chunk);
    s.totals = (double *)part(&at, 2 * chunk);
    TASKS(task, count * shape->kv_heads, next) {
        const struct segment *segment = &segments[task / shape->kv_heads];
        int64_t head = task % shape->kv_heads;
        if (shape->dtype == FLOAT32)
            attend(layer, shape, rotary, segment, head, &s, FLOAT32, 0);
        else if (shape->dtype == FLOAT16)
            attend(layer, shape, rotary, segment, head, &s, FLOAT16, 0);
#ifdef __AVX512BF16__
        else if (dim % 2 == 0)
            attend(layer, shape, rotary, segment, head, &s, BFLOAT16, 1);
#endif
        else
            attend(layer, shape, rotary, segment, head, &s, BFLOAT16, 0);
    }
}

/* Compute one layer's attention of all segments on OpenMP's threads. Return 0, or -1 if memory cannot be allocated. */
int dynatree_attention(const struct layer *layer, const struct shape *shape, const struct segment *segments,
                       int64_t count) {
    int64_t bytes = (attention_floats(shape, segments, count) * sizeof(float) + 63) / 64 * 64, next = 0;
    int failed = 0;
#pragma omp parallel
    {
        float *memory = aligned_alloc(64, bytes);
        if (memory)
            attention_tasks(layer, shape, NULL, segments, count, memory, &next);
        else {
#pragma omp atomic write
            failed = -1;
        }
        free(memory);
    }
    return failed;
}
