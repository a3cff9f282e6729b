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

/* ---- factors rounded to bfloat16, sums in float32: the same blocks with the processor's matrix tiles (AMX) */

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

typedef uint16_t half; /* a bfloat16 */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t width[16]; /* bytes */
    uint8_t rows[16];
} TileConfig;

/* Compilers do not know what the instructions for tiles read. */
#define BARRIER __asm__ volatile("" ::: "memory")

/* The kernel of the system gives a process the tiles' registers on request. */
int rounds(void) {
    static int allowed = -1;
    if (allowed < 0) allowed = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
    return allowed;
}

/* All eight tiles have 16 rows of 64 bytes. The calling thread's own configuration is kept in `before`, because other
   libraries expect theirs. */
static void begin_tiles(TileConfig *before) {
    ALIGNED TileConfig mine = {.palette = 1};
    for (int i = 0; i < 8; i++) mine.width[i] = 64, mine.rows[i] = 16;
    BARRIER;
    _tile_storeconfig(before);
    _tile_loadconfig(&mine);
}

INLINE __m512i widened(__m512 x) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)); }

/* 16 words of two bfloat16 each, the first one in the low bits */
INLINE __m512i pairs(vf low, vf high) {
    return _mm512_or_si512(widened((__m512)low), _mm512_slli_epi32(widened((__m512)high), 16));
}

INLINE void write_half(half *to, vf x) { _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh((__m512)x)); }

/* to[j][i] = from[i][j] for 16 x 16 words; strides in words */
INLINE void turn(const uint32_t *from, int64_t from_stride, uint32_t *to, int64_t to_stride) {
    __m512i r[16], t[16];
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(from + i * from_stride);
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int j = 0; j < 4; j++) {
        t[j] = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88);
        t[4 + j] = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
        t[8 + j] = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);
        t[12 + j] = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
    }
    for (int j = 0; j < 4; j++) {
        _mm512_storeu_si512(to + j * to_stride, _mm512_shuffle_i32x4(t[j], t[4 + j], 0x88));
        _mm512_storeu_si512(to + (8 + j) * to_stride, _mm512_shuffle_i32x4(t[j], t[4 + j], 0xdd));
        _mm512_storeu_si512(to + (4 + j) * to_stride, _mm512_shuffle_i32x4(t[8 + j], t[12 + j], 0x88));
        _mm512_storeu_si512(to + (12 + j) * to_stride, _mm512_shuffle_i32x4(t[8 + j], t[12 + j], 0xdd));
    }
}

INLINE void turn_all(const uint32_t *from, int64_t rows, int64_t columns, int64_t from_stride, uint32_t *to,
                     int64_t to_stride) {
    for (int64_t i = 0; i < rows; i += 16)
        for (int64_t j = 0; j < columns; j += 16)
            turn(from + i * from_stride + j, from_stride, to + j * to_stride + i, to_stride);
}

/* c[m][n] (+)= sum over k of a[m][k] * b[k][n]; b has pairs of neighbouring k in one word, [k / 2][n]. M, N and K are
   multiples of 32; strides in elements. */
static void tiles(const half *a, int64_t a_stride, const uint32_t *b, int64_t b_stride, float *c, int64_t c_stride,
                  int64_t M, int64_t N, int64_t K, int add) {
    BARRIER;
    for (int64_t n = 0; n < N; n += 32)
        for (int64_t m = 0; m < M; m += 32) {
            float *to = c + m * c_stride + n, *below = to + 16 * c_stride;
            if (add) {
                _tile_loadd(0, to, 4 * c_stride);
                _tile_loadd(1, to + 16, 4 * c_stride);
                _tile_loadd(2, below, 4 * c_stride);
                _tile_loadd(3, below + 16, 4 * c_stride);
            } else {
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
            }
            for (int64_t k = 0; k < K; k += 32) {
                _tile_loadd(4, a + m * a_stride + k, 2 * a_stride);
                _tile_loadd(6, b + k / 2 * b_stride + n, 4 * b_stride);
                _tile_loadd(7, b + k / 2 * b_stride + n + 16, 4 * b_stride);
                _tile_loadd(5, a + (m + 16) * a_stride + k, 2 * a_stride);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(0, to, 4 * c_stride);
            _tile_stored(1, to + 16, 4 * c_stride);
            _tile_stored(2, below, 4 * c_stride);
            _tile_stored(3, below + 16, 4 * c_stride);
        }
}

/* Rounds rows to bfloat16, [ROWS][size]; padding is 0. */
static void round_rows(const float *x, int64_t query_stride, int64_t head_stride, int64_t size, float factor,
                       const Rows *rows, int64_t heads, half *to) {
    for (int r = 0; r < ROWS; r++) {
        const float *row = x + rows->query[r] * query_stride + (r % heads) * head_stride;
        for (int64_t d = 0; d < size; d += LANES)
            write_half(to + r * size + d, r < rows->rows ? *(const vf *)(row + d) * factor : splat(0.0f));
    }
}

/* words[i / 2][d] has rows i and i + 1, for `count` rows of bfloat16 */
static void interleave(const half *rows, int count, int64_t size, uint32_t *words) {
    for (int i = 0; i < count; i += 2)
        for (int64_t d = 0; d < size; d += LANES) {
            __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(rows + i * size + d)));
            __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(rows + (i + 1) * size + d)));
            _mm512_storeu_si512(words + i / 2 * size + d, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
        }
}

