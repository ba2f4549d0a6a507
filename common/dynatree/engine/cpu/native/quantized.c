/* Linear layers over weights of 8 and 4 bits: see `quantized_linear.py`.
 *
 * A row is quantised to signed 8 bits, with one scale for each block of 32 inputs, or of 64 if a group of
 * weights has as many. A unit of inputs is a block or a group of weights, whichever is smaller. The sum of products
 * over a unit is an integer, which is exact in any order. Units are then added in float32, from the first to the last,
 * in one lane for each feature. So a row's result has the same bits whatever other rows are computed beside it, and the
 * same bits on every build.
 *
 * Quantised rows are int8 [rows][number_bytes], then float scales [blocks][rows], then int32 starts [units][rows]: the
 * sum of a row's numbers times -offset, or with minimums the sum itself. Memory of SPARE further rows may be read.
 */
#ifdef __AVX512BF16__
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "linear.h"

INLINE int64_t block_of(const struct weights *w) { return w->group < 64 ? 32 : 64; }
INLINE int64_t unit_of(const struct weights *w) { return w->group < 64 ? w->group : 64; }
INLINE int64_t blocks_of(const struct linear *l) {
    return (l->inputs + block_of(&l->weights) - 1) / block_of(&l->weights);
}
#define SPARE (CHUNK / TILE_ROWS - 1) /* rows after the last that may be multiplied; nobody uses their results */

/* Bytes from row to row: an odd number of cache lines, so that rows do not share sets of the L1 cache. */
INLINE int64_t number_bytes(const struct linear *l) { return ((l->inputs + 63) / 64 | 1) * 64; }
INLINE int64_t scales_at(const struct linear *l, int64_t rows) { return (rows + SPARE) * number_bytes(l); }
INLINE int64_t starts_at(const struct linear *l, int64_t rows) { return scales_at(l, rows) + blocks_of(l) * rows * 4; }

int64_t quantized_bytes(const struct linear *l, int64_t rows) {
    return starts_at(l, rows) + (l->inputs / unit_of(&l->weights) * rows + SPARE) * 4;
}

/* Bytes of one panel's scales (or minimums) for a group. */
INLINE int64_t scale_bytes(const struct weights *w) {
    return PANEL * (w->scales == STEPS ? 1 : w->scales == HALVES ? 2 : 4);
}
INLINE int64_t group_bytes(const struct weights *w) {
    return w->group * PANEL * w->bits / 8 + scale_bytes(w) * (1 + w->minimums);
}
/* Bytes of the float16 steps in front of each `super` inputs. */
INLINE int64_t header_bytes(const struct weights *w) { return w->scales == STEPS ? PANEL * 2 * (1 + w->minimums) : 0; }

/* Bytes of a panel's first `inputs`. */
INLINE int64_t panel_bytes(const struct linear *l, int64_t inputs) {
    const struct weights *w = &l->weights;
    int64_t headers = w->scales == STEPS ? (inputs + w->super - 1) / w->super : 0;
    return inputs / w->group * group_bytes(w) + headers * header_bytes(w);
}

int64_t quantized_panel(const struct linear *l) { return panel_bytes(l, l->inputs); }

/* Quantise one block of a row: compute its numbers in [-127, 127], their scale, and the starts of its units, which are
 * `stride` apart. A block
 * with a number that is not finite gets the scale NaN, and a block whose numbers are too small to divide by the scale
 * 0. */
INLINE void quantize_block(const struct linear *l, const char *from, int64_t inputs, int8_t *to, float *scale,
                           int32_t *starts, int64_t stride, int64_t dtype) {
    const int64_t size = size_of(dtype), unit = unit_of(&l->weights);
    ivec most = {0};
    for (int64_t i = 0; i < inputs; i += LANES) {
        ivec bits = (ivec)load(from + i * size, dtype) & 0x7fffffff;
        most = (ivec)choose(bits > most, (vec)bits, (vec)most);
    }
    int32_t largest = 0;
    EACH(i, LANES)
        if (most[i] > largest) largest = most[i];
    float magnitude, inverse = 0.0f;
    memcpy(&magnitude, &largest, sizeof magnitude);
    if (largest >= 0x7f800000)
        *scale = __builtin_nanf("");
    else if (magnitude < 0x1p-100f)
        *scale = 0.0f;
    else
        *scale = magnitude / 127.0f, inverse = 127.0f / magnitude;
    for (int64_t first = 0; first < inputs; first += unit) {
        ivec sums = {0};
        for (int64_t i = first; i < first + unit; i += LANES) {
            vec x = {0};
            if (inverse != 0.0f) x = load(from + i * size, dtype) * inverse;
#if LANES == 16
            __m512i whole = _mm512_cvtps_epi32((__m512)x);
            _mm_storeu_si128((void *)(to + i), _mm512_cvtepi32_epi8(whole));
#else
            __m256i whole = _mm256_cvtps_epi32((__m256)x);
            __m128i low = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
            _mm_storel_epi64((void *)(to + i), _mm_packs_epi16(low, low));
#endif
            sums += (ivec)whole;
        }
        int32_t sum = 0;
        EACH(i, LANES) sum += sums[i];
        starts[first / unit * stride] = l->weights.minimums ? sum : -(int32_t)l->weights.offset * sum;
    }
}

