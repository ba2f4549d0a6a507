/* Recurrent layers with a decay for each head on a tree of tokens: see `native_recurrence.py`.
 *
 * With the decays D and pseudo-values u of `recurrent/gated_delta.py`, a token i with ancestors a needs two sums,
 *
 *     D_i S' q_i + sum_a D_ia (k_a . q_i) u_a   for its output,   and the same with k_i in place of q_i   for u_i.
 *
 * Both are sums of rows: those of the state S, then those of the u_a in the ancestors' order. One loop over the rows
 * computes the sums of a block of tokens, so that a row is read once for all of them. Rows that no token of the block
 * needs are left out, and a row that another token needs is added with weight 0. So a token's sums have the same terms
 * in the same order, and the same bits, in any tree and on any build. A product of keys is always eight sums, which are
 * then added in a fixed order.
 *
 * A task computes the heads of a group that share keys, or a part of them if there are fewer groups than threads.
 */
#include <math.h>
#include <stdlib.h>

#include "kernels.h"

#define LINES 4          /* the most sums that are computed together */
#define PARTS (8 / WIDE) /* vectors of the eight sums of a product */

/* A thread's working memory. `all` is the number of kept and new tokens. */
struct memory {
    double *decays;      /* [all]: of each token, for one head */
    double *between;     /* [tokens, all]: D_ia, and 1 for a token itself */
    double *entering;    /* [tokens]: D_i */
    double *products;    /* of each block: [found + size, lines], for one group */
    double *weights;     /* [keys + all, lines] of one block */
    double *sums;        /* [lines, values] of one block */
    const double **rows; /* [keys + all]: what the weights belong to */
    int64_t *seen;       /* of each block: the ancestors of its tokens before the block, then its tokens */
    int64_t *found;      /* of each block: the number of these ancestors */
};

INLINE int kinds(const struct recurrence *r) { return r->beta ? 2 : 1; }

/* Number of tokens of the block that begins with a token: 1, 2 or 4. They have at most LINES sums. */
INLINE int64_t block_size(const struct recurrence *r, int64_t first) {
    int64_t left = r->tokens - first, most = LINES / kinds(r);
    return left >= most ? most : left >= 2 ? 2 : 1;
}

INLINE const double *key_of(const struct recurrence *r, int64_t token, int64_t group) {
    return token < r->kept ? r->kept_k + (token * r->groups + group) * r->keys
                           : r->k + ((token - r->kept) * r->groups + group) * r->keys;
}

INLINE const double *value_of(const struct recurrence *r, int64_t token, int64_t head) {
    return token < r->kept ? r->kept_v + (token * r->heads + head) * r->values
                           : (r->beta ? r->u : r->v) + ((token - r->kept) * r->heads + head) * r->values;
}

/* The vector that a line of a block multiplies with the keys: a token's query, then its key for a pseudo-value. */
INLINE const double *query_of(const struct recurrence *r, int64_t first, int64_t line, int64_t group) {
    const double *from = line % kinds(r) ? r->k : r->q;
    return from + ((first + line / kinds(r)) * r->groups + group) * r->keys;
}

/* Add weighted rows to some vectors of each line. */
INLINE void add_vectors(int lines, int vectors, const double *const *rows, const double *weights, int64_t count,
                        int64_t at, int64_t width, double *sums) {
    wide held[LINES][8];
    EACH(line, lines)
        EACH(i, vectors) held[line][i] = *(wide *)(sums + line * width + at + i * WIDE);
    for (int64_t j = 0; j < count; j++)
        EACH(i, vectors) {
            wide x = *(const wide *)(rows[j] + at + i * WIDE);
            EACH(line, lines) held[line][i] = fused_wide(wide_splat(weights[j * lines + line]), x, held[line][i]);
        }
    EACH(line, lines)
        EACH(i, vectors) *(wide *)(sums + line * width + at + i * WIDE) = held[line][i];
}

