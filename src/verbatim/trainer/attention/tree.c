/* Attention of prefix trees, forward and backward: each token sees its ancestors and itself.

   A block is the neighbouring queries that together fill ROWS rows. A row is a query in one of the G query heads that
   share a key/value head. Every token has a key; not every token needs to have queries. SIMD vectors run over rows, so
   a row's softmax needs no sum across a vector, and keys and values are read in place, one number at a time. Scores
   exist for one block and TILE keys at a time and stay in the L1 cache.

   Legend: r row, d index into a query or key, e index into a value, k key. Arrays with rows last (transposed) are called
   "turned". */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "vectors.h"

#if LANES == 8
#define KEYS 4 /* keys whose scores are in registers together, for VECTORS vectors of rows */
#else
#define KEYS 8
#endif
#define VECTORS 3
#define GROUP (LANES * VECTORS)
#define ROWS 96
#define TILE 128

typedef struct {
    int64_t queries, tokens, heads, kv_heads, key_size, value_size;
    int64_t query_place, query_head, key_token, key_head, value_token, value_head; /* strides, in numbers */
    float scale;
    int32_t window; /* maximum number of tokens that a query sees */
} Shape;

typedef struct {
    const int32_t *keys, *begins; /* the keys of block b are keys[begins[b]] to keys[begins[b + 1]] */
    const int32_t *ends, *depths; /* of each token */
    const int32_t *tokens;        /* of each query, ascending */
} Tree;

/* turned[i][r] = sum over d of rows[i][d] * other[d][r], for `count` <= TILE rows given by pointers */
INLINE void products(const float *const *rows, int count, const float *other, int64_t size, float *turned) {
    for (int i = 0; i < count; i += KEYS)
        for (int r = 0; r < ROWS; r += GROUP) {
            vf sum[KEYS][VECTORS];
            for (int a = 0; a < KEYS; a++)
                for (int b = 0; b < VECTORS; b++) sum[a][b] = splat(0.0f);
            const float *const *mine = rows + i;
            for (int64_t d = 0; d < size; d++) {
                const float *line = other + d * ROWS + r;
                vf x[VECTORS];
                for (int b = 0; b < VECTORS; b++) x[b] = *(const vf *)(line + b * LANES);
                for (int a = 0; a < KEYS; a++)
                    for (int b = 0; b < VECTORS; b++) sum[a][b] += mine[a][d] * x[b];
            }
            for (int a = 0; a < KEYS; a++)
                for (int b = 0; b < VECTORS; b++) *(vf *)(turned + (i + a) * ROWS + r + b * LANES) = sum[a][b];
        }
}

/* out[e][r] += sum over keys of rows[k][e] * turned[k][r] */
INLINE void add_weighted(const float *const *rows, int count, const float *turned, int64_t size, float *out) {
    for (int64_t e = 0; e < size; e += KEYS)
        for (int r = 0; r < ROWS; r += GROUP) {
            vf sum[KEYS][VECTORS];
            for (int a = 0; a < KEYS; a++)
                for (int b = 0; b < VECTORS; b++) sum[a][b] = *(vf *)(out + (e + a) * ROWS + r + b * LANES);
            for (int k = 0; k < count; k++) {
                const float *line = turned + k * ROWS + r, *row = rows[k] + e;
                vf x[VECTORS];
                for (int b = 0; b < VECTORS; b++) x[b] = *(const vf *)(line + b * LANES);
                for (int a = 0; a < KEYS; a++)
                    for (int b = 0; b < VECTORS; b++) sum[a][b] += row[a] * x[b];
            }
            for (int a = 0; a < KEYS; a++)
                for (int b = 0; b < VECTORS; b++) *(vf *)(out + (e + a) * ROWS + r + b * LANES) = sum[a][b];
        }
}

/* out[k][d] += sum over rows of turned[k][r] * rows[r][d], where rows are contiguous, [ROWS][size] */
INLINE void add_outer(float *const *out, int count, const float *turned, const float *rows, int64_t size) {
    for (int k = 0; k < count; k += KEYS) {
        int real = count - k < KEYS ? count - k : KEYS;
        int64_t d = 0;
        for (; d + 2 * LANES <= size; d += 2 * LANES) {
            vf sum[KEYS][2];
            for (int a = 0; a < KEYS; a++) sum[a][0] = sum[a][1] = splat(0.0f);
            for (int r = 0; r < ROWS; r++) {
                vf x = *(const vf *)(rows + r * size + d), y = *(const vf *)(rows + r * size + d + LANES);
                for (int a = 0; a < KEYS; a++) {
                    float weight = turned[(k + a) * ROWS + r];
                    sum[a][0] += weight * x;
                    sum[a][1] += weight * y;
                }
            }
            for (int a = 0; a < real; a++) {
                *(vf *)(out[k + a] + d) += sum[a][0];
                *(vf *)(out[k + a] + d + LANES) += sum[a][1];
            }
        }
        for (; d < size; d += LANES) {
            vf sum[KEYS];
            for (int a = 0; a < KEYS; a++) sum[a] = splat(0.0f);
            for (int r = 0; r < ROWS; r++) {
                vf x = *(const vf *)(rows + r * size + d);
                for (int a = 0; a < KEYS; a++) sum[a] += turned[(k + a) * ROWS + r] * x;
            }
            for (int a = 0; a < real; a++) *(vf *)(out[k + a] + d) += sum[a];
        }
    }
}