void quantize_rows(const struct linear *l, const char *rows, int64_t count, char *quantized) {
    int64_t wide = block_of(&l->weights), blocks = blocks_of(l), all = count * blocks, size = size_of(l->dtype);
    float *scales = (float *)(quantized + scales_at(l, count));
    int32_t *starts = (int32_t *)(quantized + starts_at(l, count));
    int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    for (int64_t at = all * thread / threads, stop = all * (thread + 1) / threads; at < stop; at++) {
        int64_t row = at / blocks, block = at % blocks, first = block * wide;
        int64_t inputs = l->inputs - first < wide ? l->inputs - first : wide;
        const char *from = rows + (row * l->inputs + first) * size;
        int8_t *to = (int8_t *)quantized + row * number_bytes(l) + first;
        float *scale = scales + block * count + row;
        int32_t *start = starts + first / unit_of(&l->weights) * count + row;
        if (l->dtype == FLOAT32)
            quantize_block(l, from, inputs, to, scale, start, count, FLOAT32);
        else if (l->dtype == BFLOAT16)
            quantize_block(l, from, inputs, to, scale, start, count, BFLOAT16);
        else
            quantize_block(l, from, inputs, to, scale, start, count, FLOAT16);
    }
}

/* Add the products of four unsigned weights by four signed inputs to `sum`, in each lane. `narrow`: weights are below
 * 128. */
INLINE ivec dot(ivec sum, ivec weights, ivec inputs, int narrow) {
#if LANES == 16 && defined(__AVX512VNNI__)
    /* as assembly: gcc 12 moves and spills the sums around its own intrinsic, which halves the speed */
    (void)narrow;
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(inputs));
    return sum;
#elif LANES == 16
    const __m512i w = (__m512i)weights, x = (__m512i)inputs, ones = _mm512_set1_epi16(1);
    if (narrow) return sum + (ivec)_mm512_madd_epi16(_mm512_maddubs_epi16(w, x), ones);
    const __m512i nibble = _mm512_set1_epi8(15); /* pairs of products by 8 bits would saturate 16 bits */
    const __m512i low = _mm512_and_si512(w, nibble), high = _mm512_and_si512(_mm512_srli_epi16(w, 4), nibble);
    return sum + (ivec)_mm512_madd_epi16(_mm512_maddubs_epi16(low, x), ones) +
           (ivec)_mm512_madd_epi16(_mm512_maddubs_epi16(high, x), _mm512_set1_epi16(16));
#elif defined(__AVXVNNI__)
    (void)narrow;
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(weights), "x"(inputs));
    return sum;
#else
    const __m256i w = (__m256i)weights, x = (__m256i)inputs, ones = _mm256_set1_epi16(1);
    if (narrow) return sum + (ivec)_mm256_madd_epi16(_mm256_maddubs_epi16(w, x), ones);
    const __m256i nibble = _mm256_set1_epi8(15);
    const __m256i low = _mm256_and_si256(w, nibble), high = _mm256_and_si256(_mm256_srli_epi16(w, 4), nibble);
    return sum + (ivec)_mm256_madd_epi16(_mm256_maddubs_epi16(low, x), ones) +
           (ivec)_mm256_madd_epi16(_mm256_maddubs_epi16(high, x), _mm256_set1_epi16(16));
#endif
}

/* Copy four bytes into every lane. */
INLINE ivec four(const int8_t *from) {
#if LANES == 16
    ivec v;
    __asm__("vpbroadcastd %1, %0" : "=v"(v) : "m"(*(const int32_t *)from));
    return v;
#else
    int32_t x;
    memcpy(&x, from, sizeof x);
    return (ivec)_mm256_set1_epi32(x);
#endif
}