/* Rounds the keys or values of a tile to bfloat16, [count][size]; those from `real` on, which are padding, are 0. */
static void round_keys(const float *x, int64_t stride, int64_t size, const int32_t *keys, int real, int count, half *to) {
    for (int k = 0; k < count; k++)
        for (int64_t d = 0; d < size; d += LANES)
            write_half(to + k * size + d, k < real ? *(const vf *)(x + keys[k] * stride + d) : splat(0.0f));
}

/* words[i / 2][r] has rows i and i + 1 of the turned array */
static void pair_turned(const float *turned, int count, uint32_t *words) {
    for (int k = 0; k < count; k += 2)
        for (int r = 0; r < ROWS; r += LANES) {
            const float *at = turned + k * ROWS + r;
            _mm512_storeu_si512(words + k / 2 * ROWS + r, pairs(*(const vf *)at, *(const vf *)(at + ROWS)));
        }
}

static void round_turned(const float *turned, int count, half *to) {
    for (int64_t i = 0; i < (int64_t)count * ROWS; i += LANES) write_half(to + i, *(const vf *)(turned + i));
}

/* Room for one block, in arrays that begin at multiples of 64 bytes. */
typedef struct {
    float *outs, *grad_queries, *scores, *slopes, *added;
    half *rows, *grads, *keys, *values, *rounded;
    uint32_t *turned_rows, *turned_grads, *paired_rows, *paired_grads, *paired_keys, *turned_keys, *paired;
} Room;

static size_t carve(Room *room, char *from, const Shape *s) {
    int64_t D = s->key_size, E = s->value_size, most = D > E ? D : E;
    char *at = from;
#define CARVE(name, count) room->name = (void *)at, at += (sizeof(*room->name) * (count) + 63) / 64 * 64
    CARVE(outs, E * ROWS);
    CARVE(grad_queries, D * ROWS);
    CARVE(scores, TILE * ROWS);
    CARVE(slopes, TILE * ROWS);
    CARVE(added, TILE * most);
    CARVE(rows, ROWS * D);
    CARVE(grads, ROWS * E);
    CARVE(keys, TILE * D);
    CARVE(values, TILE * E);
    CARVE(rounded, TILE * ROWS);
    CARVE(turned_rows, D / 2 * ROWS);
    CARVE(turned_grads, E / 2 * ROWS);
    CARVE(paired_rows, ROWS / 2 * D);
    CARVE(paired_grads, ROWS / 2 * E);
    CARVE(paired_keys, TILE / 2 * most);
    CARVE(turned_keys, TILE / 2 * most);
    CARVE(paired, TILE / 2 * ROWS);
#undef CARVE
    return (size_t)(at - from);
}

/* turned[d][k]: keys or values with the number of the key last */
static void turn_keys(const half *keys, int count, int64_t size, Room *room) {
    interleave(keys, count, size, room->paired_keys);
    turn_all(room->paired_keys, count / 2, size, size, room->turned_keys, TILE / 2);
}

