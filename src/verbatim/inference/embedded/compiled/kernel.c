/* One forward pass of a Llama-style decoder over rows of any number of sequences, and the sampling of next tokens.

   Every row is computed independently: each sum has a fixed order, which depends only on the row's own length. Other
   rows, their number, the threads and shared prefixes affect when a number is computed, but never its bits.

   Keys and values lie in pages of PAGE tokens. One page of one layer and key/value head is a plane: keys as [D][PAGE],
   values as [PAGE][D]. Sequences with equal first tokens refer to the same pages. `plan_tiles` finds such sequences, so
   that their queries read a shared page together.

   A bfloat16 model keeps only its matrices in bfloat16 here; hidden states, sums, norms, attention, keys and values,
   and logits are float32. If the CPU multiplies bfloat16 (DOTS), the inputs of a layer's products are rounded to
   bfloat16. Otherwise, and in the output head, weights are widened in registers and inputs are not rounded. AMX (TILES)
   computes all of these products where the CPU has it, the head's with inputs in two parts, and attention too, with keys
   and values in bfloat16.

   Legend: T rows, W width, H query heads, K key/value heads, G = H / K, D head size, I inner width, V vocabulary. */

#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define PAGE 16
#define SPAN 512      /* keys whose scores are in memory at a time; for longer sequences, partial sums are merged in order */
#define MOST_QUERIES 64
/* Distance between two queries' scores. With a power of two, they would compete for the same cache lines. */
#define STRIDE (SPAN + PAGE)
#define DEPTH 64      /* products that are summed before the sum is added to the total, which limits rounding */
#define DOTS_DEPTH 256 /* the same for bfloat16, whose own rounding is much larger than the rounding of the sum */
#define FEW 16           /* up to this many queries, attention is bound by memory and not by arithmetic */

/* Tile sizes: ROWS x 2 vectors of a product and QUERIES x 4 vectors of scores just fit the registers. */
#if defined(__AVX512F__)
#define LANES 16
#define ROWS 12
#define QUERIES 4
#elif defined(__AVX__)
#define LANES 8
#define ROWS 6
#define QUERIES 2
#else
#define LANES 4
#define ROWS 12
#define QUERIES 4
#endif
#if defined(__AVX512F__) && defined(__AVX512BF16__)
#define DOTS 1
#else
#define DOTS 0
#endif
#if DOTS && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#define TILES 1
#else
#define TILES 0
#endif
#define PANEL (2 * LANES)           /* columns of a product computed together */
#define PARTS (PAGE / LANES)        /* vectors of a page's keys */
#define PAGES_AT_ONCE (4 / PARTS)

#define ROUND(n) (((n) + 15) / 16 * 16)
#define INLINE static inline __attribute__((always_inline))
#define EACH _Pragma("GCC unroll 16") for

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef float loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t iloose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t half;    /* a bfloat16: the upper half of a float */
typedef float four __attribute__((vector_size(16)));

INLINE vec load(const float *p) { return *(const loose *)p; }
INLINE void store(float *p, vec v) { *(loose *)p = v; }
INLINE float widened(half x)
{
    uint32_t bits = (uint32_t)x << 16;
    float found;
    memcpy(&found, &bits, sizeof found);
    return found;
}
/* Stores an input of a product: rounded to the nearest bfloat16 if `rounded` is given, else as floats. */
INLINE void put(float *p, half *rounded, vec v)
{
#if DOTS
    if (rounded) {
        __m256bh found = _mm512_cvtneps_pbh((__m512)v);
        memcpy(rounded, &found, sizeof found);
        return;
    }
#endif
    (void)rounded;
    store(p, v);
}
/* Stores a vector in two parts: rounded to bfloat16, and the rest, rounded too. Their sum is off by 2^-17 at most. */
INLINE void put_split(half *rounded, half *low, vec v)
{
#if DOTS
    __m256bh first = _mm512_cvtneps_pbh((__m512)v);
    __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)first), 16);
    __m256bh second = _mm512_cvtneps_pbh((__m512)(v - (vec)wide));
    memcpy(rounded, &first, sizeof first);
    memcpy(low, &second, sizeof second);
#else
    (void)rounded, (void)low, (void)v;
#endif
}
INLINE vec all(float x)
{
#if LANES == 16
    return (vec)_mm512_set1_ps(x);
#elif LANES == 8
    return (vec)_mm256_set1_ps(x);
#else
    return (vec){x, x, x, x};
#endif
}
INLINE vec where(ivec mask, vec a, vec b) { return (vec)((mask & (ivec)a) | (~mask & (ivec)b)); }
INLINE vec larger(vec a, vec b) { return where(a > b, a, b); }

/* Keeps a vector in a register; otherwise compilers load it again for each product. */
#if defined(__AVX512F__)
#define HOLD(x) __asm__("" : "+v"(x))
#elif defined(__x86_64__)
#define HOLD(x) __asm__("" : "+x"(x))
#elif defined(__aarch64__)
#define HOLD(x) __asm__("" : "+w"(x))
#else
#define HOLD(x) (void)(x)
#endif

/* Adds lanes i, i + 4, i + 8, ... of a vector, always in the same order. */
INLINE four folded(vec a)
{
#if LANES == 16
    __m256 low = _mm512_castps512_ps256((__m512)a);
    __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd((__m512)a), 1));
    __m256 b = _mm256_add_ps(low, high);
    return (four)_mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
#elif LANES == 8
    return (four)_mm_add_ps(_mm256_castps256_ps128((__m256)a), _mm256_extractf128_ps((__m256)a, 1));
#else
    return (four)a;
#endif
}

INLINE float sum(vec a)
{
    four e = folded(a);
    return (e[0] + e[2]) + (e[1] + e[3]);
}
INLINE float largest(vec a)
{
    float top = a[0];
    for (int i = 1; i < LANES; i++) top = a[i] > top ? a[i] : top;
    return top;
}

/* e^x for x <= 88; 0 below -87; NaN for NaN. Cody-Waite reduction and the polynomial of Cephes; error at most 2 units
   in the last place. */
INLINE vec vexp(vec x)
{
    vec bounded = larger(all(-87.0f), x); /* with this order of arguments, NaN stays NaN */
    vec shifted = bounded * all(1.44269504088896341f) + all(12583039.0f); /* lowest bits: n + 127, the exponent */
    vec n = shifted - all(12583039.0f);
    vec r = bounded - n * all(0.693359375f);
    r = r - n * all(-2.12194440e-4f);
    vec p = all(1.9875691500e-4f);
    p = p * r + all(1.3981999507e-3f);
    p = p * r + all(8.3334519073e-3f);
    p = p * r + all(4.1665795894e-2f);
    p = p * r + all(1.6666665459e-1f);
    p = p * r + all(5.0000001201e-1f);
    p = p * (r * r) + r + all(1.0f);
    vec power = (vec)((ivec)shifted << 23);
    return where(x < all(-87.0f), all(0.0f), p * power);
}
INLINE float exp1(float x) { return vexp(all(x))[0]; }

/* ---- threads: the OpenMP team that torch uses in the calling thread */

typedef void (*Task)(void *arg, int64_t index, int64_t count);

#ifdef _OPENMP
extern int omp_get_thread_num(void);
extern int omp_get_num_threads(void);
#endif

/* Runs the shares 0 to count - 1 of a task, each on its own thread. Returns when all of them are done. */
static void run(int64_t threads, Task task, void *arg)
{
#ifdef _OPENMP
    if (threads > 1) {
#pragma omp parallel num_threads((int)threads)
        task(arg, omp_get_thread_num(), omp_get_num_threads());
        return;
    }
#endif
    (void)threads;
    task(arg, 0, 1);
}

/* ---- products of matrices: y[t, n] = sum over k of x[t, k] w[n, k]

   Sums of DEPTH products, each in the order of k, are added in order. One long sum would accumulate more rounding.

   Weights [N, K] are packed as panels of PANEL columns, [N / PANEL][K][PANEL]; zeros pad the last panel. */

int64_t verbatim_packed(int64_t n_end, int64_t k_end) { return (n_end + PANEL - 1) / PANEL * PANEL * k_end; }

void verbatim_pack(const float *w, int64_t n_end, int64_t k_end, float *to)
{
    for (int64_t first = 0; first < n_end; first += PANEL)
        for (int64_t start = 0; start < k_end; start += 64) /* reads whole lines of the L1 cache */
            for (int64_t n = first; n < first + PANEL; n++)
                for (int64_t k = start; k < start + 64 && k < k_end; k++)
                    to[first * k_end + k * PANEL + n - first] = n < n_end ? w[n * k_end + k] : 0.0f;
}

/* In a bfloat16 matrix, elements k and k + 1 of a column are adjacent: [N / PANEL][K / 2][PANEL][2]; K is even. */
void verbatim_pack_halves(const half *w, int64_t n_end, int64_t k_end, half *to)
{
    for (int64_t first = 0; first < n_end; first += PANEL)
        for (int64_t start = 0; start < k_end; start += 64)
            for (int64_t n = first; n < first + PANEL; n++)
                for (int64_t k = start; k < start + 64 && k < k_end; k += 2) {
                    half *pair = to + first * k_end + k * PANEL + 2 * (n - first);
                    pair[0] = n < n_end ? w[n * k_end + k] : 0;
                    pair[1] = n < n_end ? w[n * k_end + k + 1] : 0;
                }
}