/* The scales of LANES features. Scales of 8 bits are multiplied by the float16 steps in `header`. */
INLINE vec scales_of(const char *at, const char *header, int64_t lane, int64_t kind) {
    if (kind == FLOATS) return *(const vec *)(at + lane * 4);
    if (kind == HALVES) return load(at + lane * 2, FLOAT16);
#if LANES == 16
    vec step = (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)(at + lane))));
#else
    vec step = (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)(at + lane))));
#endif
    return step * load(header + lane * 2, FLOAT16); /* exact: 7 bits by 11 */
}

INLINE vec as_float(ivec x) {
#if LANES == 16
    return (vec)_mm512_cvtepi32_ps((__m512i)x);
#else
    return (vec)_mm256_cvtepi32_ps((__m256i)x);
#endif
}

/* `count` quantised rows, from one of them and from the beginning of a unit on. */
struct left {
    const int8_t *numbers;
    const float *scales;
    const int32_t *starts;
    int64_t row, count; /* bytes from row to row of numbers; rows, and so places from unit to unit of the others */
};

INLINE struct left left_at(const struct linear *l, const char *quantized, int64_t count, int64_t row, int64_t input) {
    return (struct left){
        .numbers = (const int8_t *)quantized + row * number_bytes(l) + input,
        .scales = (const float *)(quantized + scales_at(l, count)) + input / block_of(&l->weights) * count + row,
        .starts = (const int32_t *)(quantized + starts_at(l, count)) + input / unit_of(&l->weights) * count + row,
        .row = number_bytes(l),
        .count = count,
    };
}

/* The places of a unit's weights in a panel. */
struct right {
    const char *codes, *scales, *header;
};

/* Vectors of a panel that are multiplied with `rows` rows at a time. With AVX-512, registers hold their integers and
 * their float32 sums. */
INLINE int abreast(int rows) { return LANES == 16 && rows > ROWS / 2 ? ACROSS / 2 : across(rows); }

/* sums[rows][vectors] += the products of one unit, for the vectors from `lane` on. Each 256 bytes of codes prefetch
 * `lines` cache lines, which begin at `ahead`, into the L1 cache if they are needed `soon`. Return the next line to
 * prefetch. */
INLINE const char *meet(vec (*sums)[PANEL / LANES], struct left left, struct right right, const struct weights *w,
                        int64_t lane, int rows, int vectors, int bits, const char *ahead, int lines, int soon) {
    const ivec nibble = (ivec){0} + 0x0f0f0f0f;
    const int64_t steps = unit_of(w) * bits / 32;
    const int narrow = bits == 4 || w->narrow;
    ivec s[ROWS][PANEL / LANES];
    EACH(r, rows) {
        ivec start = {0};
        if (!w->minimums) start = four((const int8_t *)(left.starts + r));
        EACH(c, vectors) s[r][c] = start;
    }
    const int8_t *x = left.numbers;
    const char *at = right.codes + lane * 4;
    _Pragma("GCC unroll 1") for (int64_t step = 0; step < steps; step++, at += PANEL * 4, x += 32 / bits) {
        for (int line = 0; line < lines; line++, ahead += 64) {
            if (soon)
                _mm_prefetch(ahead, _MM_HINT_T0);
            else
                _mm_prefetch(ahead, _MM_HINT_T1);
        }
        ivec b[PANEL / LANES];
        EACH(c, vectors) {
            b[c] = *(const ivec *)(at + c * LANES * 4);
            if (bits == 4) b[c] &= nibble;
        }
        EACH(r, rows) {
            ivec v = four(x + r * left.row);
            EACH(c, vectors) s[r][c] = dot(s[r][c], b[c], v, narrow);
        }
        if (bits == 4) { /* loaded again: registers do not hold both halves */
            EACH(c, vectors) b[c] = (*(const ivec *)(at + c * LANES * 4) >> 4) & nibble;
            EACH(r, rows) {
                ivec v = four(x + 4 + r * left.row);
                EACH(c, vectors) s[r][c] = dot(s[r][c], b[c], v, narrow);
            }
        }
    }
    const char *minimums = right.scales + scale_bytes(w);
    EACH(c, vectors) {
        const int64_t first = lane + c * LANES;
        vec scale = scales_of(right.scales, right.header, first, w->scales), minimum = {0};
        if (w->minimums) minimum = scales_of(minimums, right.header + PANEL * 2, first, w->scales);
        EACH(r, rows) {
            vec sum = as_float(s[r][c]) * scale;
            if (w->minimums) sum = fused(splat((float)left.starts[r]), minimum, sum);
            sums[r][c] = fused(splat(left.scales[r]), sum, sums[r][c]);
        }
    }
    return ahead;
}

