/* The experts of a mixture's layer: see `native_experts.py`.
 *
 * The rows are gathered by expert, so that an expert's weights are read once for all of its rows. A task computes one
 * panel of one expert. The experts share a counter of tasks, so that many threads have work.
 *
 * A row's result is the sum of its experts' outputs in the row's own order of experts. So it has the same bits whatever
 * other rows are computed with it.
 */
#include <stdlib.h>

#include "linear.h"

/* The gathered rows of one expert: `rows` from `first` on. They are prepared at these floats of the shared memory. */
struct group {
    int64_t expert, first, rows, gate_at, down_at;
};

struct candidate {
    float score;
    int32_t expert;
};

INLINE int before(struct candidate a, struct candidate b) {
    return (a.score != a.score && b.score == b.score) || a.score > b.score;
}

static void sort_by_insertion(struct candidate *all, int64_t count) {
    for (int64_t i = 1; i < count; i++) {
        struct candidate one = all[i];
        int64_t to = i;
        for (; to && before(one, all[to - 1]); to--) all[to] = all[to - 1];
        all[to] = one;
    }
}

INLINE void swap(struct candidate *a, struct candidate *b) {
    struct candidate kept = *a;
    *a = *b, *b = kept;
}

/* Move the median of three candidates to `to`. */
static void move_median(struct candidate *to, struct candidate *a, struct candidate *b, struct candidate *c) {
    if (!before(*a, *b)) {
        struct candidate *kept = a;
        a = b, b = kept;
    }
    swap(to, before(*b, *c) ? b : before(*a, *c) ? c : a);
}

/* Move the first `chosen` of `count` candidates to the front, in order. It takes the steps of torch.topk on a CPU,
 * which are those of std::nth_element and of a sort by insertion, because these steps decide between equal scores. */
static void choose_first(struct candidate *all, int64_t count, int64_t chosen) {
    struct candidate *first = all, *last = all + count;
    while (last - first > 3) {
        move_median(first, first + 1, first + (last - first) / 2, last - 1);
        struct candidate *low = first + 1, *high = last;
        for (;; low++) {
            while (before(*low, *first)) low++;
            do high--;
            while (before(*first, *high));
            if (low >= high) break;
            swap(low, high);
        }
        if (low < all + chosen)
            first = low;
        else
            last = low;
    }
    sort_by_insertion(first, last - first);
    sort_by_insertion(all, chosen - 1);
}

INLINE float exponential_one(float x) { return exponential(splat(x))[0]; }

/* Choose the experts of one row by its logits, and weigh them. */
static void route(const struct experts *e, const char *logits, int64_t *chosen, float *weights,
                  struct candidate *candidates) {
    float sum = 0.0f;
    for (int64_t i = 0; i < e->count; i++)
        candidates[i] = (struct candidate){load_one(logits + i * size_of(e->gate.dtype), e->gate.dtype), i};
    if (e->scoring == LOGISTIC) {
        float x = candidates[0].score, small = exponential_one(x < 0.0f ? x : -x);
        chosen[0] = 0, weights[0] = x != x ? x : (x < 0.0f ? small : 1.0f) / (1.0f + small);
        return;
    }
    choose_first(candidates, e->count, e->chosen);
    float most = candidates[0].score;
    for (int64_t i = 0; i < e->chosen; i++) {
        chosen[i] = candidates[i].expert;
        sum += weights[i] = exponential_one(candidates[i].score - most);
    }
    if (e->scoring == SOFTMAX)
        for (int64_t i = e->chosen; i < e->count; i++) sum += exponential_one(candidates[i].score - most);
    for (int64_t i = 0; i < e->chosen; i++) weights[i] /= sum;
}

void experts_route(const struct experts *e, const char *logits, int64_t count, struct experts_memory *m, float *memory,
                   int64_t *next) {
    TASKS(row, count, next)
        route(e, logits + row * e->count * size_of(e->gate.dtype), m->chosen + row * e->chosen,
              m->weights + row * e->chosen, (struct candidate *)memory);
}