/* Kinds of products: float x float; float x bfloat16 widened to float; bfloat16 x bfloat16. */
enum { FLOATS, WIDENED, ROUNDED };

/* Each of these functions adds the products k = start to end - 1; x is the first row, w the first panel. */
INLINE void add_floats(int rows, int panels, const float *x, int64_t ldx, const float *w, int64_t k_end, int64_t start,
                       int64_t end, vec acc[ROWS][8])
{
    for (int64_t k = start; k < end; k++) {
        vec column[8];
        EACH (int c = 0; c < 2 * panels; c++) {
            column[c] = load(w + (c / 2 * k_end + k) * PANEL + c % 2 * LANES);
            if (rows > 1) HOLD(column[c]);
        }
        EACH (int r = 0; r < rows; r++) {
            vec one = all(x[r * ldx + k]);
            EACH (int c = 0; c < 2 * panels; c++) acc[r][c] += one * column[c];
        }
    }
}

INLINE void add_widened(int rows, int panels, const float *x, int64_t ldx, const half *w, int64_t k_end, int64_t start,
                        int64_t end, vec acc[ROWS][8])
{
    for (int64_t k = start; k < end; k += 2) {
        vec first[8], second[8];
        EACH (int c = 0; c < 2 * panels; c++) {
            const half *at = w + (c / 2 * k_end + k) * PANEL + c % 2 * 2 * LANES;
            ivec pairs = *(const iloose *)at;
            first[c] = (vec)(pairs << 16);
            second[c] = (vec)(pairs & (int32_t)0xffff0000);
            if (rows > 1) {
                HOLD(first[c]);
                HOLD(second[c]);
                __builtin_prefetch(at + k_end * PANEL, 0, 2);
            }
        }
        EACH (int r = 0; r < rows; r++) {
            vec one = all(x[r * ldx + k]), other = all(x[r * ldx + k + 1]);
            EACH (int c = 0; c < 2 * panels; c++) acc[r][c] += one * first[c];
            EACH (int c = 0; c < 2 * panels; c++) acc[r][c] += other * second[c];
        }
    }
}

#if DOTS
INLINE void add_rounded(int rows, int panels, const half *x, int64_t ldx, const half *w, int64_t k_end, int64_t start,
                        int64_t end, vec acc[ROWS][8])
{
    for (int64_t k = start; k < end; k += 2) {
        ivec column[8];
        EACH (int c = 0; c < 2 * panels; c++) {
            const half *at = w + (c / 2 * k_end + k) * PANEL + c % 2 * 2 * LANES;
            column[c] = *(const iloose *)at;
            if (rows > 1) {
                HOLD(column[c]);
                __builtin_prefetch(at + k_end * PANEL, 0, 2); /* fetches the next panel while this one is multiplied */
            }
        }
        EACH (int r = 0; r < rows; r++) {
            int32_t pair;
            memcpy(&pair, x + r * ldx + k, sizeof pair);
            __m512i both = _mm512_set1_epi32(pair);
            EACH (int c = 0; c < 2 * panels; c++)
                acc[r][c] = (vec)_mm512_dpbf16_ps((__m512)acc[r][c], (__m512bh)both, (__m512bh)column[c]);
        }
    }
}
#endif

INLINE void tile(int kind, int rows, int panels, const void *x, int64_t ldx, const void *w, const float *bias,
                 int64_t k_end, float *y, int64_t ldy, int64_t wanted, int adds)
{
    vec acc[ROWS][8], total[ROWS][8];
    int64_t depth = kind == ROUNDED ? DOTS_DEPTH : DEPTH;
    for (int64_t start = 0; start < k_end; start += depth) {
        int64_t end = start + depth < k_end ? start + depth : k_end;
        EACH (int r = 0; r < rows; r++)
            EACH (int c = 0; c < 2 * panels; c++) acc[r][c] = all(0.0f);
        if (kind == FLOATS) add_floats(rows, panels, x, ldx, w, k_end, start, end, acc);
        if (kind == WIDENED) add_widened(rows, panels, x, ldx, w, k_end, start, end, acc);
#if DOTS
        if (kind == ROUNDED) add_rounded(rows, panels, x, ldx, w, k_end, start, end, acc);
#endif
        if (end < k_end || start)
            EACH (int r = 0; r < rows; r++)
                EACH (int c = 0; c < 2 * panels; c++) {
                    if (start) acc[r][c] += total[r][c];
                    if (end < k_end) total[r][c] = acc[r][c];
                }
    }
    EACH (int r = 0; r < rows; r++)
        EACH (int c = 0; c < 2 * panels; c++) {
            if (c * LANES >= wanted) break;
            float *to = y + r * ldy + c * LANES;
            vec found = acc[r][c];
            if (bias) found += load(bias + c * LANES);
            store(to, adds ? found + load(to) : found);
        }
}

/* Columns first to last - 1 of y = x w^T + bias, or of y += x w^T + bias; `first` is a multiple of PANEL. */
#define PRODUCT(name, kind, input, weight)                                                                          \
    static void name(const input *x, int64_t ldx, const weight *w, const float *bias, int64_t k_end, float *y,      \
                     int64_t ldy, int64_t t_end, int64_t first, int64_t last, int adds)                             \
    {                                                                                                               \
        int64_t n = first;                                                                                          \
        if (t_end <= 2) /* few rows: several panels at once, for enough independent sums */                         \
            for (; n + 4 * PANEL <= last; n += 4 * PANEL)                                                           \
                for (int64_t t = 0; t < t_end; t++) TILE(kind, 1, 4);                                               \
        for (; n < last; n += PANEL)                                                                                \
            for (int64_t t = 0, rows, tiles = (t_end + ROWS - 1) / ROWS; t < t_end; t += rows, tiles--) {           \
                rows = (t_end - t + tiles - 1) / tiles; /* tiles of nearly equal size */                            \
                switch (rows) {                                                                                     \
                    REST(kind, 1) REST(kind, 2) REST(kind, 3) REST(kind, 4) REST(kind, 5) REST(kind, 6) MORE(kind)  \
                }                                                                                                   \
            }                                                                                                       \
    }
#define TILE(kind, rows, panels)                                                                                     \
    tile(kind, rows, panels, x + t * ldx, ldx, w + n * k_end, bias ? bias + n : NULL, k_end, y + t * ldy + n, ldy,    \
         last - n, adds)
#define REST(kind, rows) case rows: TILE(kind, rows, 1); break;
#if ROWS > 6
#define MORE(kind) REST(kind, 7) REST(kind, 8) REST(kind, 9) REST(kind, 10) REST(kind, 11) REST(kind, 12)
#else
#define MORE(kind)
#endif
PRODUCT(product_of_floats, FLOATS, float, float)
PRODUCT(product_widened, WIDENED, float, half)
#if DOTS
PRODUCT(product_rounded, ROUNDED, half, half)
#endif

/* ---- products of bfloat16 matrices by AMX, in tiles of 16 rows of 64 bytes

   The packed layout of a panel is that of two tiles side by side: row k / 2 has the elements k and k + 1 of 16 columns.
   For each row and column, the products of the even and of the odd k of a tile are summed apart, then added to the sum
   of the tiles before. So the order of a sum depends only on its length, and any number of rows gives the same bits. */

#if TILES
#define AMX_PERMISSION 0x1023 /* ARCH_REQ_XCOMP_PERM of arch_prctl, */
#define AMX_DATA 18           /* and the state that it asks for */

/* Asks the system once for the use of tiles. It refuses if it is too old, or if a signal's stack is too small. */
static int tiles_allowed(void)
{
    static atomic_int found = -1;
    int known = atomic_load(&found);
    if (known >= 0) return known;
    unsigned a, b, c, d = 0;
    int has = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 24 & 1) && (d >> 22 & 1);
    known = has && syscall(SYS_arch_prctl, AMX_PERMISSION, AMX_DATA) == 0;
    atomic_store(&found, known);
    return known;
}

