/* A model's forward pass in one call: see `native_program.py` and `native_runner.py`.
 *
 * A program is a list of operations over buffers [n, width]. All threads execute it together, with a barrier after
 * every operation. Before a barrier, each thread prefetches its next weights, so that it reads memory while it waits.
 */
#include <math.h>
#include <stdlib.h>

#include "kernels.h"

enum kind { EMBED, NORM, LINEAR, ATTEND, EXPERTS };

/* Place of the heads' vectors in a buffer, in elements: head h of token t begins at offset + h * head + t * token. */
struct place {
    int64_t buffer, offset, head, token;
};

struct operation {
    int64_t kind;
    int64_t from, to, other; /* indices of buffers; other < 0: none */
    /* NORM: LayerNorm (Ba et al. 2016) if centered, otherwise RMSNorm (Zhang and Sennrich 2019), of each of a row's
     * `parts` vectors by itself; there is no shift beside `other`, which is added. `last`: only the rows whose logits
     * are requested are normalized; all later operations compute `kept` rows. */
    const char *scale, *shift; /* NORM: [width], shift may be NULL. EMBED: scale is the table [vocabulary, width] */
    int64_t width, parts, centered, last;
    float epsilon, offset; /* NORM: `offset` is added to each scale */
    float factor;          /* EMBED: multiplies the embeddings */
    struct linear linear;  /* LINEAR */
    /* ATTEND */
    struct place query, key, value;
    int64_t layer, rotary; /* rotary: which of the rotary embeddings the layer has; < 0: none */
    const float *sinks;    /* see struct layer */
    /* EXPERTS */
    int64_t logits; /* buffer of the router's logits [n, experts] */
    struct experts experts;
};

struct program {
    const struct operation *operations;
    int64_t count;
    struct shape shape;
};

struct call {
    int64_t n, kept;
    const int64_t *tokens; /* [n] */
    const int64_t *keep;   /* [kept]: rows whose logits are requested */
    char *const *buffers;
    const struct rotary *rotaries;
    const struct segment *segments; /* [localities, segment_count] */
    int64_t segment_count, localities;
    const int64_t *locality;                       /* [layers]: which of the localities each layer has */
    char *cache;                                   /* [layers, 2, kv_heads, slots, dim] */
    int64_t cache_layer, cache_values, cache_head; /* strides in elements */
    uint8_t *faulty;                               /* [n], see struct layer */
};

#define COUNTERS (1 + EXPERTS_COUNTERS) /* counters of tasks of an operation */
#define SUMS 16 /* partial sums of a norm; the same number in every build, so that all builds give the same bits */

INLINE float total(const vec *sums) {
    float sum = 0.0f;
    EACH(i, SUMS) sum += sums[i / LANES][i % LANES];
    return sum;
}

/* `plus`: [width] or NULL; it is added to the result, which is rounded once. */
INLINE void normalize(const struct operation *o, const char *from, const char *plus, char *to, int64_t dtype) {
    int64_t width = o->width, whole = width / SUMS * SUMS, size = size_of(dtype);
    float mean = 0.0f, square = 0.0f;
    if (o->centered) {
        vec sums[SUMS / LANES] = {0};
        for (int64_t d = 0; d < whole; d += SUMS)
            EACH(v, SUMS / LANES) sums[v] += load(from + (d + v * LANES) * size, dtype);
        mean = total(sums);
        for (int64_t d = whole; d < width; d++) mean += load_one(from + d * size, dtype);
        mean /= width;
    }
    vec sums[SUMS / LANES] = {0};
    for (int64_t d = 0; d < whole; d += SUMS) {
        EACH(v, SUMS / LANES) {
            vec x = load(from + (d + v * LANES) * size, dtype) - mean;
            sums[v] = fused(x, x, sums[v]);
        }
    }
    square = total(sums);
    for (int64_t d = whole; d < width; d++) {
        float x = load_one(from + d * size, dtype) - mean;
        square = fused_one(x, x, square);
    }
    float factor = 1.0f / sqrtf(square / width + o->epsilon);
    for (int64_t d = 0; d < whole; d += LANES) {
        vec x = (load(from + d * size, dtype) - mean) * factor, scale = load(o->scale + d * size, dtype) + o->offset;
        vec result = x * scale;
        if (plus) result = fused(x, scale, load(plus + d * size, dtype));
        store(to + d * size, result, dtype);
    }
    for (int64_t d = whole; d < width; d++) {
        float x = (load_one(from + d * size, dtype) - mean) * factor;
        float scale = load_one(o->scale + d * size, dtype) + o->offset;
        float result = x * scale;
        if (plus) result = fused_one(x, scale, load_one(plus + d * size, dtype));
        store_one(to + d * size, result, dtype);
    }
}

static void embed_tasks(const struct operation *o, const struct call *c, int64_t dtype, int64_t *next) {
    int64_t whole = o->width / LANES * LANES, size = size_of(dtype), bytes = o->width * size;
    TASKS(row, c->n, next) {
        const char *from = o->scale + c->tokens[row] * bytes;
        char *to = c->buffers[o->to] + row * bytes;
        for (int64_t d = 0; d < whole; d += LANES)
            store(to + d * size, load(from + d * size, dtype) * o->factor, dtype);
        for (int64_t d = whole; d < o->width; d++)
            store_one(to + d * size, load_one(from + d * size, dtype) * o->factor, dtype);
    }
}