/* Add the products of some rows by the inputs of a panel from `first` on. */
INLINE const char *meet_all(float *sums, const struct linear *l, const char *quantized, int64_t count, int64_t row,
                            const char *right, int64_t first, int64_t inputs, int rows, int bits, const char *ahead,
                            int lines, int soon) {
    const struct weights *w = &l->weights;
    const int vectors = abreast(rows), parts = PANEL / LANES / vectors, streaming = !ahead;
    const int64_t unit = unit_of(w), codes = w->group * PANEL * w->bits / 8;
    const int64_t rest = group_bytes(w) - codes; /* which `meet` does not prefetch */
    for (int part = 0; part < parts; part++) {
        struct right at = {.codes = right};
        vec held[ROWS][PANEL / LANES], *to = (vec *)sums + part * vectors;
        EACH(r, rows)
            EACH(c, vectors) held[r][c] = to[r * (PANEL / LANES) + c];
        for (int64_t input = first; input < first + inputs; input += unit, at.codes += unit * PANEL * w->bits / 8) {
            if (input % w->group == 0) {
                if (input > first) at.codes = at.scales + scale_bytes(w) * (1 + w->minimums);
                if (w->scales == STEPS && input % w->super == 0) at.header = at.codes, at.codes += header_bytes(w);
                at.scales = at.codes + codes;
                if (!row && !part && lines && !streaming)
                    for (int64_t line = 0; line < rest; line += 64, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T0);
            }
            const struct left left = left_at(l, quantized, count, row, input);
            if (streaming) ahead = at.codes + AHEAD;
            ahead = meet(held, left, at, w, part * vectors * LANES, rows, vectors, bits, ahead,
                         part < lines ? (lines + parts - 1) / parts : 0, soon);
        }
        EACH(r, rows)
            EACH(c, vectors) to[r * (PANEL / LANES) + c] = held[r][c];
    }
    return ahead;
}

INLINE void add_panel(const struct linear *l, int64_t panel, const char *quantized, int64_t count, int64_t first,
                      int64_t rows, float *sums, int bits) {
    const struct weights *w = &l->weights;
    const int64_t unit = w->scales == STEPS ? w->super : w->group, groups = (rows + ROWS - 1) / ROWS;
    const int64_t bytes = panel_bytes(l, unit), fitting = (BLOCK + BLOCK / 8) / 2 / bytes;
    const int streaming = groups == 1 && abreast(rows) * LANES == PANEL; /* the panel is read once, from end to end */
    const int64_t block = streaming ? l->inputs : (fitting > 1 ? fitting : 1) * unit;
    const int soon = groups * 4 > bits; /* otherwise memory and not arithmetic limits the speed */
    const char *right = l->weight + panel * quantized_panel(l);
    memset(sums, 0, rows * PANEL * sizeof(float));
    for (int64_t input = 0; input < l->inputs; input += block) {
        int64_t inputs = l->inputs - input < block ? l->inputs - input : block;
        const char *next = right + panel_bytes(l, inputs), *ahead = next;
        if (streaming)
            ahead = NULL;
        else if (inputs == l->inputs - input)
            ahead += (omp_get_num_threads() - 1) * quantized_panel(l); /* likely this thread's next panel */
        for (int64_t group = 0, row = 0, many; group < groups; group++, row += many) {
            /* the groups of rows share the prefetches; later chunks find the panel in a cache */
            int lines = first ? 0 : groups > 3 ? group < 4 : groups == 3 ? 1 + !group : 4 / groups;
            many = (rows - row) / (groups - group);
#define CASE(r)                                                                                                      \
    case r:                                                                                                          \
        ahead = meet_all(sums + row * PANEL, l, quantized, count, first + row, right, input, inputs, r, bits, ahead, \
                         lines, soon);                                                                               \
        break;
            switch (many) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
        }
        right = next;
    }
}

/* Tiles: AMX multiplies up to TILE_ROWS rows by LANES features and by a unit of inputs in one instruction. The integers
 * and the order of the float32 sums are those of `meet`, and so are the bits. */

#ifdef __AVX512BF16__
INLINE intptr_t aligned(intptr_t at) { return (at + 63) / 64 * 64; }

static int has_tiles; /* whether the CPU has AMX for 8 bits, and the system lets this process use it */