typedef struct {
    uint8_t palette, start, unused[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} TileShapes;

/* Ends all stores to memory, and to what is at `from`. GCC does not know that its functions that load tiles read them,
   and would move or leave out stores otherwise. */
#define READ_BY_TILES(from) __asm__ volatile("" : : "r"(from) : "memory")

/* Sums are tiles 0 to 3, inputs (of `rows` and `more` rows) 4 and 5, weights 6 and 7; a step is `depth` products. */
static void shape_tiles(int64_t rows, int64_t more, int64_t depth)
{
    TileShapes s = {.palette = 1};
    for (int i = 0; i < 4; i++) s.bytes[i] = 64, s.rows[i] = (uint8_t)(more && i >= 2 ? more : rows);
    s.bytes[4] = s.bytes[5] = (uint16_t)(2 * depth), s.bytes[6] = s.bytes[7] = 64;
    s.rows[4] = (uint8_t)rows, s.rows[5] = (uint8_t)(more ? more : rows);
    s.rows[6] = s.rows[7] = (uint8_t)(depth / 2);
    READ_BY_TILES(&s);
    _tile_loadconfig(&s);
}

/* Writes the sums in a tile to `rows` rows of y. */
#define WRITE_TILE(number, rows, y, bias)                                                                        \
    do {                                                                                                         \
        if (!adds && !(bias)) {                                                                                  \
            _tile_stored(number, y, 4 * ldy);                                                                    \
            break;                                                                                               \
        }                                                                                                        \
        float sums[16 * 16] __attribute__((aligned(64)));                                                        \
        _tile_stored(number, sums, 64);                                                                          \
        vec given = (bias) ? load(bias) : all(0.0f);                                                             \
        for (int64_t r = 0; r < (rows); r++) {                                                                   \
            float *to = (y) + r * ldy;                                                                           \
            store(to, adds ? load(sums + 16 * r) + given + load(to) : load(sums + 16 * r) + given);              \
        }                                                                                                        \
    } while (0)
#define AT(column) (bias ? bias + (column) : NULL)

/* Which cache lines of a step of the next panel are fetched while this panel is multiplied: the blocks of rows share
   them, because they would wait for one another's if one block fetched all. */
typedef struct { int64_t first, last; } Lines;
#define FETCH(step) for (int64_t i = fetch.first; i < fetch.last; i++) __builtin_prefetch((step) + i * PANEL, 0, 2)

/* One panel for 17 to 32 rows. `low`: inputs are the sums x + low. */
static void tiles_of_rows(const half *x, const half *low, int64_t ldx, const half *w, const float *bias, int64_t k_end,
                          int64_t depth, float *y, int64_t ldy, int64_t more, int64_t wanted, int adds,
                          Lines fetch)
{
    READ_BY_TILES(x);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < k_end; k += depth) {
        const half *at = w + k * PANEL;
        FETCH(at + k_end * PANEL);
        _tile_loadd(6, at, 4 * PANEL);
        _tile_loadd(7, at + 32, 4 * PANEL);
        _tile_loadd(4, x + k, 2 * ldx);
        _tile_loadd(5, x + 16 * ldx + k, 2 * ldx);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        if (!low) continue;
        _tile_loadd(4, low + k, 2 * ldx);
        _tile_loadd(5, low + 16 * ldx + k, 2 * ldx);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    WRITE_TILE(0, 16, y, bias);
    WRITE_TILE(2, more, y + 16 * ldy, bias);
    if (wanted <= 16) return;
    WRITE_TILE(1, 16, y + 16, AT(16));
    WRITE_TILE(3, more, y + 16 * ldy + 16, AT(16));
}

/* One or two panels for up to 16 rows. */
INLINE void tiles_of_columns(int panels, const half *x, const half *low, int64_t ldx, const half *w, const float *bias,
                             int64_t k_end, int64_t depth, float *y, int64_t ldy, int64_t rows, int64_t wanted, int adds,
                             Lines fetch)
{
    READ_BY_TILES(x);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < k_end; k += depth) {
        const half *at = w + k * PANEL, *next = at + k_end * PANEL;
        FETCH(at + panels * k_end * PANEL);
        if (panels == 2) FETCH(at + 3 * k_end * PANEL);
        _tile_loadd(4, x + k, 2 * ldx);
        if (low) _tile_loadd(5, low + k, 2 * ldx);
        _tile_loadd(6, at, 4 * PANEL);
        _tile_loadd(7, at + 32, 4 * PANEL);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (low) {
            _tile_dpbf16ps(0, 5, 6);
            _tile_dpbf16ps(1, 5, 7);
        }
        if (panels == 1) continue;
        _tile_loadd(6, next, 4 * PANEL);
        _tile_loadd(7, next + 32, 4 * PANEL);
        _tile_dpbf16ps(2, 4, 6);
        _tile_dpbf16ps(3, 4, 7);
        if (low) {
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    WRITE_TILE(0, rows, y, bias);
    if (wanted > 16) WRITE_TILE(1, rows, y + 16, AT(16));
    if (wanted > 32) WRITE_TILE(2, rows, y + 32, AT(32));
    if (wanted > 48) WRITE_TILE(3, rows, y + 48, AT(48));
}

/* As the products above, with the inputs x, or x + low if that is given. */
static void product_of_tiles(const half *x, const half *low, int64_t ldx, const half *w, const float *bias,
                             int64_t k_end, float *y, int64_t ldy, int64_t t_end, int64_t first, int64_t last, int adds)
{
    int64_t depth = k_end % 32 ? 16 : 32, shape = 0;
    for (int64_t n = first, panels; n < last; n += panels * PANEL) {
        panels = last - n > PANEL ? 2 : 1;
        for (int64_t t = 0, rows; t < t_end; t += rows) {
            rows = t_end - t < 32 ? t_end - t : 32;
            if (rows != shape) shape_tiles(rows < 16 ? rows : 16, rows > 16 ? rows - 16 : 0, depth);
            shape = rows;
            const half *from = x + t * ldx, *rest = low ? low + t * ldx : NULL, *panel = w + n * k_end;
            float *to = y + t * ldy + n;
            int64_t block = t / 32, blocks = (t_end + 31) / 32;
            Lines fetch = {depth * block / blocks, depth * (block + 1) / blocks};
            if (rows > 16)
                for (int64_t p = 0; p < panels; p++)
                    tiles_of_rows(from, rest, ldx, panel + p * PANEL * k_end, AT(n + p * PANEL), k_end, depth,
                                  to + p * PANEL, ldy, rows - 16, last - n - p * PANEL, adds, fetch);
            else if (panels == 2)
                tiles_of_columns(2, from, rest, ldx, panel, AT(n), k_end, depth, to, ldy, rows, last - n, adds, fetch);
            else tiles_of_columns(1, from, rest, ldx, panel, AT(n), k_end, depth, to, ldy, rows, last - n, adds, fetch);
        }
    }
    _tile_release();
}
#else
static int tiles_allowed(void) { return 0; }
#endif

/* 1 if the CPU multiplies tiles of bfloat16 (AMX) and the system allows it. */
int64_t verbatim_tiles(void) { return tiles_allowed(); }

/* As above. `halves`: w is in bfloat16. `rounded` is x in bfloat16 if the CPU multiplies bfloat16, else NULL. `low` is
   given only with tiles: what the rounding left out, so that x is rounded + low up to 2^-17 of it. */
static void product(const float *x, const half *rounded, const half *low, int64_t ldx, const void *w, int halves,
                    const float *bias, int64_t k_end, float *y, int64_t ldy, int64_t t_end, int64_t first, int64_t last,
                    int adds)
{
#if TILES
    if (rounded && tiles_allowed()) {
        product_of_tiles(rounded, low, ldx, w, bias, k_end, y, ldy, t_end, first, last, adds);
        return;
    }
#endif
    (void)low;
#if DOTS
    if (rounded) {
        product_rounded(rounded, ldx, w, bias, k_end, y, ldy, t_end, first, last, adds);
        return;
    }
#endif
    (void)rounded;
    if (halves) product_widened(x, ldx, w, bias, k_end, y, ldy, t_end, first, last, adds);
    else product_of_floats(x, ldx, w, bias, k_end, y, ldy, t_end, first, last, adds);
}

/* 1 if the inputs of products with bfloat16 weights are rounded to bfloat16. */
int64_t verbatim_rounds(void) { return DOTS; }

/* One bfloat16 product of a layer, for tests: y = x w^T + bias; `rounded` [T, K] is working memory, y is [T, N]. */
void verbatim_product_of_halves(const float *x, const half *w, const float *bias, int64_t t_end, int64_t n_end,
                                int64_t k_end, half *rounded, float *y)
{
    for (int64_t i = 0; DOTS && i < t_end * k_end; i += LANES) put(NULL, rounded + i, load(x + i));
    product(x, DOTS ? rounded : NULL, NULL, k_end, w, 1, bias, k_end, y, n_end, t_end, 0, n_end, 0);
}

/* x / sqrt(mean(x^2) + eps) * weight */
INLINE void normed(const float *x, const float *weight, float eps, int64_t width, float *out)
{
    vec squares = all(0.0f);
    for (int64_t i = 0; i < width; i += LANES) squares += load(x + i) * load(x + i);
    vec by = all(1.0f / sqrtf(sum(squares) / (float)width + eps));
    for (int64_t i = 0; i < width; i += LANES) store(out + i, load(x + i) * by * load(weight + i));
}

/* ---- structures that Python fills in (structures.py has the same fields in the same order); q, k, v, o, gate, up,
   down and head are packed */

typedef struct {
    const void *q, *k, *v, *o, *gate, *up, *down;
    const float *input_norm, *mlp_norm, *q_norm, *k_norm;
    const float *q_bias, *k_bias, *v_bias, *o_bias, *gate_bias, *up_bias, *down_bias;
    int64_t window; /* number of tokens that a query attends to, itself included; 0 = all tokens before it */
    float input_eps, mlp_eps, q_eps, k_eps, scale, unused;
} Layer;

typedef struct {
    int64_t layers, width, heads, kv_heads, head_size, inner, vocab;
    int64_t halves;             /* 1 if the packed matrices and the embedding are in bfloat16 */
    const void *embedding, *head;
    const float *norm, *cos, *sin; /* norm: NULL = no final norm; cos, sin: [context, D / 2] */
    const Layer *layer;
    float eps, unused;
} Model;

typedef struct {
    int64_t rows;               /* the rows of a slot are adjacent, ordered by position */
    const int64_t *ids, *positions, *slots;
    const int32_t *tables;      /* [slots, table_width]: page numbers of each slot */
    int64_t table_width;
    void *const *chunks;        /* memory of the pages: each [planes, 1 << chunk_bits, D * PAGE] */
    int64_t chunk_bits;
    int64_t outs;
    const int64_t *out_rows;
    float *out;                 /* [outs, W]: last hidden states after the final norm */
    int64_t threads;
    const float *given;         /* [rows, W]: hidden states before the first layer; NULL: the ids' embeddings */
} Pass;

/* ---- attention */

typedef struct { int64_t row, rows, pages; } Piece; /* adjacent rows of one slot, and the pages they attend to */
typedef struct { int64_t piece, pieces, rows, shared; } Tile; /* pieces that attend together, and the pages they share */

typedef struct {
    const Model *m;
    const Pass *p;
    const Layer *layer;
    int64_t index;              /* of the layer */
    int64_t row, tile_rows;     /* rows of the current tile of products */
    float *h, *q, *kv, *x, *gate, *up, *scratch;
    half *x_rounded, *q_rounded, *gate_rounded; /* inputs of products in bfloat16; NULL = the inputs stay floats */
    int64_t scratch_size;       /* floats per thread */
    Piece *pieces, *spare;
    Tile *tiles;
    int64_t num_pieces, num_tiles;
    atomic_long next;
} Work;

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t greater(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE const int32_t *table_of(const Pass *p, int64_t row) { return p->tables + p->slots[row] * p->table_width; }
INLINE char *plane_of(const Model *m, const Pass *p, int32_t page, int64_t layer, int64_t head, int value, int bytes)
{
    int64_t size = PAGE * m->head_size * bytes, number = (layer * m->kv_heads + head) * 2 + value;
    int64_t chunk = page >> p->chunk_bits, within = page - (chunk << p->chunk_bits);
    return (char *)p->chunks[chunk] + ((number << p->chunk_bits) + within) * size;
}
INLINE float *plane(const Model *m, const Pass *p, int32_t page, int64_t layer, int64_t head, int value)
{
    return (float *)plane_of(m, p, page, layer, head, value, sizeof(float));
}

/* True if keys and values are bfloat16, in the layout of tiles: keys as [D / 2][PAGE][2], values as [PAGE / 2][D][2]. */
INLINE int narrow(const Model *m) { return m->halves && tiles_allowed(); }
INLINE half *narrow_plane(const Model *m, const Pass *p, int32_t page, int64_t layer, int64_t head, int value)
{
    return (half *)plane_of(m, p, page, layer, head, value, sizeof(half));
}

static int64_t common_pages(const Pass *p, const Piece *a, const Piece *b)
{
    const int32_t *one = table_of(p, a->row), *other = table_of(p, b->row);
    int64_t most = smaller(a->pages, b->pages), n = 0;
    while (n < most && one[n] == other[n]) n++;
    return n;
}

static int comes_first(const Pass *p, const Piece *a, const Piece *b)
{
    const int32_t *one = table_of(p, a->row), *other = table_of(p, b->row);
    int64_t n = common_pages(p, a, b);
    if (n < a->pages && n < b->pages) return one[n] < other[n];
    return a->row < b->row;
}

/* Merge sort by page numbers, so that sequences with the same first pages become adjacent. */
static void sort_pieces(Work *w)
{
    Piece *from = w->pieces, *to = w->spare;
    for (int64_t size = 1; size < w->num_pieces; size *= 2) {
        for (int64_t start = 0; start < w->num_pieces; start += 2 * size) {
            int64_t a = start, middle = smaller(start + size, w->num_pieces), b = middle;
            int64_t end = smaller(start + 2 * size, w->num_pieces);
            for (int64_t i = start; i < end; i++)
                to[i] = a < middle && (b == end || !comes_first(w->p, &from[b], &from[a])) ? from[a++] : from[b++];
        }
        Piece *swap = from;
        from = to, to = swap;
    }
    w->pieces = from, w->spare = to;
}

static void plan_tiles(Work *w)
{
    const Pass *p = w->p;
    int64_t most = greater(1, MOST_QUERIES / (w->m->heads / w->m->kv_heads));
    w->num_pieces = 0;
    for (int64_t row = 0; row < p->rows;) {
        int64_t end = row + 1;
        while (end < p->rows && end - row < most && p->slots[end] == p->slots[row]) end++;
        w->pieces[w->num_pieces++] = (Piece){row, end - row, p->positions[end - 1] / PAGE + 1};
        row = end;
    }
    sort_pieces(w);
    w->num_tiles = 0;
    for (int64_t i = 0; i < w->num_pieces;) {
        int64_t shared = w->pieces[i].pages, rows = w->pieces[i].rows, n = 1;
        while (i + n < w->num_pieces && rows + w->pieces[i + n].rows <= most) {
            int64_t less = smaller(shared, common_pages(p, &w->pieces[i], &w->pieces[i + n]));
            /* With this piece the others would share fewer pages, and read more pages alone than the piece saves. */
            if (less <= (n - 1) * (shared - less)) break;
            shared = less, rows += w->pieces[i + n++].rows;
        }
        w->tiles[w->num_tiles++] = (Tile){i, n, rows, n > 1 ? shared : 0};
        i += n;
    }
}

/* Scores of some queries with the keys of some pages: scores[r, 16 j + c] = sum over d of q[r, d] k_j[d, c]. */
INLINE void score(int queries, int pages, const float *q, int64_t size, const float *const *k, float *scores)
{
    vec acc[QUERIES][4];
    EACH (int r = 0; r < queries; r++)
        EACH (int j = 0; j < pages * PARTS; j++) acc[r][j] = all(0.0f);
    for (int64_t d = 0; d < size; d++) {
        vec key[4];
        EACH (int j = 0; j < pages * PARTS; j++) {
            key[j] = load(k[j / PARTS] + d * PAGE + j % PARTS * LANES);
            if (queries > 1) HOLD(key[j]);
        }
        EACH (int r = 0; r < queries; r++) {
            vec one = all(q[r * size + d]);
            EACH (int j = 0; j < pages * PARTS; j++) acc[r][j] += one * key[j];
        }
    }
    EACH (int r = 0; r < queries; r++)
        EACH (int j = 0; j < pages * PARTS; j++) store(scores + r * STRIDE + j * LANES, acc[r][j]);
}

/* Adds weighted values: out[r, c % 2, d] += weights[r, c] v[c, d] for the keys c of a page, in order. */
INLINE void add_values(int queries, int parts, const float *weights, const float *const *v, int64_t pages, int64_t size,
                       float *out)
{
    vec acc[QUERIES][2][2];
    EACH (int r = 0; r < queries; r++)
        EACH (int odd = 0; odd < 2; odd++)
            EACH (int j = 0; j < parts; j++) acc[r][odd][j] = load(out + (2 * r + odd) * size + j * LANES);
    for (int64_t page = 0; page < pages; page++)
        for (int c = 0; c < PAGE; c += 2)
            EACH (int odd = 0; odd < 2; odd++) {
                vec value[2];
                EACH (int j = 0; j < parts; j++) {
                    value[j] = load(v[page] + (c + odd) * size + j * LANES);
                    if (queries > 1) HOLD(value[j]);
                }
                EACH (int r = 0; r < queries; r++) {
                    vec one = all(weights[r * STRIDE + page * PAGE + c + odd]);
                    EACH (int j = 0; j < parts; j++) acc[r][odd][j] += one * value[j];
                }
            }
    EACH (int r = 0; r < queries; r++)
        EACH (int odd = 0; odd < 2; odd++)
            EACH (int j = 0; j < parts; j++) store(out + (2 * r + odd) * size + j * LANES, acc[r][odd][j]);
}

/* One function for each size. They are not inlined, because the code around the loop would compete for registers. */
#define SIZES(make) make(1) make(2) make(3) make(4)
#define ALONE static __attribute__((noinline)) void
#define SCORE(n)                                                                                                    \
    ALONE score_##n##_1(const float *q, int64_t size, const float *const *k, float *to)                             \
    { score(n <= QUERIES ? n : 1, 1, q, size, k, to); }                                                             \
    ALONE score_##n##_2(const float *q, int64_t size, const float *const *k, float *to)                             \
    { score(n <= QUERIES ? n : 1, PAGES_AT_ONCE < 2 ? 1 : 2, q, size, k, to); }                                     \
    ALONE score_##n##_4(const float *q, int64_t size, const float *const *k, float *to)                             \
    { score(n <= QUERIES ? n : 1, PAGES_AT_ONCE, q, size, k, to); }
#define ADD(n)                                                                                                      \
    ALONE add_##n##_1(const float *weights, const float *const *v, int64_t pages, int64_t size, float *out)         \
    { add_values(n <= QUERIES ? n : 1, 1, weights, v, pages, size, out); }                                          \
    ALONE add_##n##_2(const float *weights, const float *const *v, int64_t pages, int64_t size, float *out)         \
    { add_values(n <= QUERIES ? n : 1, 2, weights, v, pages, size, out); }
SIZES(SCORE)
SIZES(ADD)

typedef struct {
    const Work *w;
    int64_t head;               /* key/value head */
    int64_t group, size;        /* G and D */
    float *q, *scores, *out;    /* [queries, D], [queries, SPAN], [queries, 2, D] */
    float *top, *total;         /* [queries]: largest score, and sum of exp(score - top) */
    half *narrow;               /* [2, queries, D]: both parts of the queries, if keys are bfloat16; else NULL */
    int64_t queries;
    int64_t *shape;             /* rows of the tiles as they are configured */
} Tiled;

/* Attention by AMX, with keys and values in bfloat16, and queries and weights in two parts. A step over a page adds to
   each score or output on its own, so that any split of the pages gives the same bits. The weights of a page overwrite
   its scores: both parts together have their size. */
#if TILES
/* Tiles 0 to 3 are scores or outputs, 4 the queries, 5 keys, 6 and 7 weights and values. The second part of the queries
   is in tile 3 or 6, which has the shape for it. */
static void shape_attention(const Tiled *t, int64_t rows)
{
    if (*t->shape == rows) return;
    *t->shape = rows;
    int64_t depth = t->size % 32 ? 16 : 32;
    TileShapes s = {.palette = 1};
    for (int i = 0; i < 8; i++) s.bytes[i] = 64, s.rows[i] = (uint8_t)rows;
    s.bytes[4] = (uint16_t)(2 * depth), s.rows[5] = (uint8_t)(depth / 2);
    s.bytes[6] = 2 * PAGE, s.rows[7] = PAGE / 2;
    READ_BY_TILES(&s);
    _tile_loadconfig(&s);
}

#define SCORE_TILE(number)                                                   \
    if (pages > number) {                                                    \
        _tile_loadd(5, k[number] + d * PAGE, 4 * PAGE);                      \
        _tile_dpbf16ps(number, 4, 5);                                        \
        if (depth == 32) _tile_dpbf16ps(number, 3, 5);                       \
        else _tile_dpbf16ps(number, 6, 5);                                   \
    }
#define STORE_SCORES(number) if (pages > number) _tile_stored(number, scores + number * PAGE, 4 * STRIDE)
INLINE void score_tiles(int pages, int64_t depth, const half *q, const half *low, int64_t size, const half *const *k,
                        float *scores)
{
    READ_BY_TILES(q);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    for (int64_t d = 0; d < size; d += depth) {
        _tile_loadd(4, q + d, 2 * size);
        if (depth == 32) _tile_loadd(3, low + d, 2 * size);
        else _tile_loadd(6, low + d, 2 * size);
        SCORE_TILE(0) SCORE_TILE(1) SCORE_TILE(2)
    }
    STORE_SCORES(0);
    STORE_SCORES(1);
    STORE_SCORES(2);
}

static void narrow_scores(const Tiled *t, int64_t from, int64_t until, const int32_t *table, int64_t page, int64_t end,
                          int64_t base)
{
    const half *k[3];
    const Work *w = t->w;
    for (int64_t n; page < end; page += n) {
        n = smaller(3, end - page);
        for (int64_t j = 0; j < n; j++) k[j] = narrow_plane(w->m, w->p, table[page + j], w->index, t->head, 0);
        for (int64_t at = from; at < until; at += 16) {
            const half *q = t->narrow + at * t->size, *low = q + t->queries * t->size;
            float *to = t->scores + at * STRIDE + (page * PAGE - base);
            shape_attention(t, smaller(16, until - at));
#define SCORES(pages) \
    if (t->size % 32) score_tiles(pages, 16, q, low, t->size, k, to); else score_tiles(pages, 32, q, low, t->size, k, to)
            if (n == 3) SCORES(3);
            else if (n == 2) SCORES(2);
            else SCORES(1);
#undef SCORES
        }
    }
}

#define LOAD_OUTPUT(number) if (parts > number) _tile_loadd(number, out + 16 * number, 4 * size)
#define ADD_TILE(number)                                                     \
    if (parts > number) {                                                    \
        _tile_loadd(7, v + 32 * number, 4 * size);                           \
        _tile_dpbf16ps(number, 6, 7);                                        \
    }
#define STORE_OUTPUT(number) if (parts > number) _tile_stored(number, out + 16 * number, 4 * size)
INLINE void value_tiles(int parts, const Tiled *t, const half *weights, const int32_t *table, int64_t page, int64_t end,
                        int64_t d, float *out)
{
    const Work *w = t->w;
    int64_t size = t->size;
    READ_BY_TILES(out);
    LOAD_OUTPUT(0);
    LOAD_OUTPUT(1);
    LOAD_OUTPUT(2);
    LOAD_OUTPUT(3);
    for (; page < end; page++, weights += 2 * PAGE) {
        const half *v = narrow_plane(w->m, w->p, table[page], w->index, t->head, 1) + 2 * d;
        _tile_loadd(6, weights, 4 * STRIDE);
        ADD_TILE(0) ADD_TILE(1) ADD_TILE(2) ADD_TILE(3)
        _tile_loadd(6, weights + PAGE, 4 * STRIDE);
        ADD_TILE(0) ADD_TILE(1) ADD_TILE(2) ADD_TILE(3)
    }
    STORE_OUTPUT(0);
    STORE_OUTPUT(1);
    STORE_OUTPUT(2);
    STORE_OUTPUT(3);
}

static void narrow_values(const Tiled *t, int64_t from, int64_t until, const int32_t *table, int64_t page, int64_t end,
                          int64_t base)
{
    if (page >= end) return;
    for (int64_t at = from; at < until; at += 16) {
        shape_attention(t, smaller(16, until - at));
        const half *weights = (const half *)(t->scores + at * STRIDE + (page * PAGE - base));
        for (int64_t d = 0; d < t->size; d += 64) {
            float *out = t->out + at * t->size + d;
            int64_t parts = smaller(4, (t->size - d) / 16);
            if (parts == 4) value_tiles(4, t, weights, table, page, end, d, out);
            else if (parts == 3) value_tiles(3, t, weights, table, page, end, d, out);
            else if (parts == 2) value_tiles(2, t, weights, table, page, end, d, out);
            else value_tiles(1, t, weights, table, page, end, d, out);
        }
    }
}
#define IF_NARROW(call) if (t->narrow) { call; return; }
#else
#define IF_NARROW(call)
#endif

#define BY_QUERIES(from, until, call)                                                         \
    do {                                                                                      \
        int64_t at = (from), left;                                                            \
        if (QUERIES == 4)                                                                     \
            for (; at + 4 <= (until); at += 4) call(4);                                       \
        else                                                                                  \
            for (; at + 2 <= (until); at += 2) call(2);                                       \
        left = (until) - at;                                                                  \
        if (left == 3) call(3);                                                               \
        if (left == 2) call(2);                                                               \
        if (left == 1) call(1);                                                               \
    } while (0)

/* Scores of queries `from` to `until` - 1 with the keys of some pages, few enough to stay in the L1 cache. */
static void all_scores(const Tiled *t, int64_t from, int64_t until, const int32_t *table, int64_t page, int64_t end,
                       int64_t base)
{
    IF_NARROW(narrow_scores(t, from, until, table, page, end, base))
    const float *k[PAGES_AT_ONCE];
    const Work *w = t->w;
    for (int64_t n; page < end; page += n) {
        n = end - page >= PAGES_AT_ONCE ? PAGES_AT_ONCE : end - page >= 2 ? 2 : 1;
        for (int64_t j = 0; j < n; j++) k[j] = plane(w->m, w->p, table[page + j], w->index, t->head, 0);
        float *to = t->scores + (page * PAGE - base);
#define FOUR(queries) score_##queries##_4(t->q + at * t->size, t->size, k, to + at * STRIDE)
#define TWO(queries) score_##queries##_2(t->q + at * t->size, t->size, k, to + at * STRIDE)
#define ONE(queries) score_##queries##_1(t->q + at * t->size, t->size, k, to + at * STRIDE)
        if (n == PAGES_AT_ONCE) BY_QUERIES(from, until, FOUR);
        else if (n == 2) BY_QUERIES(from, until, TWO);
        else BY_QUERIES(from, until, ONE);
#undef FOUR
#undef TWO
#undef ONE
    }
}

/* Adds the weighted values of some pages to the outputs of queries `from` to `until` - 1. */
static void all_values(const Tiled *t, int64_t from, int64_t until, const int32_t *table, int64_t page, int64_t end,
                       int64_t base)
{
    IF_NARROW(narrow_values(t, from, until, table, page, end, base))
    const float *v[4], *part[4];
    const Work *w = t->w;
    for (int64_t n; page < end; page += n) {
        n = smaller(4, end - page);
        for (int64_t j = 0; j < n; j++) v[j] = plane(w->m, w->p, table[page + j], w->index, t->head, 1);
        const float *weights = t->scores + (page * PAGE - base);
        for (int64_t d = 0; d < t->size; d += 2 * LANES) {
            for (int64_t j = 0; j < n; j++) part[j] = v[j] + d;
#define WIDE(queries) add_##queries##_2(weights + at * STRIDE, part, n, t->size, t->out + at * 2 * t->size + d)
#define NARROW(queries) add_##queries##_1(weights + at * STRIDE, part, n, t->size, t->out + at * 2 * t->size + d)
            if (d + 2 * LANES <= t->size) BY_QUERIES(from, until, WIDE);
            else BY_QUERIES(from, until, NARROW);
#undef WIDE
#undef NARROW
        }
    }
}

/* Turns a query's scores for keys base to base + end - 1 into weights; keys outside [low, high) get 0. */
static void weigh(const Tiled *t, int64_t query, int64_t low, int64_t high, int64_t end, int is_first)
{
    float *s = t->scores + query * STRIDE;
    ivec lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    if (high <= low) {
        for (int64_t i = 0; i < end; i += LANES) store(s + i, all(0.0f));
        return;
    }
    vec best = all(-INFINITY);
    for (int64_t i = 0; i < end; i += LANES) {
        vec x = load(s + i);
        if (i < low || i + LANES > high) {
            ivec at = lane + (int32_t)i;
            x = where((at >= (int32_t)low) & (at < (int32_t)high), x, all(-INFINITY));
            store(s + i, x);
        }
        best = larger(x, best);
    }
    float top = largest(best), before = t->top[query];
    if (!is_first && before > top) top = before;
    vec total = all(0.0f), by = all(top);
    for (int64_t i = 0; i < end; i += LANES) {
        vec e = vexp(load(s + i) - by);
        if (t->narrow) put_split((half *)(s + i), (half *)(s + i) + PAGE, e);
        else store(s + i, e);
        total += e;
    }
    float keep = is_first || before == -INFINITY ? 0.0f : exp1(before - top);
    t->total[query] = t->total[query] * keep + sum(total);
    t->top[query] = top;
    if (!is_first && keep != 1.0f)
        for (int64_t d = 0, outs = t->size * (t->narrow ? 1 : 2); d < outs; d += LANES) {
            float *out = t->out + query * outs + d;
            store(out, load(out) * all(keep));
        }
}

/* Prefetches the keys or values of the next pages, because a page is too short for the hardware prefetcher. */
static void fetch(const Work *w, const int32_t *table, int64_t page, int64_t end, int64_t head, int value)
{
    for (; page < end; page++) {
        int bytes = narrow(w->m) ? sizeof(half) : sizeof(float);
        const char *at = plane_of(w->m, w->p, table[page], w->index, head, value, bytes);
        for (int64_t i = 0; i < PAGE * w->m->head_size * bytes; i += 64) __builtin_prefetch(at + i);
    }
}

static void attend_tile(const Work *w, const Tile *tile, int64_t head, float *scratch, int64_t *shape)
{
    const Model *m = w->m;
    const Pass *p = w->p;
    int64_t size = m->head_size, group = m->heads / m->kv_heads, queries = tile->rows * group, window = w->layer->window;
    Tiled made = {w, head, group, size, scratch, scratch + queries * size, NULL, NULL, NULL, NULL, queries, shape}, *t = &made;
    t->out = t->scores + queries * STRIDE;
    t->top = t->out + queries * 2 * size;
    t->total = t->top + queries;
    int is_narrow = narrow(m);
    if (is_narrow) t->narrow = (half *)t->q; /* these are never needed as floats */
    const Piece *pieces = w->pieces + tile->piece;
    int64_t lowest = INT64_MAX, pages = 0, query = 0;
    for (int64_t i = 0; i < tile->pieces; i++) {
        pages = greater(pages, pieces[i].pages);
        for (int64_t r = 0; r < pieces[i].rows; r++) {
            int64_t row = pieces[i].row + r;
            lowest = smaller(lowest, window ? greater(0, p->positions[row] + 1 - window) : 0);
            const float *from = w->q + (row * m->heads + head * group) * size;
            for (int64_t d = 0; d < group * size; d += LANES) {
                vec scaled = load(from + d) * all(w->layer->scale);
                half *to = t->narrow + query * size + d;
                if (is_narrow) put_split(to, to + queries * size, scaled);
                else store(t->q + query * size + d, scaled);
            }
            query += group;
        }
    }
    memset(t->out, 0, (size_t)(queries * 2 * size) * sizeof(float));
    for (int64_t q = 0; q < queries; q++) t->top[q] = -INFINITY, t->total[q] = 0.0f;
    int64_t first = lowest / SPAN * SPAN;
    for (int64_t base = first; base < pages * PAGE; base += SPAN) {
        int64_t start = greater(base, lowest) / PAGE, end = base / PAGE + SPAN / PAGE;
        int64_t common = smaller(tile->shared, end);
        const int32_t *table = table_of(p, pieces[0].row);
        if (common > start) all_scores(t, 0, queries, table, start, common, base);
        query = 0;
        for (int64_t i = 0; i < tile->pieces; i++) {
            const Piece *piece = pieces + i;
            int64_t last = smaller(piece->pages, end), own = greater(start, common), until = query + piece->rows * group;
            if (until - query <= FEW) {
                if (i + 1 < tile->pieces)
                    fetch(w, table_of(p, piece[1].row), own, smaller(piece[1].pages, end), head, 0);
                fetch(w, table_of(p, piece->row), own, last, head, 1);
            }
            if (last > own) all_scores(t, query, until, table_of(p, piece->row), own, last, base);
            for (int64_t q = query; q < until; q++) {
                int64_t position = p->positions[piece->row + (q - query) / group];
                int64_t low = greater(0, (window ? position + 1 - window : 0) - base);
                low = greater(low, start * PAGE - base);
                int64_t high = smaller(SPAN, position + 1 - base), stop = greater(last, common) * PAGE - base;
                if (stop > 0) weigh(t, q, low, smaller(high, stop), stop, base == first);
            }
            query = until;
        }
        if (common > start) all_values(t, 0, queries, table, start, common, base);
        query = 0;
        for (int64_t i = 0; i < tile->pieces; i++) {
            const Piece *piece = pieces + i;
            int64_t last = smaller(piece->pages, end), own = greater(start, common), until = query + piece->rows * group;
            all_values(t, query, until, table_of(p, piece->row), own, last, base);
            query = until;
        }
    }
    query = 0;
    for (int64_t i = 0; i < tile->pieces; i++)
        for (int64_t r = 0; r < pieces[i].rows; r++)
            for (int64_t g = 0; g < group; g++, query++) {
                int64_t to = ((pieces[i].row + r) * m->heads + head * group + g) * size;
                const float *from = t->out + query * (is_narrow ? 1 : 2) * size;
                vec by = all(1.0f / t->total[query]);
                for (int64_t d = 0; d < size; d += LANES) {
                    vec found = load(from + d);
                    if (!is_narrow) found += load(from + size + d);
                    put(w->q + to + d, w->q_rounded ? w->q_rounded + to + d : NULL, found * by);
                }
            }
}

static void attend(void *arg, int64_t index, int64_t count)
{
    Work *w = arg;
    float *scratch = w->scratch + index * w->scratch_size;
    int64_t items = w->num_tiles * w->m->kv_heads, shape = 0;
    (void)count;
    for (int64_t i; (i = atomic_fetch_add(&w->next, 1)) < items;)
        attend_tile(w, w->tiles + i / w->m->kv_heads, i % w->m->kv_heads, scratch, &shape);
#if TILES
    if (shape) _tile_release();
#endif
}

/* ---- the rest of a layer; each function computes one thread's share of the current tile of rows */

/* The range of share `index` of `total`, in units of `unit`. */
INLINE int64_t part(int64_t total, int64_t unit, int64_t index, int64_t count)
{
    int64_t units = (total + unit - 1) / unit;
    return smaller(total, units * index / count * unit);
}
#define SHARE(first, last, total, unit) \
    int64_t first = part(total, unit, index, count), last = part(total, unit, index + 1, count)

/* Writes the normed rows of this share to `x`. */
INLINE void norm_rows(const Work *w, const float *weight, float eps, int64_t first, int64_t last)
{
    int64_t width = w->m->width;
    for (int64_t r = first; r < last; r++) {
        float *x = w->x + r * width;
        normed(w->h + (w->row + r) * width, weight, eps, width, x);
        if (w->x_rounded)
            for (int64_t i = 0; i < width; i += LANES) put(NULL, w->x_rounded + r * width + i, load(x + i));
    }
}

static void norm_input(void *arg, int64_t index, int64_t count)
{
    Work *w = arg;
    SHARE(first, last, w->tile_rows, 1);
    norm_rows(w, w->layer->input_norm, w->layer->input_eps, first, last);
}

static void norm_mlp(void *arg, int64_t index, int64_t count)
{
    Work *w = arg;
    SHARE(first, last, w->tile_rows, 1);
    norm_rows(w, w->layer->mlp_norm, w->layer->mlp_eps, first, last);
}

/* Columns first to last - 1 of a layer's product, for the current tile of rows. */
INLINE void multiply(const Work *w, const float *x, const half *rounded, const void *weight, const float *bias,
                     int64_t k_end, float *y, int64_t ldy, int64_t first, int64_t last, int adds)
{
    product(x, rounded, NULL, k_end, weight, w->m->halves != 0, bias, k_end, y, ldy, w->tile_rows, first, last, adds);
}

static void project_heads(void *arg, int64_t index, int64_t count)
{
    Work *w = arg;
    const Model *m = w->m;
    const Layer *l = w->layer;
    int64_t width = m->width, heads = m->heads * m->head_size, kv = m->kv_heads * m->head_size;
    float *q = w->q + w->row * heads;
    SHARE(qs, qe, heads, PANEL);
    multiply(w, w->x, w->x_rounded, l->q, l->q_bias, width, q, heads, qs, qe, 0);
    SHARE(ks, ke, kv, PANEL);
    multiply(w, w->x, w->x_rounded, l->k, l->k_bias, width, w->kv, 2 * kv, ks, ke, 0);
    multiply(w, w->x, w->x_rounded, l->v, l->v_bias, width, w->kv + kv, 2 * kv, ks, ke, 0);
}

/* x * cos + rotate_half(x) * sin */
INLINE void rotated(float *x, const float *cos, const float *sin, int64_t half)
{
    for (int64_t i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cos[i] - b * sin[i];
        x[i + half] = b * cos[i] + a * sin[i];
    }
}

/* Writes one token's keys and values to a page, rounded to bfloat16. */
INLINE void write_narrow(const Model *m, const Pass *p, int32_t page, int64_t layer, int64_t head, int64_t within,
                         const float *k, const float *v)
{
    half *keys = narrow_plane(m, p, page, layer, head, 0) + 2 * within, rounded[LANES];
    half *values = narrow_plane(m, p, page, layer, head, 1) + within / 2 * 2 * m->head_size + within % 2;
    for (int64_t d = 0; d < m->head_size; d += LANES) {
        put(NULL, rounded, load(k + d));
        for (int i = 0; i < LANES; i += 2) memcpy(keys + (d + i) * PAGE, rounded + i, 2 * sizeof(half));
        put(NULL, rounded, load(v + d));
        for (int i = 0; i < LANES; i++) values[2 * (d + i)] = rounded[i];
    }
}

static void rotate_and_write(void *arg, int64_t index, int64_t count)
{
    Work *w = arg;
    const Model *m = w->m;
    const Pass *p = w->p;
    const Layer *l = w->layer;
    int64_t size = m->head_size, half = size / 2, kv = m->kv_heads * size;
    int is_narrow = narrow(m);
    SHARE(first, last, w->tile_rows, 1);
    for (int64_t r = first; r < last; r++) {
        int64_t row = w->row + r, position = p->positions[row], within = position % PAGE;
        const float *cos = m->cos + position * half, *sin = m->sin + position * half;
        int32_t page = table_of(p, row)[position / PAGE];
        for (int64_t head = 0; head < m->heads; head++) {
            float *q = w->q + (row * m->heads + head) * size;
            if (l->q_norm) normed(q, l->q_norm, l->q_eps, size, q);
            rotated(q, cos, sin, half);
        }
        for (int64_t head = 0; head < m->kv_heads; head++) {
            float *k = w->kv + r * 2 * kv + head * size;
            if (l->k_norm) normed(k, l->k_norm, l->k_eps, size, k);
            rotated(k, cos, sin, half);
            if (is_narrow) {
                write_narrow(m, p, page, w->index, head, within, k, k + kv);
                continue;
            }
            float *keys = plane(m, p, page, w->index, head, 0) + within;
            for (int64_t d = 0; d < size; d++) keys[d * PAGE] = k[d];
            memcpy(plane(m, p, page, w->index, head, 1) + within * size, k + kv, (size_t)size * sizeof(float));
        }
    }
}

static void add_attended(void *arg, int64_t index, int64_t count)
{
    Work *w = arg;
    const Model *m = w->m;
    int64_t width = m->width, heads = m->heads * m->head_size, at = w->row * heads;
    SHARE(first, last, width, PANEL);
    multiply(w, w->q + at, w->q_rounded ? w->q_rounded + at : NULL, w->layer->o, w->layer->o_bias, heads,
             w->h + w->row * width, width, first, last, 1);
}

static void gate_and_up(void *arg, int64_t index, int64_t count)
{
    Work *w = arg;
    const Layer *l = w->layer;
    int64_t width = w->m->width, inner = w->m->inner;
    SHARE(first, last, inner, PANEL);
    multiply(w, w->x, w->x_rounded, l->gate, l->gate_bias, width, w->gate, inner, first, last, 0);
    multiply(w, w->x, w->x_rounded, l->up, l->up_bias, width, w->up, inner, first, last, 0);
    for (int64_t r = 0; r < w->tile_rows; r++) /* silu(gate) * up */
        for (int64_t i = first; i < last; i += LANES) {
            int64_t at = r * inner + i;
            vec g = load(w->gate + at), e = vexp(larger(all(-88.0f), g) * all(-1.0f));
            put(w->gate + at, w->gate_rounded ? w->gate_rounded + at : NULL,
                g / (all(1.0f) + e) * load(w->up + at));
        }
}

static void add_mlp(void *arg, int64_t index, int64_t count)
{
    Work *w = arg;
    int64_t width = w->m->width, inner = w->m->inner;
    SHARE(first, last, width, PANEL);
    multiply(w, w->gate, w->gate_rounded, w->layer->down, w->layer->down_bias, inner, w->h + w->row * width, width,
             first, last, 1);
}

/* Number of rows of a tile of products, so that intermediate results stay in the L2 cache. */
static int64_t tile_rows(const Model *m, int64_t rows)
{
    int64_t floats = m->width + 2 * m->inner + 2 * m->kv_heads * m->head_size;
    int64_t most = smaller(256, greater(96, 131072 / floats)), tiles = (rows + most - 1) / most;
    return (rows + tiles - 1) / tiles;
}

static int64_t attention_floats(const Model *m)
{
    int64_t group = m->heads / m->kv_heads, queries = greater(MOST_QUERIES, group);
    return ROUND(queries * (3 * m->head_size + STRIDE + 2));
}

/* Working memory, in floats, for a pass of this many rows. */
int64_t verbatim_workspace(const Model *m, int64_t rows, int64_t threads)
{
    int64_t tile = tile_rows(m, rows), rounded = rows * m->heads * m->head_size + tile * (m->width + m->inner);
    return 64 + ROUND(rows * m->width) + ROUND(rows * m->heads * m->head_size) + (m->halves ? ROUND(rounded / 2) : 0) +
           ROUND(tile * 2 * m->kv_heads * m->head_size) + ROUND(tile * m->width) + 2 * ROUND(tile * m->inner) +
           threads * attention_floats(m) + 2 * rows * (int64_t)(2 * sizeof(Piece) + sizeof(Tile)) / 4;
}

/* Zeros a page that a sequence begins to fill, because old contents may be NaN, and 0 * NaN is NaN despite the mask. */
static void empty_new_pages(const Model *m, const Pass *p)
{
    int bytes = narrow(m) ? sizeof(half) : sizeof(float);
    for (int64_t row = 0; row < p->rows; row++) {
        if (p->positions[row] % PAGE) continue;
        int32_t page = table_of(p, row)[p->positions[row] / PAGE];
        for (int64_t n = 0; n < m->layers * m->kv_heads * 2; n++)
            memset(plane_of(m, p, page, 0, 0, 0, bytes) + (n << p->chunk_bits) * PAGE * m->head_size * bytes, 0,
                   (size_t)(PAGE * m->head_size * bytes));
    }
}

static void embed(const Model *m, int64_t id, float *to)
{
    if (m->halves)
        for (int64_t i = 0; i < m->width; i++) to[i] = widened(((const half *)m->embedding)[id * m->width + i]);
    else memcpy(to, (const float *)m->embedding + id * m->width, (size_t)m->width * sizeof(float));
}

/* Runs a pass. Writes the keys and values of all rows, and to `out` the final-norm hidden states of `out_rows`. */
void verbatim_forward(const Model *m, const Pass *p, float *workspace)
{
    int64_t tile = tile_rows(m, p->rows), width = m->width;
    Work made = {.m = m, .p = p}, *w = &made;
    float *next = workspace;
#define TAKE(n) (next += ROUND(n), next - ROUND(n))
    w->h = TAKE(p->rows * width);
    w->q = TAKE(p->rows * m->heads * m->head_size);
    w->kv = TAKE(tile * 2 * m->kv_heads * m->head_size);
    w->x = TAKE(tile * width);
    w->gate = TAKE(tile * m->inner);
    w->up = TAKE(tile * m->inner);
    w->scratch_size = attention_floats(m);
    w->scratch = TAKE(p->threads * w->scratch_size);
    if (DOTS && m->halves) {
        w->q_rounded = (half *)next;
        w->x_rounded = w->q_rounded + p->rows * m->heads * m->head_size;
        w->gate_rounded = w->x_rounded + tile * width;
        (void)TAKE((p->rows * m->heads * m->head_size + tile * (width + m->inner)) / 2);
    }
#undef TAKE
    w->pieces = (Piece *)next;
    w->spare = w->pieces + p->rows;
    w->tiles = (Tile *)(w->spare + p->rows);
    plan_tiles(w);
    empty_new_pages(m, p);
    if (p->given) memcpy(w->h, p->given, (size_t)(p->rows * width) * sizeof(float));
    else for (int64_t row = 0; row < p->rows; row++) embed(m, p->ids[row], w->h + row * width);
    for (w->index = 0; w->index < m->layers; w->index++) {
        w->layer = m->layer + w->index;
        for (w->row = 0; w->row < p->rows; w->row += tile) {
            w->tile_rows = smaller(tile, p->rows - w->row);
            run(p->threads, norm_input, w);
            run(p->threads, project_heads, w);
            run(p->threads, rotate_and_write, w);
        }
        atomic_store(&w->next, 0);
        run(p->threads, attend, w);
        for (w->row = 0; w->row < p->rows; w->row += tile) {
            w->tile_rows = smaller(tile, p->rows - w->row);
            run(p->threads, add_attended, w);
            run(p->threads, norm_mlp, w);
            run(p->threads, gate_and_up, w);
            run(p->threads, add_mlp, w);
        }
    }
    for (int64_t i = 0; i < p->outs; i++) {
        const float *h = w->h + p->out_rows[i] * width;
        if (m->norm) normed(h, m->norm, m->eps, width, p->out + i * width);
        else memcpy(p->out + i * width, h, (size_t)width * sizeof(float));
    }
}

/* ---- output head and sampling */

typedef struct {
    const Model *m;
    int64_t rows;
    const float *hidden;        /* [rows, W] */
    const float *temperatures;  /* [rows]; 0 = the most likely token */
    const double *uniforms;     /* [rows], in (0, 1) */
    int64_t stride;             /* at least V, a multiple of 16 */
    float *logits;              /* [rows, stride]: written by the output head, read by sampling */
    int64_t *tokens;
    float *logprobs;            /* NaN where logits are not finite */
    int64_t threads;
    const int64_t *top_k;       /* [rows], 0 = off; NULL = no row is truncated */
    const float *top_p, *min_p; /* [rows], 1 and 0 = off */
    float *scratch;             /* [threads][stride], if rows are truncated */
    int32_t *kept;              /* [rows, stride]: kept set of each row, ascending ids; NULL = not requested */
    int64_t *num_kept;          /* [rows], 0 = not truncated */
    half *rounded;              /* working memory [2, rows, W] if the CPU multiplies tiles of bfloat16, else NULL */
} Draw;

static void head(void *arg, int64_t index, int64_t count)
{
    Draw *d = arg;
    /* Panels are narrower than 16 if vectors have 4 numbers. No panel is packed behind the one with the last token. */
    SHARE(first, last, smaller(ROUND(d->m->vocab), verbatim_packed(d->m->vocab, 1)), PANEL);
    int64_t most = greater(48, 98304 / d->m->width); /* rows of hidden states that fit the L2 cache */
    for (int64_t t = 0; t < d->rows; t += most) {
        const half *rounded = d->rounded ? d->rounded + t * d->m->width : NULL;
        product(d->hidden + t * d->m->width, rounded, rounded ? rounded + d->rows * d->m->width : NULL, d->m->width,
                d->m->head, d->m->halves != 0, NULL, d->m->width, d->logits + t * d->stride, d->stride,
                smaller(most, d->rows - t), first, last, 0);
    }
}

/* The largest number whose weight, plus the weights of all larger numbers, reaches `target`; the smallest if none
   does. The weight of a number a is exp(a - top) (`by_mass`) or 1. Uses quickselect, which reorders the numbers. */
static float heavy(float *a, int64_t n, double target, float top, int by_mass)
{
    double above = 0.0;
    float least = top;
    while (n > 0) {
        float x = a[0], y = a[n / 2], z = a[n - 1];
        float pivot = x < y ? (y < z ? y : x < z ? z : x) : (x < z ? x : y < z ? z : y);
        double more = 0.0, same = 0.0;
        int64_t larger_end = 0, i = 0, end = n;
        while (i < end) {
            float v = a[i];
            double weight = by_mass ? (double)expf(v - top) : 1.0;
            if (v > pivot) {
                a[i++] = a[larger_end], a[larger_end++] = v;
                more += weight;
            } else if (v < pivot) {
                a[i] = a[--end], a[end] = v;
            } else {
                same += weight;
                i++;
            }
        }
        if (larger_end > 0 && above + more >= target) {
            n = larger_end;
            continue;
        }
        least = pivot;
        above += more + same;
        if (above >= target) break;
        a += end, n -= end;
    }
    return least;
}

static double weight_from(const float *x, int64_t end, float low, float top, int by_mass)
{
    if (!by_mass) {
        int64_t count = 0;
        for (int64_t i = 0; i < end; i++) count += x[i] >= low;
        return (double)count;
    }
    double total = 0.0;
    for (int64_t i = 0; i < end; i += 16) {
        vec sixteen = all(0.0f);
        for (int64_t j = i; j < i + 16; j += LANES) {
            vec some = load(x + j);
            sixteen += (vec)((ivec)vexp(some - all(top)) & (ivec)(some >= all(low)));
        }
        total += (double)sum(sixteen);
    }
    return total;
}

/* `heavy` over a row. Selects only among the few largest numbers if these suffice. */
static float heavy_in_row(const float *x, int64_t end, double target, float top, int by_mass, float *scratch)
{
    float low = top - 2.0f;
    while (low > -INFINITY && weight_from(x, end, low, top, by_mass) < target) low = top + 2.0f * (low - top);
    int64_t n = 0;
    for (int64_t i = 0; i < end; i++) {
        scratch[n] = x[i];
        n += x[i] >= low;
    }
    return heavy(scratch, n, target, top, by_mass);
}

/* The smallest logit of a row that is kept by top-k, then top-p of the rest, then min-p. Equal logits stay together. */
static float edge(const Draw *d, int64_t row, const float *x, int64_t end, float top, float *scratch)
{
    float least = -INFINITY, share = d->min_p[row];
    if (d->top_k[row] > 0 && d->top_k[row] < d->m->vocab)
        least = heavy_in_row(x, end, (double)d->top_k[row], top, 0, scratch);
    if (d->top_p[row] < 1.0f) {
        double target = d->top_p[row] * weight_from(x, end, least, top, 1);
        float nucleus = heavy_in_row(x, end, target, top, 1, scratch);
        least = nucleus > least ? nucleus : least;
    }
    if (share > 0.0f && top + logf(share) > least) least = top + logf(share);
    return least;
}

/* Masks the logits of a row that are below the edge. Returns how many logits are left, and writes their ids, ascending,
   to `kept` unless that is NULL. */
static int64_t cut(float *x, int64_t vocab, float least, int32_t *kept)
{
    int64_t n = 0, end = ROUND(vocab);
    for (int64_t i = 0, next; i < end; i = next) {
        vec best = all(-INFINITY);
        next = smaller(i + 128, end);
        for (int64_t j = i; j < next; j += LANES) {
            vec some = load(x + j);
            best = larger(some, best);
            store(x + j, where(some >= all(least), some, all(-INFINITY)));
        }
        if (kept == NULL || largest(best) < least) continue;
        for (int64_t j = i; j < smaller(next, vocab); j++) {
            kept[n] = (int32_t)j;
            n += x[j] >= least;
        }
    }
    return n;
}

/* Inverse CDF: takes the first token whose cumulative probability exceeds the row's uniform number. */
static void draw_row(const Draw *d, int64_t row, float *scratch)
{
    int64_t vocab = d->m->vocab, end = ROUND(vocab);
    float *x = d->logits + row * d->stride, temperature = d->temperatures[row];
    int is_greedy = temperature == 0.0f;
    if (d->kept != NULL) d->num_kept[row] = 0;
    for (int64_t i = vocab; i < end; i++) x[i] = -INFINITY;
    vec by = all(is_greedy ? 1.0f : temperature), best = all(-INFINITY), odd = all(0.0f);
    for (int64_t i = 0; i < end; i += LANES) {
        vec scaled = load(x + i) / by;
        if (i + LANES <= vocab) odd += scaled * all(0.0f);
        else for (int64_t j = i; j < vocab; j++) odd[0] += x[j] * 0.0f;
        store(x + i, scaled);
        best = larger(scaled, best);
    }
    float top = largest(best);
    if (sum(odd) != 0.0f) { /* 0 * infinity and 0 * NaN are NaN */
        d->tokens[row] = 0, d->logprobs[row] = NAN;
        return;
    }
    if (is_greedy) {
        int64_t token = 0;
        while (x[token] != top) token++;
        d->tokens[row] = token, d->logprobs[row] = 0.0f;
        return;
    }
    if (d->top_k != NULL) {
        int32_t *kept = d->kept == NULL ? NULL : d->kept + row * d->stride;
        float least = edge(d, row, x, end, top, scratch);
        int64_t n = least > -INFINITY ? cut(x, vocab, least, kept) : vocab;
        if (kept != NULL) d->num_kept[row] = n == vocab ? 0 : n;
    }
    double total = 0.0;
    for (int64_t i = 0; i < end; i += 16) {
        vec sixteen = all(0.0f);
        for (int64_t j = i; j < i + 16; j += LANES) {
            vec e = vexp(load(x + j) - all(top));
            sixteen += e;
        }
        total += (double)sum(sixteen);
    }
    double target = d->uniforms[row] * total, before = 0.0;
    int64_t token = -1, last = 0;
    for (int64_t i = 0; i < end && token < 0; i += 16) {
        float e[16];
        vec sixteen = all(0.0f);
        for (int j = 0; j < 16; j += LANES) {
            vec some = vexp(load(x + i + j) - all(top));
            store(e + j, some);
            sixteen += some;
        }
        double after = before + (double)sum(sixteen);
        if (after > target) {
            double cumulative = before;
            for (int j = 0; j < 16; j++) {
                cumulative += (double)e[j];
                if (e[j] > 0.0f) last = i + j;
                if (cumulative > target) break;
            }
            token = last;
        } else if (after > before)
            for (int j = 0; j < 16; j++)
                if (e[j] > 0.0f) last = i + j;
        before = after;
    }
    d->tokens[row] = token < 0 ? last : token;
    double logprob = (double)(x[d->tokens[row]] - top) - log(total);
    d->logprobs[row] = (float)(logprob > 0.0 ? 0.0 : logprob);
}

static void draw_rows(void *arg, int64_t index, int64_t count)
{
    Draw *d = arg;
    SHARE(first, last, d->rows, 1);
    for (int64_t row = first; row < last; row++) draw_row(d, row, d->scratch + index * d->stride);
}

/* Writes x in two parts: rounded to bfloat16, and the rest, rounded too. */
static void split(const float *x, int64_t count, half *rounded, half *low)
{
    for (int64_t i = 0; i < count; i += LANES) put_split(rounded + i, low + i, load(x + i));
}

/* Computes the logits of all rows. */
void verbatim_logits(Draw *d)
{
    int64_t count = d->rows * d->m->width;
    if (d->rounded) split(d->hidden, count, d->rounded, d->rounded + count);
    run(d->threads, head, d);
}

/* Samples a token, with its logprob, from the logits of each row. For truncated rows, also writes the kept set. */
void verbatim_draw(Draw *d) { run(d->threads, draw_rows, d); }