/* Group the rows of each expert, and find the place of each gathered row. */
static void gather(const struct experts *e, const int64_t *chosen, int64_t count, struct experts_memory *m) {
    int64_t gate_floats = 0, down_floats = 0, *starts = m->starts;
    memset(starts, 0, (e->count + 1) * sizeof *starts);
    m->found = 0;
    for (int64_t i = 0; i < count; i++) starts[chosen[i] + 1]++;
    for (int64_t expert = 0; expert < e->count; expert++) {
        int64_t rows = starts[expert + 1];
        if (rows) {
            m->groups[m->found++] = (struct group){expert, starts[expert], rows, gate_floats, down_floats};
            gate_floats += linear_shared_floats(&e->gate, rows);
            down_floats += linear_shared_floats(&e->down, rows);
        }
        starts[expert + 1] += starts[expert];
    }
    for (int64_t i = 0; i < count; i++) m->places[i] = starts[chosen[i]]++;
}

static void gate_up_task(const struct experts *e, const struct group *g, int64_t panel, const char *gathered,
                         char *middle, float *memory, const float *shared) {
    struct linear gate = e->gate, up = e->up;
    int64_t size = size_of(gate.dtype), moved = g->expert * e->gate_up_bytes;
    gathered += g->first * gate.inputs * size, middle += g->first * gate.features * size;
    gate.weight += moved, up.weight += moved;
    if (gate.bias) gate.bias += g->expert * 2 * gate.features * size, up.bias += g->expert * 2 * up.features * size;
    linear_panel(&gate, panel, gathered, g->rows, NULL, middle, memory, shared + g->gate_at);
    linear_panel(&up, panel, gathered, g->rows, middle, middle, memory, shared + g->gate_at);
}

static void down_task(const struct experts *e, const struct group *g, int64_t panel, const char *middle, char *outputs,
                      float *memory, const float *shared) {
    struct linear down = e->down;
    int64_t size = size_of(down.dtype);
    down.weight += g->expert * e->down_bytes;
    if (down.bias) down.bias += g->expert * down.features * size;
    linear_panel(&down, panel, middle + g->first * down.inputs * size, g->rows, NULL,
                 outputs + g->first * down.features * size, memory, shared + g->down_at);
}

/* Add up the outputs of one row's experts, and `other` unless it is NULL. */
INLINE void combine(const struct experts *e, const char *outputs, const int64_t *places, const float *weights,
                    const char *other, char *to, int64_t dtype) {
    int64_t features = e->down.features, size = size_of(dtype);
    for (int64_t d = 0; d < features; d += LANES) {
        vec sum = other ? load(other + d * size, dtype) : (vec){0};
        for (int64_t i = 0; i < e->chosen; i++)
            sum = fused(load(outputs + (places[i] * features + d) * size, dtype), splat(weights[i]), sum);
        store(to + d * size, sum, dtype);
    }
}