INLINE void add_rows_to(int lines, int vectors, const double *const *rows, const double *weights, int64_t count,
                        int64_t width, double *sums) {
    int64_t at = 0;
    for (; at + vectors * WIDE <= width; at += vectors * WIDE)
        add_vectors(lines, vectors, rows, weights, count, at, width, sums);
    for (; at + WIDE <= width; at += WIDE) add_vectors(lines, 1, rows, weights, count, at, width, sums);
    for (; at < width; at++)
        for (int line = 0; line < lines; line++)
            for (int64_t j = 0; j < count; j++)
                sums[line * width + at] = fused_double(weights[j * lines + line], rows[j][at], sums[line * width + at]);
}

/* sums[line] += the sum of weights[j, line] * rows[j], in the order of the rows. */
static void add_rows(int64_t lines, const double *const *rows, const double *weights, int64_t count, int64_t width,
                     double *sums) {
    if (lines == 4)
        add_rows_to(4, LANES / 4, rows, weights, count, width, sums);
    else if (lines == 2)
        add_rows_to(2, LANES / 2, rows, weights, count, width, sums);
    else
        add_rows_to(1, 8, rows, weights, count, width, sums);
}

/* Multiply each line's vector with some keys: to[key, line]. */
INLINE void multiply(int lines, int across, const double *const *queries, const double *const *keys, int64_t size,
                     double *to) {
    wide sums[LINES][4][PARTS];
    int64_t d = 0;
    EACH(line, lines)
        EACH(i, across)
            EACH(part, PARTS) sums[line][i][part] = (wide){0};
    for (; d + 8 <= size; d += 8)
        EACH(part, PARTS)
            EACH(i, across) {
                wide key = *(const wide *)(keys[i] + d + part * WIDE);
                EACH(line, lines) {
                    wide query = *(const wide *)(queries[line] + d + part * WIDE);
                    sums[line][i][part] = fused_wide(query, key, sums[line][i][part]);
                }
            }
    for (int line = 0; line < lines; line++)
        for (int i = 0; i < across; i++) {
            double s[8];
            memcpy(s, sums[line][i], sizeof s);
            for (int64_t rest = d; rest < size; rest++)
                s[rest - d] = fused_double(queries[line][rest], keys[i][rest], s[rest - d]);
            to[i * lines + line] = ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
        }
}

INLINE void multiply_all(int lines, const double *const *queries, const double *const *keys, int64_t count,
                         int64_t size, double *to) {
    int across = LANES / 4; /* as many as the registers hold, or nearly so */
    int64_t i = 0;
    for (; i + across <= count; i += across) multiply(lines, across, queries, keys + i, size, to + i * lines);
    for (; i < count; i++) multiply(lines, 1, queries, keys + i, size, to + i * lines);
}

/* Find the ancestors of each block. */
static void find_seen(const struct recurrence *r, struct memory *m) {
    int64_t all = r->kept + r->tokens, size;
    for (int64_t first = 0; first < r->tokens; first += size) {
        int64_t *seen = m->seen + first * all, found = 0;
        size = block_size(r, first);
        for (int64_t a = 0; a < r->kept + first; a++) {
            int any = 0;
            for (int64_t i = first; i < first + size; i++) any |= r->ancestors[i * all + a];
            if (any) seen[found++] = a;
        }
        for (int64_t i = 0; i < size; i++) seen[found + i] = r->kept + first + i;
        m->found[first] = found;
    }
}

/* Multiply the queries, and the keys, of each block with the keys of its ancestors and of its tokens. */
static void multiply_blocks(const struct recurrence *r, int64_t group, struct memory *m) {
    int64_t all = r->kept + r->tokens, size;
    for (int64_t first = 0; first < r->tokens; first += size) {
        const double *queries[LINES];
        const int64_t *seen = m->seen + first * all;
        double *to = m->products + first * kinds(r) * all;
        size = block_size(r, first);
        int64_t lines = size * kinds(r), count = m->found[first] + size;
        for (int64_t line = 0; line < lines; line++) queries[line] = query_of(r, first, line, group);
        for (int64_t j = 0; j < count; j++) m->rows[j] = key_of(r, seen[j], group);
        if (lines == 4)
            multiply_all(4, queries, m->rows, count, r->keys, to);
        else if (lines == 2)
            multiply_all(2, queries, m->rows, count, r->keys, to);
        else
            multiply_all(1, queries, m->rows, count, r->keys, to);
    }
}

