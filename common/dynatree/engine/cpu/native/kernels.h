/* What the kernels share: one layer's attention, a linear layer, and the tasks that OpenMP's threads take. */
#ifndef DYNATREE_KERNELS_H
#define DYNATREE_KERNELS_H

#include <omp.h>

#include "vectors.h"

/* What one session puts through the forward; a range's slots are counted from its first. */
struct segment {
    int64_t first, tokens; /* its place in the row of tokens */
    int64_t base;          /* the arena's slot that is its range's first */
    int64_t start;         /* the slot of its first token */
    const uint8_t *mask;   /* [tokens, columns] over the last slots in use; NULL: causal */
    int64_t columns;
};

/* Rotary positions (RoFormer, Su et al. 2021) of the first `size` dimensions, in halves as GPT-NeoX has them. */
struct rotary {
    const int64_t *positions;    /* [n] */
    const char *cosines, *sines; /* [positions, size] */
    int64_t size;                /* 0: queries and keys come rotated */
};

/* One layer's tensors; strides are in elements, and a head's dimensions lie side by side. */
struct layer {
    char *query, *key, *value; /* of the new tokens: [heads, n, dim], and [kv_heads, n, dim] twice */
    int64_t query_head, query_token, key_head, key_token, value_head, value_token;
    char *keys, *values; /* the arena's: [kv_heads, slots, dim] */
    int64_t arena_head;
    char *output;    /* [n, heads, dim] */
    uint8_t *faulty; /* [n]: set to 1 where a key or a value is not finite */
};

struct shape {
    int64_t heads, kv_heads, dim, dtype;
    float scale;
};

enum activation { IDENTITY, GELU, GELU_TANH, SILU, RELU };
enum combination { ALONE, PLUS, TIMES };

/* The scale of a group of weights: float16, float32, or a whole number of 8 bits times a float16 step, which several
 * groups share. */
enum scales { HALVES, FLOATS, STEPS };

/* Weights of 8 or 4 bits: an unsigned code c stands for scale * (c - offset), or scale * c + minimum.
 *
 * A panel lists its groups of inputs. A group is [group / 4][PANEL][4] codes, or of 4 bits [group / 8][PANEL][4] bytes,
 * whose lower halves are inputs 0 to 3 of 8 and whose upper halves are the others; then the scales [PANEL], then the
 * minimums [PANEL] where there are any. STEPS stand in front of each `super` inputs: the scales' [PANEL], then the
 * minimums'. */
struct weights {
    int64_t bits;     /* 8 or 4; 0: the weights are of the layer's dtype */
    int64_t group;    /* inputs that share a scale: 16, 32, 64 or 128 */
    int64_t super;    /* inputs that share a step; a multiple of QUANTIZED_BLOCK */
    int64_t scales;   /* enum scales */
    int64_t minimums; /* whether there are minimums; the offset is then 0 */
    int64_t offset;
    int64_t narrow; /* whether all codes are below 128 */
};

/* output = combination(activation(rows @ weight.T + bias), other), rounded once. */
struct linear {
    const char *weight; /* [panels, inputs, PANEL], of bfloat16 [panels, inputs / 2, PANEL, 2]; or see struct weights */
    const char *bias;   /* [panels * PANEL], or NULL */
    int64_t inputs, features, dtype, activation, combination;
    struct weights weights;
};

/* A thread's share of the tasks: its own first one, then whatever no other has taken. `next` begins at 0. */
#define TASKS(task, count, next)                              \
    for (int64_t task = omp_get_thread_num(); task < (count); \
         task = omp_get_num_threads() + __atomic_fetch_add(next, 1, __ATOMIC_RELAXED))

/* Floats of a thread's memory for attention. */
int64_t attention_floats(const struct shape *shape, const struct segment *segments, int64_t count);

/* A thread's share of one layer's attention. */
void attention_tasks(const struct layer *layer, const struct shape *shape, const struct rotary *rotary,
                     const struct segment *segments, int64_t count, float *memory, int64_t *next);

/* Floats of a thread's memory for a linear layer, and of all threads' together over some rows. */
int64_t linear_floats(void);
int64_t linear_shared_floats(const struct linear *linear, int64_t rows);

/* A thread's share of what a linear layer does before a barrier, and after it. */
void linear_prepare(const struct linear *linear, const char *rows, int64_t count, float *shared);
int linear_prepares_alike(const struct linear *one, const struct linear *other); /* the same, from the same rows */
void linear_tasks(const struct linear *linear, const char *rows, int64_t count, const char *other, char *output,
                  float *memory, const float *shared, int64_t *next);

/* Bytes of a row that is quantised for a layer, and of one panel of its weights. */
int64_t quantized_row(const struct linear *linear);
int64_t quantized_panel(const struct linear *linear);

/* A thread's share of the quantisation of some rows. */
void quantize_rows(const struct linear *linear, const char *rows, int64_t count, char *quantized);

/* The sums [rows][PANEL] of a panel, for at most CHUNK quantised rows; `again`: the panel was read just before. */
void quantized_sums(const struct linear *linear, int64_t panel, const char *quantized, int64_t rows, int again,
                    float *sums);

/* Ask for the beginning of this thread's first task, so that memory is busy while the thread waits for others. */
void linear_prefetch(const struct linear *linear);

#endif
