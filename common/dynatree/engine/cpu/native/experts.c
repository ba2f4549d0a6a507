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

/* down(activation(gate(row)) * up(row)) of each expert. The layers are those of expert 0, and the weights of expert i
 * lie i * `gate_up_bytes` and i * `down_bytes` behind them. Features are multiples of PANEL. */
struct experts {
    struct linear gate, up, down;
    int64_t gate_up_bytes, down_bytes;
    int64_t count, chosen; /* experts of the layer, and experts of each row */
};

/* The gathered rows of one expert: `rows` from `first` on. They are prepared at these floats of the shared memory. */
struct group {
    int64_t expert, first, rows, gate_at, down_at;
};

/* Fill `groups`, and for each expert of each row the place of its gathered row. Return the number of groups. */
static int64_t gather(const struct experts *e, const int64_t *chosen, int64_t count, struct group *groups,
                      int64_t *places, int64_t *starts) {
    int64_t found = 0;
    for (int64_t i = 0; i < count; i++) starts[chosen[i] + 1]++;
    for (int64_t expert = 0; expert < e->count; expert++) {
        int64_t rows = starts[expert + 1];
        if (rows) groups[found++] = (struct group){.expert = expert, .first = starts[expert], .rows = rows};
        starts[expert + 1] += starts[expert];
    }
    for (int64_t i = 0; i < count; i++) places[i] = starts[chosen[i]]++;
    return found;
}

static void gate_up_task(const struct experts *e, const struct group *g, int64_t panel, const char *gathered,
                         char *middle, float *memory, const float *shared) {
    struct linear gate = e->gate, up = e->up;
    int64_t size = size_of(gate.dtype), moved = g->expert * e->gate_up_bytes;
    gathered += g->first * gate.inputs * size, middle += g->first * gate.features * size;
    gate.weight += moved, up.weight += moved;
    linear_panel(&gate, panel, gathered, g->rows, NULL, middle, memory, shared + g->gate_at);
    linear_panel(&up, panel, gathered, g->rows, middle, middle, memory, shared + g->gate_at);
}

static void down_task(const struct experts *e, const struct group *g, int64_t panel, const char *middle, char *outputs,
                      float *memory, const float *shared) {
    struct linear down = e->down;
    int64_t size = size_of(down.dtype);
    down.weight += g->expert * e->down_bytes;
    linear_panel(&down, panel, middle + g->first * down.inputs * size, g->rows, NULL,
                 outputs + g->first * down.features * size, memory, shared + g->down_at);
}

/* Add up the outputs of one row's experts. */
INLINE void combine(const struct experts *e, const char *outputs, const int64_t *places, const float *weights, char *to,
                    int64_t dtype) {
    int64_t features = e->down.features, size = size_of(dtype);
    for (int64_t d = 0; d < features; d += LANES) {
        vec sum = {0};
        for (int64_t i = 0; i < e->chosen; i++)
            sum = fused(load(outputs + (places[i] * features + d) * size, dtype), splat(weights[i]), sum);
        store(to + d * size, sum, dtype);
    }
}

/* Compute the experts of rows [count, inputs] on OpenMP's threads, for `chosen` and `weights` [count, e->chosen].
 * Return 0, or -1 if memory cannot be allocated. */
int dynatree_experts(const struct experts *e, const char *rows, int64_t count, const int64_t *chosen,
                     const float *weights, char *output) {
    int64_t dtype = e->gate.dtype, bytes = e->gate.inputs * size_of(dtype), all = count * e->chosen, next[4] = {0};
    int64_t width = e->down.inputs / PANEL, outputs = e->down.features / PANEL, gate_floats = 0, down_floats = 0;
    struct group *groups = malloc((e->count + 1) * sizeof *groups);
    int64_t *starts = calloc(e->count + 1, sizeof *starts), *places = malloc(all * sizeof *places + 1);
    char *gathered = malloc(all * bytes + 1); /* later the experts' outputs, which have the same size */
    char *middle = malloc(all * e->down.inputs * size_of(dtype) + 1);
    int64_t found = groups && starts && places ? gather(e, chosen, all, groups, places, starts) : 0;
    for (struct group *g = groups; g < groups + found; g++) {
        g->gate_at = gate_floats, gate_floats += linear_shared_floats(&e->gate, g->rows);
        g->down_at = down_floats, down_floats += linear_shared_floats(&e->down, g->rows);
    }
    float *shared = malloc((gate_floats > down_floats ? gate_floats : down_floats) * sizeof(float) + 1);
    int failed = groups && starts && places && gathered && middle && shared ? 0 : -1;
#pragma omp parallel
    {
        float *memory = aligned_alloc(64, (linear_floats() * sizeof(float) + 63) / 64 * 64);
        if (!memory) {
#pragma omp atomic write
            failed = -1;
        }
#pragma omp barrier
        if (!failed) {
            TASKS(i, all, &next[0]) memcpy(gathered + places[i] * bytes, rows + i / e->chosen * bytes, bytes);
#pragma omp barrier
            for (const struct group *g = groups; g < groups + found; g++)
                linear_prepare(&e->gate, gathered + g->first * bytes, g->rows, shared + g->gate_at);
#pragma omp barrier
            TASKS(task, found * width, &next[1])
                gate_up_task(e, &groups[task / width], task % width, gathered, middle, memory, shared);
#pragma omp barrier
            for (const struct group *g = groups; g < groups + found; g++)
                linear_prepare(&e->down, middle + g->first * e->down.inputs * size_of(dtype), g->rows,
                               shared + g->down_at);
#pragma omp barrier
            TASKS(task, found * outputs, &next[2])
                down_task(e, &groups[task / outputs], task % outputs, middle, gathered, memory, shared);
#pragma omp barrier
            TASKS(row, count, &next[3]) {
                const int64_t *own = places + row * e->chosen;
                const float *each = weights + row * e->chosen;
                if (dtype == FLOAT32)
                    combine(e, gathered, own, each, output + row * bytes, FLOAT32);
                else if (dtype == BFLOAT16)
                    combine(e, gathered, own, each, output + row * bytes, BFLOAT16);
                else
                    combine(e, gathered, own, each, output + row * bytes, FLOAT16);
            }
        }
        free(memory);
    }
    free(groups), free(starts), free(places), free(gathered), free(middle), free(shared);
    return failed;
}