/* Multiply the decays after each of `count` tokens of a chain, or of those in `mask`. Return the product of all. */
static double chain_decays(const double *decays, const uint8_t *mask, int64_t count, double *behind) {
    double product = 1.0;
    for (int64_t a = 0; a < count; a++) {
        behind[a] = 0.0;
        if (mask && !mask[a]) continue;
        for (int64_t b = 0; b < a; b++) behind[b] *= decays[a];
        behind[a] = 1.0;
        product *= decays[a];
    }
    return product;
}

/* Multiply the decays along each token's path for one head: those of its parent's path by its own. */
static void path_decays(const struct recurrence *r, int64_t head, struct memory *m) {
    int64_t kept = r->kept, all = kept + r->tokens;
    for (int64_t a = 0; a < all; a++)
        m->decays[a] = exp(a < kept ? r->kept_g[a * r->heads + head] : r->g[(a - kept) * r->heads + head]);
    for (int64_t i = 0; i < r->tokens; i++) {
        const uint8_t *mask = r->ancestors + i * all;
        double *to = m->between + i * all, decay = m->decays[kept + i];
        int64_t parent = i - 1;
        while (parent >= 0 && !mask[kept + parent]) parent--;
        if (parent < 0) {
            m->entering[i] = chain_decays(m->decays, mask, kept, to);
        } else {
            memcpy(to, m->between + parent * all, (kept + parent + 1) * sizeof *to);
            m->entering[i] = m->entering[parent];
        }
        for (int64_t a = 0; a < kept + parent + 1; a++) to[a] *= decay;
        for (int64_t a = kept + parent + 1; a < kept + i; a++) to[a] = 0.0;
        to[kept + i] = 1.0;
        m->entering[i] *= decay;
    }
}

/* Add what the tokens of a block give each other; compute their pseudo-values and outputs. */
static void finish(const struct recurrence *r, int64_t first, int64_t size, int64_t head, struct memory *m) {
    int64_t all = r->kept + r->tokens, width = r->values, lines = size * kinds(r);
    const double *products = m->products + first * kinds(r) * all + m->found[first] * lines;
    for (int64_t i = 0; i < size; i++) {
        int64_t token = first + i, place = (token * r->heads + head) * width;
        double *output = r->output + place;
        for (int64_t kind = kinds(r) - 1; kind >= 0; kind--) {
            int64_t line = i * kinds(r) + kind;
            double *sums = m->sums + line * width;
            for (int64_t j = 0; j < i; j++) {
                const double *value = value_of(r, r->kept + first + j, head);
                double decay = m->between[token * all + r->kept + first + j];
                double weight = decay * products[j * lines + line];
                if (decay != 0.0)
                    for (int64_t c = 0; c < width; c++) sums[c] = fused_double(weight, value[c], sums[c]);
            }
            if (kind) {
                double beta = r->beta[token * r->heads + head];
                for (int64_t c = 0; c < width; c++) r->u[place + c] = beta * (r->v[place + c] - sums[c]);
            } else {
                const double *value = value_of(r, r->kept + token, head);
                double weight = products[i * lines + line];
                for (int64_t c = 0; c < width; c++) output[c] = fused_double(weight, value[c], sums[c]);
            }
        }
    }
}

static void scan_head(const struct recurrence *r, int64_t group, int64_t head, struct memory *m) {
    int64_t all = r->kept + r->tokens, size;
    path_decays(r, head, m);
    for (int64_t d = 0; d < r->keys; d++) m->rows[d] = r->state + (head * r->keys + d) * r->values;
    for (int64_t first = 0; first < r->tokens; first += size) {
        const int64_t *seen = m->seen + first * all;
        const double *products = m->products + first * kinds(r) * all;
        size = block_size(r, first);
        int64_t lines = size * kinds(r), found = m->found[first];
        double *weights = m->weights + r->keys * lines;
        for (int64_t line = 0; line < lines; line++) {
            const double *query = query_of(r, first, line, group);
            double entering = m->entering[first + line / kinds(r)];
            for (int64_t d = 0; d < r->keys; d++) m->weights[d * lines + line] = entering * query[d];
        }
        for (int64_t j = 0; j < found; j++) {
            m->rows[r->keys + j] = value_of(r, seen[j], head);
            for (int64_t line = 0; line < lines; line++) {
                double decay = m->between[(first + line / kinds(r)) * all + seen[j]];
                weights[j * lines + line] = decay * products[j * lines + line];
            }
        }
        memset(m->sums, 0, lines * r->values * sizeof *m->sums);
        add_rows(lines, m->rows, m->weights, r->keys + found, r->values, m->sums);
        finish(r, first, size, head, m);
    }
}