void experts_tasks(const struct experts *e, const char *rows, int64_t count, const int64_t *chosen,
                   const float *weights, const char *other, char *output, struct experts_memory *m, float *memory,
                   int64_t *next) {
    int64_t dtype = e->gate.dtype, bytes = e->gate.inputs * size_of(dtype), all = count * e->chosen;
    int64_t width = e->down.inputs / PANEL, outputs = e->down.features / PANEL;
    char *gathered = m->gathered, *middle = m->middle;
    float *shared = m->shared;
#pragma omp single
    gather(e, chosen, all, m);
    const struct group *groups = m->groups, *end = groups + m->found;
    TASKS(i, all, &next[0]) memcpy(gathered + m->places[i] * bytes, rows + i / e->chosen * bytes, bytes);
#pragma omp barrier
    if (linear_shared_floats(&e->gate, 1)) {
        for (const struct group *g = groups; g < end; g++)
            linear_prepare(&e->gate, gathered + g->first * bytes, g->rows, shared + g->gate_at);
#pragma omp barrier
    }
    TASKS(task, m->found * width, &next[1])
        gate_up_task(e, &groups[task / width], task % width, gathered, middle, memory, shared);
#pragma omp barrier
    if (linear_shared_floats(&e->down, 1)) {
        for (const struct group *g = groups; g < end; g++)
            linear_prepare(&e->down, middle + g->first * e->down.inputs * size_of(dtype), g->rows, shared + g->down_at);
#pragma omp barrier
    }
    TASKS(task, m->found * outputs, &next[2])
        down_task(e, &groups[task / outputs], task % outputs, middle, gathered, memory, shared);
#pragma omp barrier
    TASKS(row, count, &next[3]) {
        const int64_t *own = m->places + row * e->chosen;
        const float *each = weights + row * e->chosen;
        const char *plus = other ? other + row * bytes : NULL;
        if (dtype == FLOAT32)
            combine(e, gathered, own, each, plus, output + row * bytes, FLOAT32);
        else if (dtype == BFLOAT16)
            combine(e, gathered, own, each, plus, output + row * bytes, BFLOAT16);
        else
            combine(e, gathered, own, each, plus, output + row * bytes, FLOAT16);
    }
}

INLINE void enlarge(int64_t *to, int64_t least) { *to = *to < least ? least : *to; }

void experts_measure(const struct experts *e, int64_t count, struct experts_sizes *s) {
    int64_t all = count * e->chosen, most = all < e->count ? all : e->count, size = size_of(e->gate.dtype);
    enlarge(&s->all, all);
    enlarge(&s->experts, e->count);
    enlarge(&s->gathered, all * e->gate.inputs * size);
    enlarge(&s->middle, all * e->down.inputs * size);
    /* each group's floats may include some that do not depend on its rows */
    enlarge(&s->floats, linear_shared_floats(&e->gate, all) + most * linear_shared_floats(&e->gate, 1));
    enlarge(&s->floats, linear_shared_floats(&e->down, all) + most * linear_shared_floats(&e->down, 1));
}

int experts_allocate(struct experts_memory *m, const struct experts_sizes *s) {
    m->groups = malloc(s->experts * sizeof *m->groups + 1);
    m->starts = malloc((s->experts + 1) * sizeof *m->starts);
    m->chosen = malloc(s->all * sizeof *m->chosen + 1);
    m->places = malloc(s->all * sizeof *m->places + 1);
    m->weights = malloc(s->all * sizeof *m->weights + 1);
    m->gathered = malloc(s->gathered + 1);
    m->middle = malloc(s->middle + 1);
    m->shared = malloc(s->floats * sizeof *m->shared + 1);
    return m->groups && m->starts && m->chosen && m->places && m->weights && m->gathered && m->middle && m->shared ? 0
                                                                                                                   : -1;
}

void experts_free(struct experts_memory *m) {
    free(m->groups), free(m->starts), free(m->chosen), free(m->places);
    free(m->weights), free(m->gathered), free(m->middle), free(m->shared);
}

/* Compute the experts of rows [count, inputs] on OpenMP's threads, for `chosen` and `weights` [count, e->chosen].
 * Return 0, or -1 if memory cannot be allocated. */
int dynatree_experts(const struct experts *e, const char *rows, int64_t count, const int64_t *chosen,
                     const float *weights, char *output) {
    int64_t next[EXPERTS_COUNTERS] = {0};
    struct experts_sizes sizes = {0};
    struct experts_memory shared;
    experts_measure(e, count, &sizes);
    int failed = experts_allocate(&shared, &sizes);
#pragma omp parallel
    {
        float *memory = aligned_alloc(64, (linear_floats() * sizeof(float) + 63) / 64 * 64);
        if (!memory) {
#pragma omp atomic write
            failed = -1;
        }
#pragma omp barrier
        if (!failed) experts_tasks(e, rows, count, chosen, weights, NULL, output, &shared, memory, next);
        free(memory);
    }
    experts_free(&shared);
    return failed;
}
