/* Declarations that the kernels share: attention of one layer, linear layers, and tasks of OpenMP's threads. */
#ifndef DYNATREE_KERNELS_H
#define DYNATREE_KERNELS_H

#include <omp.h>

#include "vectors.h"

/* The tokens of one session in a forward pass. Slots are counted from the first slot of the session's range, or from a
 * later slot if no token sees the slots before it. */
struct segment {
    int64_t first, tokens; /* index of the first token among all tokens, and number of tokens */
    int64_t base;          /* slot of the cache from which slots are counted */
    int64_t start;         /* slot of the first token */
    const uint8_t *mask;   /* [tokens, columns] over the last `columns` slots up to the last token; NULL: causal */
    int64_t columns;
    const int64_t *lowest; /* [tokens]: the lowest slot before the columns that each token sees; NULL: 0 */
};

/* Rotary embedding (RoFormer, Su et al. 2021) of a head's first `size` dimensions. Dimension d is rotated with
 * dimension d + size / 2, as in GPT-NeoX. */
struct rotary {
    const int64_t *positions;    /* [n] */
    const char *cosines, *sines; /* [positions, size] */
    int64_t size;                /* 0: queries and keys are already rotated */
};

/* Tensors of one layer. Strides are in elements; the dimensions of a head are contiguous. */
struct layer {
    char *query, *key, *value; /* of the new tokens: query [heads, n, dim], key and value [kv_heads, n, dim] */
    int64_t query_head, query_token, key_head, key_token, value_head, value_token; /* strides */
    char *keys, *values;                                                           /* cache: [kv_heads, slots, dim] */
    int64_t cache_head;                                                            /* stride */
    char *output;                                                                  /* [n, heads, dim] */
    const float *sinks; /* [heads]: a score of each head that takes part in the softmax and has no value; may be NULL */
    uint8_t *faulty;    /* [n]: set to 1 for a token with a key or value that is not finite */
};

struct shape {
    int64_t heads, kv_heads, dim, dtype;
    float scale;
    float cap; /* a score s becomes cap * tanh(s / cap); 0: no cap */
};

/* Of gpt-oss: CLAMPED_SWISH and CLAMPED_PLUS_ONE are those of its experts' gate and up projections. */
enum activation { IDENTITY, GELU, GELU_TANH, SILU, RELU, CAPPED, CLAMPED_SWISH, CLAMPED_PLUS_ONE };
enum combination { ALONE, PLUS, TIMES };

/* How the scale of a group of weights is stored: as float16, as float32, or as an 8-bit integer that is multiplied by a
 * float16 step, which several groups share. */
enum scales { HALVES, FLOATS, STEPS };

/* The format of weights of 8 or 4 bits. An unsigned code c stands for scale * (c - offset), or for scale * c + minimum.
 *
 * A panel lists its groups of inputs. A group begins with its codes: [group / 4][PANEL][4] bytes of 8 bits, or
 * [group / 8][PANEL][4] bytes of two codes, whose lower halves are inputs 0 to 3 of 8 and whose upper halves are inputs
 * 4 to 7. The scales [PANEL] follow, then the minimums [PANEL] if there are any. Steps precede the groups of each
 * `super` inputs: [PANEL] for the scales, then [PANEL] for the minimums. */
struct weights {
    int64_t bits;     /* 8 or 4; 0 if the weights have the layer's dtype */
    int64_t group;    /* inputs that share a scale: 16, 32, 64 or 128 */
    int64_t super;    /* inputs that share a step; a multiple of 64 */
    int64_t scales;   /* enum scales */
    int64_t minimums; /* whether there are minimums, in place of an offset */
    int64_t offset;
    int64_t narrow; /* whether all codes are below 128 */
};

/* output = combination(activation(rows @ weight.T + bias), other), rounded once. */
struct linear {
    const char *weight; /* [panels, inputs, PANEL]; bfloat16: [panels, inputs / 2, PANEL, 2]; 8 or 4 bits: `weights` */
    const char *bias;   /* [panels * PANEL] or NULL */
    int64_t inputs, features, dtype, activation, combination;
    struct weights weights;
    float cap;   /* CAPPED: x becomes cap * tanh(x / cap); CLAMPED_...: x is at most this, or in [-cap, cap] */
    float slope; /* CLAMPED_SWISH: x becomes x * logistic(slope * x) */
};

/* Loop over a thread's tasks: first the task of its own number, then tasks that no thread has taken yet. The counter
 * `*next`, which the threads share, begins at 0. */
#define TASKS(task, count, next)                              \
    for (int64_t task = omp_get_thread_num(); task < (count); \
         task = omp_get_num_threads() + __atomic_fetch_add(next, 1, __ATOMIC_RELAXED))

/* Size of a thread's working memory for attention, in floats. */
int64_t attention_floats(const struct shape *shape, const struct segment *segments, int64_t count);

/* Compute a thread's tasks of one layer's attention. */
void attention_tasks(const struct layer *layer, const struct shape *shape, const struct rotary *rotary,
                     const struct segment *segments, int64_t count, float *memory, int64_t *next);

/* Size of a thread's working memory for a linear layer, and of the memory that all threads share, in floats. */
int64_t linear_floats(void);
int64_t linear_shared_floats(const struct linear *linear, int64_t rows);