/* Compute the state [keys, values] of one head after the chain of the kept tokens, in the place of the outputs. */
static void fold_head(const struct recurrence *r, int64_t group, int64_t head, struct memory *m) {
    int64_t width = r->values, lines;
    const double *state = r->state + head * r->keys * width;
    double *to = r->output + head * r->keys * width;
    for (int64_t a = 0; a < r->kept; a++) m->decays[a] = exp(r->kept_g[a * r->heads + head]);
    double entering = chain_decays(m->decays, NULL, r->kept, m->between);
    for (int64_t i = 0; i < r->keys * width; i++) to[i] = entering * state[i];
    for (int64_t a = 0; a < r->kept; a++) m->rows[a] = value_of(r, a, head);
    for (int64_t d = 0; d < r->keys; d += lines) {
        lines = r->keys - d >= 4 ? 4 : r->keys - d >= 2 ? 2 : 1;
        for (int64_t a = 0; a < r->kept; a++)
            for (int64_t line = 0; line < lines; line++)
                m->weights[a * lines + line] = m->between[a] * key_of(r, a, group)[d + line];
        add_rows(lines, m->rows, m->weights, r->kept, width, to + d * width);
    }
}

/* Return 0, or -1 if memory cannot be allocated. In both cases `release` frees it. */
static int allocate(const struct recurrence *r, struct memory *m) {
    int64_t all = r->kept + r->tokens, rows = r->tokens ? r->tokens : 1; /* a fold has the decays of one chain */
    m->decays = malloc(all * sizeof(double) + 1);
    m->between = malloc(rows * all * sizeof(double) + 1);
    m->entering = malloc(rows * sizeof(double));
    m->products = malloc(rows * all * kinds(r) * sizeof(double) + 1);
    m->weights = malloc((r->keys + all) * LINES * sizeof(double));
    m->sums = malloc(LINES * r->values * sizeof(double));
    m->rows = malloc((r->keys + all) * sizeof *m->rows);
    m->seen = malloc(rows * all * sizeof *m->seen + 1);
    m->found = malloc(rows * sizeof *m->found);
    int some = m->decays && m->between && m->entering && m->products && m->weights;
    return some && m->sums && m->rows && m->seen && m->found ? 0 : -1;
}

static void release(struct memory *m) {
    free(m->decays), free(m->between), free(m->entering), free(m->products), free(m->weights);
    free(m->sums), free(m->rows), free(m->seen), free(m->found);
}

/* Compute the outputs of new tokens, or if there are none the state after the kept ones, on OpenMP's threads. Return 0,
 * or -1 if memory cannot be allocated. */
int dynatree_recurrence(const struct recurrence *r) {
    int failed = 0;
    int64_t next = 0, shared = r->heads / r->groups;
#pragma omp parallel
    {
        int64_t parts = (omp_get_num_threads() + r->groups - 1) / r->groups;
        struct memory memory;
        if (allocate(r, &memory)) {
#pragma omp atomic write
            failed = -1;
        }
#pragma omp barrier
        if (!failed) {
            find_seen(r, &memory);
            TASKS(task, r->groups * parts, &next) {
                int64_t group = task / parts, part = task % parts, start = group * shared;
                int64_t first = start + shared * part / parts, last = start + shared * (part + 1) / parts;
                if (first < last) multiply_blocks(r, group, &memory);
                for (int64_t head = first; head < last; head++)
                    r->tokens ? scan_head(r, group, head, &memory) : fold_head(r, group, head, &memory);
            }
        }
        release(&memory);
    }
    return failed;
}