static void norm_tasks(const struct operation *o, const struct call *c, int64_t rows, int64_t dtype, int64_t *next) {
    int64_t bytes = o->width * size_of(dtype);
    const char *other = o->other < 0 ? NULL : c->buffers[o->other];
    TASKS(row, rows, next) {
        const char *from = c->buffers[o->from] + (o->last ? c->keep[row] : row) * o->parts * bytes;
        char *to = c->buffers[o->to] + row * o->parts * bytes;
        for (int64_t part = 0; part < o->parts; part++, from += bytes, to += bytes) {
            const char *plus = other ? other + (row * o->parts + part) * bytes : o->shift;
            if (dtype == FLOAT32)
                normalize(o, from, plus, to, FLOAT32);
            else if (dtype == BFLOAT16)
                normalize(o, from, plus, to, BFLOAT16);
            else
                normalize(o, from, plus, to, FLOAT16);
        }
    }
}

static void attend_tasks(const struct operation *o, const struct call *c, const struct shape *shape, float *memory,
                         int64_t *next) {
    int64_t size = size_of(shape->dtype);
    char *keys = c->cache + o->layer * c->cache_layer * size;
    struct layer layer = {
        .query = c->buffers[o->query.buffer] + o->query.offset * size,
        .key = c->buffers[o->key.buffer] + o->key.offset * size,
        .value = c->buffers[o->value.buffer] + o->value.offset * size,
        .query_head = o->query.head,
        .query_token = o->query.token,
        .key_head = o->key.head,
        .key_token = o->key.token,
        .value_head = o->value.head,
        .value_token = o->value.token,
        .keys = keys,
        .values = keys + c->cache_values * size,
        .cache_head = c->cache_head,
        .output = c->buffers[o->to],
        .sinks = o->sinks,
        .faulty = c->faulty,
    };
    const struct rotary *rotary = o->rotary < 0 ? NULL : &c->rotaries[o->rotary];
    const struct segment *segments = c->segments + c->locality[o->layer] * c->segment_count;
    attention_tasks(&layer, shape, rotary, segments, c->segment_count, memory, next);
}

/* Whether the previous operation prepared the same rows in the same way, as for queries, keys and values. */
INLINE int prepared(const struct operation *operations, int64_t i) {
    if (!i || operations[i - 1].kind != LINEAR || operations[i - 1].from != operations[i].from) return 0;
    return operations[i - 1].to != operations[i].from &&
           linear_prepares_alike(&operations[i - 1].linear, &operations[i].linear);
}

/* Checksum of the sources. `native.py` refuses a build of other sources, since its structures may differ. */
uint32_t dynatree_sources(void) { return SOURCES; }

/* Run a forward pass on OpenMP's threads. Return 0, or -1 if memory cannot be allocated; then the contents of the
 * buffers and of the cache's new slots are undefined. */
int dynatree_forward(const struct program *p, const struct call *c) {
    int64_t floats = attention_floats(&p->shape, c->segments, c->localities * c->segment_count), shared_floats = 0;
    int64_t most = c->n > c->kept ? c->n : c->kept;
    if (linear_floats() > floats) floats = linear_floats();
    struct experts_sizes sizes = {0};
    struct experts_memory experts;
    for (int64_t i = 0; i < p->count; i++) {
        if (p->operations[i].kind == EXPERTS) experts_measure(&p->operations[i].experts, c->n, &sizes);
        int64_t needed = p->operations[i].kind == LINEAR ? linear_shared_floats(&p->operations[i].linear, most) : 0;
        if (needed > shared_floats) shared_floats = needed;
    }
    int64_t *counters = calloc(p->count * COUNTERS, sizeof *counters);
    float *shared = malloc(shared_floats * sizeof(float) + 1);
    int failed = experts_allocate(&experts, &sizes);
    if (!counters || !shared) failed = -1;
    if (!failed) {
#pragma omp parallel
        {
            float *memory = aligned_alloc(64, (floats * sizeof(float) + 63) / 64 * 64);
            if (!memory) {
#pragma omp atomic write
                failed = -1;
            }
#pragma omp barrier
            int64_t rows = c->n;
            for (int64_t i = 0; i < p->count && !failed; i++) {
                const struct operation *o = &p->operations[i];
                const char *other = o->other < 0 ? NULL : c->buffers[o->other];
                int64_t *next = &counters[i * COUNTERS];
                if (o->kind == EMBED) {
                    embed_tasks(o, c, p->shape.dtype, next);
                } else if (o->kind == NORM) {
                    if (o->last) rows = c->kept;
                    norm_tasks(o, c, rows, p->shape.dtype, next);
                } else if (o->kind == LINEAR) {
                    if (!prepared(p->operations, i) && linear_shared_floats(&o->linear, rows)) {
                        linear_prepare(&o->linear, c->buffers[o->from], rows, shared);
#pragma omp barrier
                    }
                    linear_tasks(&o->linear, c->buffers[o->from], rows, other, c->buffers[o->to], memory, shared, next);
                } else if (o->kind == EXPERTS) {
                    experts_route(&o->experts, c->buffers[o->logits], rows, &experts, memory, next);
#pragma omp barrier
                    experts_tasks(&o->experts, c->buffers[o->from], rows, experts.chosen, experts.weights, other,
                                  c->buffers[o->to], &experts, memory, next + 1);
                } else {
                    attend_tasks(o, c, &p->shape, memory, next);
                }
                if (i + 1 < p->count && p->operations[i + 1].kind == LINEAR)
                    linear_prefetch(&p->operations[i + 1].linear);
#pragma omp barrier
            }
            free(memory);
        }
    }
    free(counters);
    free(shared);
    experts_free(&experts);
    return failed;
}