/* Convert a thread's part of 16-bit rows to float32 in `shared`, or quantise it for weights of 8 or 4 bits. A barrier
 * must follow before `linear_tasks`. */
void linear_prepare(const struct linear *linear, const char *rows, int64_t count, float *shared);

/* Whether `linear_prepare` of both layers gives the same result from the same rows. */
int linear_prepares_alike(const struct linear *one, const struct linear *other);

/* Compute one panel of a linear layer. `other`: second operand of the combination, [count, features]. */
void linear_panel(const struct linear *linear, int64_t panel, const char *rows, int64_t count, const char *other,
                  char *output, float *memory, const float *shared);

/* Compute a thread's tasks of a linear layer. */
void linear_tasks(const struct linear *linear, const char *rows, int64_t count, const char *other, char *output,
                  float *memory, const float *shared, int64_t *next);

/* How a row's logits become the weights of the experts that are chosen by them: a softmax over all experts, a softmax
 * over those chosen, or the logistic function of the logit of a single expert. */
enum scoring { SOFTMAX, SOFTMAX_CHOSEN, LOGISTIC };

/* down(activation(gate(row)) * up(row)) of each expert. The layers are those of expert 0, and the weights of expert i
 * lie i * `gate_up_bytes` and i * `down_bytes` after them. Biases lie as far apart as the features. Features are
 * multiples of PANEL. */
struct experts {
    struct linear gate, up, down;
    int64_t gate_up_bytes, down_bytes;
    int64_t count, chosen; /* experts of the layer, and experts of each row */
    int64_t scoring;       /* enum scoring */
};

/* Sizes of the memory that all threads share for experts; all but the first two are in bytes and floats. */
struct experts_sizes {
    int64_t all, experts, gathered, middle, floats;
};

struct experts_memory {
    int64_t found; /* number of groups */
    struct group *groups;
    int64_t *starts, *chosen, *places;
    float *weights;
    char *gathered; /* later the experts' outputs, which have the same size */
    char *middle;
    float *shared;
};

/* Raise sizes to what experts need for `count` rows. */
void experts_measure(const struct experts *e, int64_t count, struct experts_sizes *sizes);

/* Return 0, or -1 if memory cannot be allocated. In both cases `experts_free` frees it. */
int experts_allocate(struct experts_memory *memory, const struct experts_sizes *sizes);
void experts_free(struct experts_memory *memory);

/* Choose and weigh a thread's part of the rows' experts, by logits [count, e->count]. */
void experts_route(const struct experts *e, const char *logits, int64_t count, struct experts_memory *shared,
                   float *memory, int64_t *next);

#define EXPERTS_COUNTERS 4 /* counters of tasks of `experts_tasks` */

/* Compute a thread's tasks of experts, with barriers in between. `other` [count, features] is added; NULL: none. */
void experts_tasks(const struct experts *e, const char *rows, int64_t count, const int64_t *chosen,
                   const float *weights, const char *other, char *output, struct experts_memory *shared, float *memory,
                   int64_t *next);

/* Bytes of rows that are quantised for a layer, and of one panel of the layer's weights. */
int64_t quantized_bytes(const struct linear *linear, int64_t rows);
int64_t quantized_panel(const struct linear *linear);

/* Quantise a thread's part of the rows. */
void quantize_rows(const struct linear *linear, const char *rows, int64_t count, char *quantized);

/* Compute the sums [rows][PANEL] of a panel for at most CHUNK of `count` quantised rows, from row `first` on. */
void quantized_sums(const struct linear *linear, int64_t panel, const char *quantized, int64_t count, int64_t first,
                    int64_t rows, float *sums);

/* A recurrent layer's tokens, and what precedes them. Heads of a group share queries and keys. Numbers are float64. */
struct recurrence {
    int64_t heads, groups, keys, values; /* numbers of heads and groups, and sizes of a head's keys and values */
    int64_t kept, tokens;                /* numbers of kept and of new tokens */
    const double *state;                 /* [heads, keys, values], before the kept tokens */
    const double *kept_k, *kept_v;       /* [kept, groups, keys] and [kept, heads, values] */
    const double *kept_g;                /* [kept, heads]: logarithms of decays */
    const double *q, *k, *v, *g;         /* of the new tokens; q is [tokens, groups, keys], the others as those kept */
    const double *beta;                  /* [tokens, heads] of the delta rule; NULL: linear attention */
    const uint8_t *ancestors;            /* [tokens, kept + tokens]; parents come before their children */
    double *u;                           /* [tokens, heads, values]: pseudo-values of the delta rule */
    double *output;                      /* [tokens, heads, values]; without new tokens a state, as `state` */
};

#define MOST_TAPS 16

/* A convolution of each channel over some of the last ancestors; all numbers have one dtype. */
struct convolution {
    int64_t channels, width, kept, tokens, dtype; /* `width`: taps, at most MOST_TAPS */
    const char *weight, *bias;                    /* [channels, width], and [channels] or NULL */
    const char *state, *kept_x, *x;               /* rows of channels: width - 1, `kept`, and `tokens` */
    const uint8_t *ancestors;                     /* [tokens, kept + tokens]; NULL: a chain */
    char *output;                                 /* [tokens, channels] */
};

/* Prefetch the first weights of this thread's first task, so that memory is read while the thread waits. */
void linear_prefetch(const struct linear *linear);

#endif