__attribute__((constructor)) static void look_for_tiles(void) {
    enum { LEAF = 7, TILES = 1 << 24, EIGHT_BITS = 1 << 25, REQUEST = 0x1023 /* ARCH_REQ_XCOMP_PERM */, DATA = 18 };
    unsigned a, b, c, d = 0;
    if (__get_cpuid_count(LEAF, 0, &a, &b, &c, &d) && d & TILES && d & EIGHT_BITS)
        has_tiles = syscall(SYS_arch_prctl, REQUEST, DATA) == 0;
}

/* The operand of `ldtilecfg`. */
struct tiles {
    uint8_t palette, first_row, reserved[14];
    uint16_t bytes[16]; /* of a row, by tile */
    uint8_t rows[16];   /* by tile */
};

/* As assembly, because gcc's intrinsics for loads do not tell the compiler which memory they read. */
#define TILE_LOAD(tile, from, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile : : "r"(from), "r"((int64_t)(stride)) : "memory")
#define TILE_STORE(tile, to, stride) \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" : : "r"(to), "r"((int64_t)(stride)) : "memory")
#define TILE_MULTIPLY(left, right, to)                                    \
    __asm__ volatile("tilezero %%tmm" #to                                 \
                     "\n\t"                                               \
                     "tdpbsud %%tmm" #right ", %%tmm" #left ", %%tmm" #to \
                     :                                                    \
                     :)

/* Weights of TILE_INPUTS inputs of a panel. */
struct block {
    uint8_t codes[TILE_INPUTS / 4][PANEL * 4]; /* codes of 4 bits, expanded to 8 */
    int32_t products[2][TILE_ROWS][LANES];     /* by turns, so that one is written while the other is read */
    struct right units[TILE_INPUTS / 16];
};
_Static_assert(sizeof(struct block) + 63 <= BLOCK / 2 * sizeof(float), "`linear_floats` has room for it");

/* Find the units of the next `inputs` of a panel, and expand codes of 4 bits. Each 256 bytes of them prefetch `lines`
 * cache lines, which begin at `*ahead`. Return the address after the inputs. */
INLINE const char *open_block(struct block *block, const struct weights *w, const char *right, int64_t inputs,
                              const char **ahead, int lines) {
    const __m512i nibble = _mm512_set1_epi8(15);
    const int64_t codes = w->group * PANEL * w->bits / 8, unit = unit_of(w);
    const char *header = NULL;
    struct right *at = block->units;
    uint8_t *to = block->codes[0];
    for (int64_t input = 0; input < inputs; input += w->group) {
        if (w->scales == STEPS && input % w->super == 0) header = right, right += header_bytes(w);
        const char *from = w->bits == 8 ? right : (const char *)to, *end = right + codes;
        for (int64_t begun = 0; begun < w->group; begun += unit, at++)
            *at = (struct right){.codes = from + begun * PANEL, .scales = end, .header = header};
        for (; w->bits == 4 && right < end; right += PANEL * 4, to += PANEL * 8) {
            for (int line = 0; line < lines; line++, *ahead += 64) _mm_prefetch(*ahead, _MM_HINT_T1);
            EACH(v, PANEL / LANES) {
                __m512i code = _mm512_loadu_si512(right + v * LANES * 4);
                _mm512_storeu_si512(to + v * LANES * 4, _mm512_and_si512(code, nibble));
                code = _mm512_and_si512(_mm512_srli_epi16(code, 4), nibble);
                _mm512_storeu_si512(to + PANEL * 4 + v * LANES * 4, code);
            }
        }
        right = end + scale_bytes(w) * (1 + w->minimums);
    }
    return right;
}

/* sums[rows] += the products of `units` units, for the vector of features from `lane` on. Each unit prefetches `lines`
 * cache lines into the L1 cache, which begin at `ahead`, and as many into the L2 cache, which begin FARTHER on. */