static void forward_block_rounded(const Shape *s, const Tree *tree, const float *query, const float *key,
                                  const float *value, float *out, float *lse, int64_t head, int64_t block,
                                  int64_t queries_per_block, Room *room) {
    int64_t heads = s->heads / s->kv_heads, D = s->key_size, E = s->value_size;
    float *scores = room->scores, *outs = room->outs;
    ALIGNED float highest[ROWS], sums[ROWS];
    Rows rows;
    find_rows(&rows, s, tree, block, queries_per_block);
    round_rows(query + head * heads * s->query_head, s->query_place, s->query_head, D, s->scale, &rows, heads, room->rows);
    turn_all((const uint32_t *)room->rows, ROWS, D / 2, D / 2, room->turned_rows, ROWS);
    memset(outs, 0, sizeof(float) * E * ROWS);
    for (int r = 0; r < ROWS; r++) highest[r] = -1e30f, sums[r] = 0.0f;
    for (int32_t begin = tree->begins[block]; begin < tree->begins[block + 1]; begin += TILE) {
        const int32_t *keys = tree->keys + begin;
        int32_t left = tree->begins[block + 1] - begin;
        int real = left < TILE ? left : TILE, count = (real + 31) / 32 * 32;
        round_keys(key + head * s->key_head, s->key_token, D, keys, real, count, room->keys);
        round_keys(value + head * s->value_head, s->value_token, E, keys, real, count, room->values);
        turn_keys(room->values, count, E, room);
        tiles(room->keys, D, room->turned_rows, ROWS, scores, ROWS, count, ROWS, D, 0);
        if (count != real || !all_seen(keys, real, rows.first, rows.end, rows.deepest, tree, s->window))
            mask(scores, keys, real, count, rows.token, rows.depth, tree, s->window);
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
        pair_turned(scores, count, room->paired);
        tiles((const half *)room->turned_keys, TILE, room->paired, ROWS, outs, ROWS, E, ROWS, count, 1);
    }
    for (int r = 0; r < rows.rows; r++) {
        int64_t place = rows.query[r] * s->heads + head * heads + r % heads;
        float *to = out + place * E, by = 1.0f / sums[r];
        for (int64_t e = 0; e < E; e++) to[e] = outs[e * ROWS + r] * by;
        lse[place] = highest[r] + logf(sums[r]);
    }
}

static void add_rows(const float *from, int64_t size, float *to, int64_t stride, const int32_t *keys, int real) {
    for (int k = 0; k < real; k++)
        for (int64_t d = 0; d < size; d += LANES) *(vf *)(to + keys[k] * stride + d) += *(const vf *)(from + k * size + d);
}

static void backward_block_rounded(const Shape *s, const Tree *tree, const float *query, const float *key,
                                   const float *value, const float *out, const float *lse, const float *grad,
                                   float *grad_query, float *grad_key, float *grad_value, int64_t head, int64_t block,
                                   int64_t queries_per_block, Room *room) {
    int64_t heads = s->heads / s->kv_heads, D = s->key_size, E = s->value_size, first_head = head * heads;
    float *weights = room->scores, *slopes = room->slopes, *grad_queries = room->grad_queries;
    ALIGNED float logs[ROWS], means[ROWS];
    Rows rows;
    find_rows(&rows, s, tree, block, queries_per_block);
    round_rows(query + first_head * s->query_head, s->query_place, s->query_head, D, s->scale, &rows, heads, room->rows);
    round_rows(grad + first_head * E, s->heads * E, E, E, 1.0f, &rows, heads, room->grads);
    turn_all((const uint32_t *)room->rows, ROWS, D / 2, D / 2, room->turned_rows, ROWS);
    turn_all((const uint32_t *)room->grads, ROWS, E / 2, E / 2, room->turned_grads, ROWS);
    interleave(room->rows, ROWS, D, room->paired_rows);
    interleave(room->grads, ROWS, E, room->paired_grads);
    memset(grad_queries, 0, sizeof(float) * D * ROWS);
    for (int r = 0; r < ROWS; r++) {
        int64_t place = rows.query[r] * s->heads + first_head + r % heads;
        vf sum = splat(0.0f);
        for (int64_t e = 0; e < E; e += LANES) {
            __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(room->grads + r * E + e)));
            sum += *(const vf *)(out + place * E + e) * (vf)_mm512_slli_epi32(wide, 16);
        }
        logs[r] = r < rows.rows ? lse[place] : 0.0f;
        means[r] = total(sum); /* padding has gradients of 0 */
    }
    for (int32_t begin = tree->begins[block]; begin < tree->begins[block + 1]; begin += TILE) {
        const int32_t *keys = tree->keys + begin;
        int32_t left = tree->begins[block + 1] - begin;
        int real = left < TILE ? left : TILE, count = (real + 31) / 32 * 32;
        round_keys(key + head * s->key_head, s->key_token, D, keys, real, count, room->keys);
        round_keys(value + head * s->value_head, s->value_token, E, keys, real, count, room->values);
        turn_keys(room->keys, count, D, room);
        tiles(room->keys, D, room->turned_rows, ROWS, weights, ROWS, count, ROWS, D, 0);
        if (count != real || !all_seen(keys, real, rows.first, rows.end, rows.deepest, tree, s->window))
            mask(weights, keys, real, count, rows.token, rows.depth, tree, s->window);
        tiles(room->values, E, room->turned_grads, ROWS, slopes, ROWS, count, ROWS, E, 0);
        for (int r = 0; r < ROWS; r += LANES) {
            vf log = *(vf *)(logs + r), mean = *(vf *)(means + r);
            for (int k = 0; k < count; k++) {
                vf weight = exponential(*(vf *)(weights + k * ROWS + r) - log);
                *(vf *)(weights + k * ROWS + r) = weight;
                *(vf *)(slopes + k * ROWS + r) = weight * (*(vf *)(slopes + k * ROWS + r) - mean);
            }
        }
        pair_turned(slopes, count, room->paired);
        tiles((const half *)room->turned_keys, TILE, room->paired, ROWS, grad_queries, ROWS, D, ROWS, count, 1);
        round_turned(slopes, count, room->rounded);
        tiles(room->rounded, ROWS, room->paired_rows, D, room->added, D, count, D, ROWS, 0);
        add_rows(room->added, D, grad_key, s->kv_heads * D, keys, real);
        round_turned(weights, count, room->rounded);
        tiles(room->rounded, ROWS, room->paired_grads, E, room->added, E, count, E, ROWS, 0);
        add_rows(room->added, E, grad_value, s->kv_heads * E, keys, real);
    }
    for (int r = 0; r < rows.rows; r++) {
        float *to = grad_query + (rows.query[r] * s->heads + first_head + r % heads) * D;
        for (int64_t d = 0; d < D; d++) to[d] = grad_queries[d * ROWS + r] * s->scale;
    }
}