/* Sets the scores of keys that a row does not see to -inf. No row sees the keys from `real` on, which are padding. */
INLINE void mask(float *turned, const int32_t *keys, int real, int count, const int32_t *row_token,
                 const int32_t *row_depth, const Tree *tree, int32_t window) {
    for (int k = 0; k < count; k++)
        for (int r = 0; r < ROWS; r += LANES) {
            float *at = turned + k * ROWS + r;
            vi seen = splat_int(0);
            if (k < real) {
                vi token = *(const vi *)(row_token + r), depth = *(const vi *)(row_depth + r);
                int32_t key = keys[k];
                seen = (token >= key) & (token < tree->ends[key]) & (depth - tree->depths[key] < window);
            }
            *(vf *)at = choose(seen, *(vf *)at, splat(-INFINITY));
        }
}

/* True if all rows of a block see all of these keys. Its tokens are `first` to `end` - 1, at most `deepest` deep. */
INLINE int all_seen(const int32_t *keys, int real, int32_t first, int32_t end, int32_t deepest, const Tree *tree,
                    int32_t window) {
    int yes = 1;
    for (int k = 0; k < real; k++) {
        int32_t key = keys[k];
        yes &= (key <= first) & (tree->ends[key] >= end) & (deepest - tree->depths[key] < window);
    }
    return yes;
}

/* The rows of a block. If a block has fewer than ROWS, its last token is repeated as padding, with values of 0. */
typedef struct {
    int32_t first, end, deepest; /* tokens */
    int rows; /* without padding */
    int32_t query[ROWS];
    ALIGNED int32_t token[ROWS];
    ALIGNED int32_t depth[ROWS];
} Rows;

static void find_rows(Rows *rows, const Shape *s, const Tree *tree, int64_t block, int64_t queries_per_block) {
    int64_t heads = s->heads / s->kv_heads, begin = block * queries_per_block, end = begin + queries_per_block;
    if (end > s->queries) end = s->queries;
    rows->first = tree->tokens[begin];
    rows->end = tree->tokens[end - 1] + 1;
    rows->rows = (int)((end - begin) * heads);
    rows->deepest = 0;
    for (int r = 0; r < ROWS; r++) {
        int32_t query = (int32_t)(r < rows->rows ? begin + r / heads : end - 1), token = tree->tokens[query];
        rows->query[r] = query;
        rows->token[r] = token;
        rows->depth[r] = tree->depths[token];
        if (rows->depth[r] > rows->deepest) rows->deepest = rows->depth[r];
    }
}

/* Copies the rows of all query heads of a key/value head: to `straight`, [ROWS][size], if given, and transposed to
   `turned`, [size][ROWS]. */
static void take_rows(const float *x, int64_t query_stride, int64_t head_stride, int64_t size, float factor,
                      const Rows *rows, int64_t heads, float *straight, float *turned) {
    for (int r = 0; r < ROWS; r++) {
        const float *row = x + rows->query[r] * query_stride + (r % heads) * head_stride;
        float mine = r < rows->rows ? factor : 0.0f;
        for (int64_t d = 0; d < size; d++) {
            float value = r < rows->rows ? row[d] * mine : 0.0f;
            if (straight) straight[r * size + d] = value;
            turned[d * ROWS + r] = value;
        }
    }
}