INLINE void meet_tiles(float *sums, struct left left, struct block *block, const struct weights *w, int64_t units,
                       int64_t lane, int rows, int minimums, const char *ahead, int lines) {
    const int64_t unit = unit_of(w);
    vec s[TILE_ROWS];
    EACH(r, rows) s[r] = *(vec *)(sums + r * PANEL + lane);
    for (int64_t next = 0; next <= units; next++) { /* products are stored a unit before they are read */
        if (next < units) {
            for (int line = 0; line < lines; line++, ahead += 64) {
                _mm_prefetch(ahead, _MM_HINT_T0);
                _mm_prefetch(ahead + FARTHER, _MM_HINT_T1);
            }
            TILE_LOAD(0, left.numbers + next * unit, left.row);
            TILE_LOAD(1, block->units[next].codes + lane * 4, PANEL * 4);
            TILE_MULTIPLY(0, 1, 2);
            TILE_STORE(2, block->products[next & 1], sizeof **block->products);
        }
        if (!next) continue;
        const struct right right = block->units[next - 1];
        const int32_t (*products)[LANES] = block->products[(next - 1) & 1];
        vec scale = scales_of(right.scales, right.header, lane, w->scales), minimum = {0};
        if (minimums) minimum = scales_of(right.scales + scale_bytes(w), right.header + PANEL * 2, lane, w->scales);
        EACH(r, rows) {
            ivec product = *(const ivec *)products[r];
            if (!minimums) product += left.starts[r];
            vec sum = as_float(product) * scale;
            if (minimums) sum = fused(splat((float)left.starts[r]), minimum, sum);
            s[r] = fused(splat(left.scales[r]), sum, s[r]);
        }
        left.starts += left.count;
        if (unit >= 32 || next % 2 == 0) left.scales += left.count;
    }
    EACH(r, rows) *(vec *)(sums + r * PANEL + lane) = s[r];
}

/* Do the same as `add_panel`. Groups of rows have one size: the last may multiply spare rows. */
static void add_panel_by_tiles(const struct linear *l, int64_t panel, const char *quantized, int64_t count,
                               int64_t first, int64_t rows, float *sums) {
    const struct weights *w = &l->weights;
    const int64_t unit = unit_of(w), groups = (rows + TILE_ROWS - 1) / TILE_ROWS, many = (rows + groups - 1) / groups;
    const uint16_t wide = LANES * 4;
    const struct tiles tiles = {.palette = 1, .bytes = {unit, wide, wide}, .rows = {many, unit / 4, many}};
    struct block *block = (struct block *)aligned((intptr_t)(sums + CHUNK * PANEL));
    const char *right = l->weight + panel * quantized_panel(l);
    const int opening = first || w->bits == 8 ? 0 : 2; /* lines that are prefetched as 256 bytes are expanded */
    memset(sums, 0, groups * many * PANEL * sizeof(float));
    __asm__ volatile("ldtilecfg %0" : : "m"(tiles));
    for (int64_t input = 0; input < l->inputs; input += TILE_INPUTS) {
        const int64_t inputs = l->inputs - input < TILE_INPUTS ? l->inputs - input : TILE_INPUTS, units = inputs / unit;
        const int64_t bytes = panel_bytes(l, inputs), turns = groups * units * (PANEL / LANES);
        const char *ahead = right + bytes;
        if (inputs == l->inputs - input) ahead += (omp_get_num_threads() - 1) * quantized_panel(l); /* likely next */
        right = open_block(block, w, right, inputs, &ahead, opening);
        const int64_t left_over = bytes / 64 - inputs * PANEL / 2 / 256 * opening;
        const int64_t lines = first ? 0 : (left_over + turns - 1) / turns;
        for (int64_t row = 0; row < groups * many; row += many) {
            const struct left left = left_at(l, quantized, count, first + row, input);
            for (int64_t lane = 0; lane < PANEL; lane += LANES, ahead += lines * units * 64) {
#define OF(r)                                                                                \
    case r:                                                                                  \
        if (w->minimums)                                                                     \
            meet_tiles(sums + row * PANEL, left, block, w, units, lane, r, 1, ahead, lines); \
        else                                                                                 \
            meet_tiles(sums + row * PANEL, left, block, w, units, lane, r, 0, ahead, lines); \
        break;
                switch (many) {
                    OF(3) OF(4) OF(5) OF(6) OF(7) OF(8) OF(9) OF(10) OF(11) OF(12) OF(13) OF(14) OF(15) OF(16)
                }
            }
        }
    }
    __asm__ volatile("tilerelease");
}
#endif

void quantized_sums(const struct linear *l, int64_t panel, const char *quantized, int64_t count, int64_t first,
                    int64_t rows, float *sums) {
#ifdef __AVX512BF16__
    if (has_tiles && rows >= (l->weights.bits == 8 ? TILE_LEAST_8 : TILE_LEAST_4)) {
        add_panel_by_tiles(l, panel, quantized, count, first, rows, sums);
        return;
    }
#endif
    if (l->weights.bits == 8)
        add_panel(l, panel, quantized, count, first, rows, sums, 8);
    else
        add_panel(l, panel, quantized, count, first, rows, sums, 4);
}