/* As `forward`, with rounded factors, for sizes that are multiples of 32. */
int forward_rounded(const Shape *s, const Tree *tree, int64_t blocks, int64_t queries_per_block, const float *query,
                    const float *key, const float *value, float *out, float *lse) {
    int failed = 0;
#pragma omp parallel
    {
        Room room;
        char *from = aligned_alloc(64, carve(&room, NULL, s));
        ALIGNED TileConfig before;
        if (!from) {
#pragma omp atomic write
            failed = 1;
        } else {
            carve(&room, from, s);
            begin_tiles(&before);
        }
#pragma omp for collapse(2) schedule(dynamic, 4)
        for (int64_t head = 0; head < s->kv_heads; head++)
            for (int64_t block = 0; block < blocks; block++)
                if (from)
                    forward_block_rounded(s, tree, query, key, value, out, lse, head, block, queries_per_block, &room);
        if (from) _tile_loadconfig(&before);
        free(from);
    }
    return failed;
}

/* As `backward`, with rounded factors, for sizes that are multiples of 32. */
int backward_rounded(const Shape *s, const Tree *tree, int64_t blocks, int64_t queries_per_block, int64_t parts,
                     const float *query, const float *key, const float *value, const float *out, const float *lse,
                     const float *grad, float *grad_query, float *grad_key, float *grad_value) {
    int failed = 0;
#pragma omp parallel
    {
        Room room;
        char *from = aligned_alloc(64, carve(&room, NULL, s));
        ALIGNED TileConfig before;
        if (!from) {
#pragma omp atomic write
            failed = 1;
        } else {
            carve(&room, from, s);
            begin_tiles(&before);
        }
#pragma omp for collapse(2) schedule(dynamic, 1)
        for (int64_t head = 0; head < s->kv_heads; head++)
            for (int64_t part = 0; part < parts; part++) {
                float *to_key = grad_key + (part * s->tokens * s->kv_heads + head) * s->key_size;
                float *to_value = grad_value + (part * s->tokens * s->kv_heads + head) * s->value_size;
                int64_t begin = (part * blocks + parts - 1) / parts, end = ((part + 1) * blocks + parts - 1) / parts;
                for (int64_t block = begin; block < end && from; block++)
                    backward_block_rounded(s, tree, query, key, value, out, lse, grad, grad_query, to_key, to_value,
                                           head, block, queries_per_block, &room);
            }
        if (from) _tile_loadconfig(&before);
        free(from);
    }
    return failed;
}
#else
int rounds(void) { return 0; }
#endif