static void forward_block(const Shape *s, const Tree *tree, const float *query, const float *key, const float *value,
                          float *out, float *lse, int64_t head, int64_t block, int64_t queries_per_block,
                          float *room) {
    int64_t heads = s->heads / s->kv_heads, D = s->key_size, E = s->value_size;
    float *queries = room, *outs = queries + D * ROWS, *scores = outs + E * ROWS;
    ALIGNED float highest[ROWS], sums[ROWS];
    const float *key_rows[TILE + KEYS], *value_rows[TILE + KEYS];
    Rows rows;
    find_rows(&rows, s, tree, block, queries_per_block);
    take_rows(query + head * heads * s->query_head, s->query_place, s->query_head, D, s->scale, &rows, heads, NULL,
              queries);
    memset(outs, 0, sizeof(float) * E * ROWS);
    /* Not -INFINITY: for a row that sees no key of the first tile, -inf minus -inf would be NaN. */
    for (int r = 0; r < ROWS; r++) highest[r] = -1e30f, sums[r] = 0.0f;
    for (int32_t begin = tree->begins[block]; begin < tree->begins[block + 1]; begin += TILE) {
        const int32_t *keys = tree->keys + begin;
        int32_t left = tree->begins[block + 1] - begin;
        int real = left < TILE ? left : TILE, count = (real + KEYS - 1) / KEYS * KEYS;
        for (int k = 0; k < count; k++) {
            int64_t token = keys[k < real ? k : 0];
            key_rows[k] = key + token * s->key_token + head * s->key_head;
            value_rows[k] = value + token * s->value_token + head * s->value_head;
        }
        products(key_rows, count, queries, D, scores);
        if (count != real || !all_seen(keys, real, rows.first, rows.end, rows.deepest, tree, s->window))
            mask(scores, keys, real, count, rows.token, rows.depth, tree, s->window);
        /* Online softmax: the sums and outputs so far are rescaled whenever a tile raises a row's maximum. */
        for (int r = 0; r < ROWS; r += LANES) {
            vf before = *(vf *)(highest + r), top = before, sum = splat(0.0f);
            for (int k = 0; k < count; k++) top = larger(*(vf *)(scores + k * ROWS + r), top);
            for (int k = 0; k < count; k++) {
                vf weight = exponential(*(vf *)(scores + k * ROWS + r) - top);
                *(vf *)(scores + k * ROWS + r) = weight;
                sum += weight;
            }
            vf factor = exponential(before - top);
            *(vf *)(sums + r) = *(vf *)(sums + r) * factor + sum;
            *(vf *)(highest + r) = top;
            for (int64_t e = 0; e < E; e++) *(vf *)(outs + e * ROWS + r) *= factor;
        }
        add_weighted(value_rows, count, scores, E, outs);
    }
    for (int r = 0; r < rows.rows; r++) {
        int64_t place = rows.query[r] * s->heads + head * heads + r % heads;
        float *to = out + place * E, by = 1.0f / sums[r];
        for (int64_t e = 0; e < E; e++) to[e] = outs[e * ROWS + r] * by;
        lse[place] = highest[r] + logf(sums[r]);
    }
}

/* Gradients of one block. Writes grad_query, [queries, heads, D]; adds to grad_key, [tokens, kv_heads, D], and
   grad_value, [tokens, kv_heads, E], both of which start at this head. */
static void backward_block(const Shape *s, const Tree *tree, const float *query, const float *key, const float *value,
                           const float *out, const float *lse, const float *grad, float *grad_query, float *grad_key,
                           float *grad_value, int64_t head, int64_t block, int64_t queries_per_block, float *room) {
    int64_t heads = s->heads / s->kv_heads, D = s->key_size, E = s->value_size;
    float *queries = room, *turned_queries = queries + D * ROWS, *grads = turned_queries + D * ROWS;
    float *turned_grads = grads + E * ROWS, *outs = turned_grads + E * ROWS, *grad_queries = outs + E * ROWS;
    float *weights = grad_queries + D * ROWS, *slopes = weights + (TILE + KEYS) * ROWS;
    ALIGNED float logs[ROWS], means[ROWS];
    const float *key_rows[TILE + KEYS], *value_rows[TILE + KEYS];
    float *to_keys[TILE + KEYS], *to_values[TILE + KEYS];
    Rows rows;
    find_rows(&rows, s, tree, block, queries_per_block);
    int64_t first_head = head * heads;
    take_rows(query + first_head * s->query_head, s->query_place, s->query_head, D, s->scale, &rows, heads, queries,
              turned_queries);
    take_rows(grad + first_head * E, s->heads * E, E, E, 1.0f, &rows, heads, grads, turned_grads);
    take_rows(out + first_head * E, s->heads * E, E, E, 1.0f, &rows, heads, NULL, outs);
    memset(grad_queries, 0, sizeof(float) * D * ROWS);
    for (int r = 0; r < ROWS; r++)
        logs[r] = r < rows.rows ? lse[rows.query[r] * s->heads + first_head + r % heads] : 0.0f;
    /* Rounded in the same way as in `products`, so that the score of a row with a single key
       (weight 1) has a gradient of exactly 0. */
    for (int r = 0; r < ROWS; r += LANES) {
        vf mean = splat(0.0f);
        for (int64_t e = 0; e < E; e++) mean += *(vf *)(outs + e * ROWS + r) * *(vf *)(turned_grads + e * ROWS + r);
        *(vf *)(means + r) = mean;
    }
    for (int32_t begin = tree->begins[block]; begin < tree->begins[block + 1]; begin += TILE) {
        const int32_t *keys = tree->keys + begin;
        int32_t left = tree->begins[block + 1] - begin;
        int real = left < TILE ? left : TILE, count = (real + KEYS - 1) / KEYS * KEYS;
        for (int k = 0; k < count; k++) {
            int64_t token = keys[k < real ? k : 0];
            key_rows[k] = key + token * s->key_token + head * s->key_head;
            value_rows[k] = value + token * s->value_token + head * s->value_head;
            to_keys[k] = grad_key + token * s->kv_heads * D;
            to_values[k] = grad_value + token * s->kv_heads * E;
        }
        products(key_rows, count, turned_queries, D, weights);
        if (count != real || !all_seen(keys, real, rows.first, rows.end, rows.deepest, tree, s->window))
            mask(weights, keys, real, count, rows.token, rows.depth, tree, s->window);
        products(value_rows, count, turned_grads, E, slopes);
        for (int r = 0; r < ROWS; r += LANES) {
            vf log = *(vf *)(logs + r), mean = *(vf *)(means + r);
            for (int k = 0; k < count; k++) {
                vf weight = exponential(*(vf *)(weights + k * ROWS + r) - log);
                *(vf *)(weights + k * ROWS + r) = weight;
                *(vf *)(slopes + k * ROWS + r) = weight * (*(vf *)(slopes + k * ROWS + r) - mean);
            }
        }
        add_weighted(key_rows, count, slopes, D, grad_queries);
        add_outer(to_keys, real, slopes, queries, D);
        add_outer(to_values, real, weights, grads, E);
    }
    for (int r = 0; r < rows.rows; r++) {
        float *to = grad_query + (rows.query[r] * s->heads + first_head + r % heads) * D;
        for (int64_t d = 0; d < D; d++) to[d] = grad_queries[d * ROWS + r] * s->scale;
    }
}

static int64_t room_for(const Shape *s) {
    return (3 * s->key_size + 3 * s->value_size + 2 * (TILE + KEYS)) * ROWS + 64;
}

int64_t rows_per_block(void) { return ROWS; }

/* Writes out, [queries, heads, E], and lse, [queries, heads]. Returns 1 if memory could not be allocated. */
int forward(const Shape *s, const Tree *tree, int64_t blocks, int64_t queries_per_block, const float *query,
            const float *key, const float *value, float *out, float *lse) {
    int failed = 0;
#pragma omp parallel
    {
        float *room = aligned_alloc(64, (sizeof(float) * room_for(s) + 63) / 64 * 64);
        if (!room) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for collapse(2) schedule(dynamic, 4)
        for (int64_t head = 0; head < s->kv_heads; head++)
            for (int64_t block = 0; block < blocks; block++)
                if (room) forward_block(s, tree, query, key, value, out, lse, head, block, queries_per_block, room);
        free(room);
    }
    return failed;
}

/* Writes grad_query, [queries, heads, D]; adds to grad_key, [parts, tokens, kv_heads, D], and grad_value, [parts,
   tokens, kv_heads, E], which must be 0 at the start. Part p computes the blocks b with b * parts / blocks = p. */
int backward(const Shape *s, const Tree *tree, int64_t blocks, int64_t queries_per_block, int64_t parts,
             const float *query, const float *key, const float *value, const float *out, const float *lse,
             const float *grad, float *grad_query, float *grad_key, float *grad_value) {
    int failed = 0;
#pragma omp parallel
    {
        float *room = aligned_alloc(64, (sizeof(float) * room_for(s) + 63) / 64 * 64);
        if (!room) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for collapse(2) schedule(dynamic, 1)
        for (int64_t head = 0; head < s->kv_heads; head++)
            for (int64_t part = 0; part < parts; part++) {
                float *to_key = grad_key + (part * s->tokens * s->kv_heads + head) * s->key_size;
                float *to_value = grad_value + (part * s->tokens * s->kv_heads + head) * s->value_size;
                int64_t begin = (part * blocks + parts - 1) / parts, end = ((part + 1) * blocks + parts - 1) / parts;
                for (int64_t block = begin; block < end && room; block++)
                    backward_block(s, tree, query, key, value, out, lse, grad, grad_query, to_key, to_value, head, block,
                                   queries_per_block, room);
            }
        free(room);
    }
    return failed;
}
