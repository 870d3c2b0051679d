/* Heads on processors, in one pass over memory: what `attnforge.native` compiles with the machine's C compiler.

   Each function computes what a certified head computes, with as many roundings at most (docs/theory/anchor.md, A8, and
   docs/theory/rounding.md, R9). Products and sums may be fused; nothing else is rearranged (no -ffast-math). Inputs and
   outputs are float, or bfloat16 that is worked on in float and rounded once. Vectors are those of GCC and Clang, as
   wide as the machine's. Elements are shared among threads of OpenMP; a call with one thread starts none. */

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define BYTES 64
#elif defined(__AVX2__)
#define BYTES 32
#else
#define BYTES 16
#endif
#define WIDE ((int)(BYTES / sizeof(float)))
#define INLINE static inline __attribute__((always_inline))
#define BLOCK 8192 /* elements a thread takes at once: they stay in its first cache */
#define DEEPEST 65 /* coefficients of a polynomial: tables of 129 anchors */
#define LANES 64   /* partial sums of a row: attnforge.native.norm.roundings counts on it */

typedef float V __attribute__((vector_size(BYTES)));
typedef int32_t I __attribute__((vector_size(BYTES)));
typedef uint32_t U __attribute__((vector_size(BYTES)));
typedef uint16_t H __attribute__((vector_size(BYTES / 2)));

INLINE V all(float x) { return x - (V){}; }
INLINE V either(I mask, V yes, V no) { return (V)((mask & (I)yes) | (~mask & (I)no)); }
INLINE V size_of(V x) { return (V)((I)x & 0x7fffffff); }

INLINE V load(const float *p) { V v; memcpy(&v, p, sizeof v); return v; }
INLINE void store(float *p, V v) { memcpy(p, &v, sizeof v); }

INLINE V widened(const uint16_t *p) {
  H h; memcpy(&h, p, sizeof h);
  return (V)(__builtin_convertvector(h, U) << 16);
}
/* to the nearest, ties to even; NaN stays one */
INLINE void halved(uint16_t *p, V v) {
  U u = (U)v, r = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  I nan = v != v;
  r = (r & ~(U)nan) | ((U)nan & 0x7fc0);
  H h = __builtin_convertvector(r, H);
  memcpy(p, &h, sizeof h);
}

/* e^x for x <= 88 within 3 u (R9); 0 below the logarithm of the smallest normal number */
INLINE V expo(V x) {
  const V magic = all(0x1.8p23f);
  V t = x * 0x1.715476p+0f + magic, n = t - magic;
  V r = x - n * 0x1.62e4p-1f; /* 15 bits: the product is exact */
  r = r - n * 0x1.7f7d1cp-20f;
  V p = r * 0x1.6850e4p-10f + 0x1.123bccp-7f;
  p = p * r + 0x1.555b98p-5f;
  p = p * r + 0x1.55548ep-3f;
  p = p * r + 0x1.fffff8p-2f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  I power = ((I)t - (I)magic + 127) << 23;
  V out = p * (V)power;
  return (V)((I)out & ~(x < -87.3366f));
}

void attnforge_exp(const float *x, float *out, long n) {
  for (long i = 0; i + WIDE <= n; i += WIDE) store(out + i, expo(load(x + i)));
}

/* ---- anchors on an even lattice, and a gate (A8) ---- */

typedef struct {
  float rate, centre, gate, low, high;
  int terms, odd, whole, shared, gated;
  const float *total, *even, *tilted; /* of Q, P and R, lowest power first */
} Table;

/* two vectors at once: their polynomials wait for one another's products */
INLINE void activated(const Table *t, const V x[2], V out[2]) {
  V q[2] = {{0}}, s[2] = {{0}}, below[2] = {{0}}, above[2] = {{0}}, at[2];
  for (int k = 0; k < 2; k++) {
    at[k] = x[k] - t->centre;
    if (t->terms) {
      q[k] = expo(size_of(at[k]) * -t->rate);
      s[k] = q[k] / (q[k] * q[k] + 1.0f);
    }
  }
  if (t->terms) {
    int last = t->terms - 1;
    for (int k = 0; k < 2; k++) below[k] = all(t->total[last]), above[k] = all(t->even[last]);
    for (int j = last - 1; j >= 0; j--) {
      float c = t->total[j], d = t->even[j];
      for (int k = 0; k < 2; k++) below[k] = below[k] * s[k] + c, above[k] = above[k] * s[k] + d;
    }
    if (t->odd) {
      V side[2];
      for (int k = 0; k < 2; k++) side[k] = all(t->tilted[last]);
      for (int j = last - 1; j >= 0; j--)
        for (int k = 0; k < 2; k++) side[k] = side[k] * s[k] + t->tilted[j];
      for (int k = 0; k < 2; k++) {
        V p = t->whole ? q[k] * q[k] : q[k];
        V tilt = (1.0f - p) / (1.0f + p);
        above[k] = above[k] + side[k] * (V)((I)tilt | ((I)at[k] & ~0x7fffffff));
      }
    }
  }
  for (int k = 0; k < 2; k++) {
    if (t->gated) {
      V size = size_of(x[k]), p = t->shared ? q[k] : expo(size * -t->gate), both = p + 1.0f, fall = size * p;
      V rest = t->terms ? (above[k] * both - fall * below[k]) / (below[k] * both) : -fall / both;
      out[k] = either(x[k] < 0.0f, all(0.0f), x[k]) + rest;
    } else {
      out[k] = above[k] / below[k];
    }
  }
}

INLINE long beyond(const float *x, long n, float low, float high) {
  long count = 0;
  for (long i = 0; i < n; i++) count += !((x[i] >= low) & (x[i] <= high));
  return count;
}

INLINE long activation(const Table *t, const void *y, void *out, long n, int half, int watched) {
  I count = {0};
  long done = 0;
  for (; done + 2 * WIDE <= n; done += 2 * WIDE) {
    V x[2], r[2];
    for (int k = 0; k < 2; k++)
      x[k] = half ? widened((const uint16_t *)y + done + k * WIDE) : load((const float *)y + done + k * WIDE);
    activated(t, x, r);
    for (int k = 0; k < 2; k++) {
      if (watched) count -= ~((x[k] >= t->low) & (x[k] <= t->high));
      if (half) halved((uint16_t *)out + done + k * WIDE, r[k]);
      else store((float *)out + done + k * WIDE, r[k]);
    }
  }
  long left = n - done, found = 0;
  for (int i = 0; i < WIDE; i++) found += count[i];
  if (left > 0) {
    float rest[2 * WIDE] = {0}, made[2 * WIDE];
    V x[2], r[2];
    for (long i = 0; i < left; i++) {
      if (half) {
        uint32_t bits = (uint32_t)((const uint16_t *)y)[done + i] << 16;
        memcpy(rest + i, &bits, 4);
      } else rest[i] = ((const float *)y)[done + i];
    }
    x[0] = load(rest), x[1] = load(rest + WIDE);
    activated(t, x, r);
    if (half) {
      uint16_t short_[2 * WIDE];
      halved(short_, r[0]), halved(short_ + WIDE, r[1]);
      memcpy((uint16_t *)out + done, short_, left * 2);
    } else {
      store(made, r[0]), store(made + WIDE, r[1]);
      memcpy((float *)out + done, made, left * 4);
    }
    if (watched) found += beyond(rest, left, t->low, t->high);
  }
  return found;
}

/* numbers: [rate, centre, gate, Q, P, R]; without `outside` nothing is counted */
void attnforge_activation(const void *y, void *out, long n, int half, const float *numbers, int terms, int odd,
                          int whole, int shared, int gated, float low, float high, int64_t *outside, int threads) {
  if (terms > DEEPEST) return;
  float kept[3 * DEEPEST]; /* what is written to may lie beside the numbers */
  memcpy(kept, numbers + 3, (odd ? 3 : 2) * terms * sizeof(float));
  Table t = {numbers[0], numbers[1], numbers[2], low, high, terms, odd, whole, shared, gated,
             kept, kept + terms, kept + 2 * terms};
  long found = 0, blocks = (n + BLOCK - 1) / BLOCK, width = half ? 2 : 4;
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(+ : found) schedule(static)
  for (long b = 0; b < blocks; b++) {
    long start = b * BLOCK, count = n - start < BLOCK ? n - start : BLOCK;
    const char *from = (const char *)y + start * width;
    char *to = (char *)out + start * width;
    found += half ? activation(&t, from, to, count, 1, outside != 0) : activation(&t, from, to, count, 0, outside != 0);
  }
  if (outside) *outside += found;
}

/* ---- norms (G1) ---- */

typedef struct {
  const float *weight, *bias, *scale, *shift, *mix;
  long channels, heads;
  int unit, layer;
  float low, high, far;
} Norm;

/* the sum of x, or of its squares: LANES sums side by side, then a tree */
INLINE float summed(const float *x, long n, int squared) {
  V part[LANES / WIDE];
  for (int k = 0; k < LANES / WIDE; k++) part[k] = all(0.0f);
  for (long i = 0; i < n; i += LANES)
    for (int k = 0; k < LANES / WIDE; k++) {
      V v = load(x + i + k * WIDE);
      part[k] = squared ? part[k] + v * v : part[k] + v;
    }
  float lanes[LANES];
  for (int k = 0; k < LANES / WIDE; k++) store(lanes + k * WIDE, part[k]);
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
  return lanes[0];
}

/* c = x - mean, and 0 from n on */
INLINE void moved(float *x, long n, float mean) {
  for (long i = 0; i < n; i += WIDE) store(x + i, load(x + i) - mean);
  for (long i = n; i % LANES; i++) x[i] = 0.0f;
}

INLINE int normed(const Norm *m, float *c) {
  long n = m->channels;
  float d = (float)n, mean = 0.0f;
  if (m->layer) {
    mean = summed(c, n, 0) / d;
    moved(c, n, mean);
    moved(c, n, summed(c, n, 0) / d);
  }
  float square = summed(c, n, 1), size = 0.0f;
  V sizes = all(0.0f);
  long h = 0;
  for (; h + WIDE <= m->heads; h += WIDE) {
    V z = load(m->shift + h) - load(m->scale + h) * square;
    V p = expo(-size_of(z)); /* never overflows: sigmoid(z) = 1/(1+p), or p/(1+p) */
    sizes = sizes + load(m->mix + h) * (either(z < 0.0f, p, all(1.0f)) / (1.0f + p));
  }
  if (h < m->heads) {
    float shift[WIDE] = {0}, scale[WIDE] = {0}, mix[WIDE] = {0};
    memcpy(shift, m->shift + h, (m->heads - h) * 4);
    memcpy(scale, m->scale + h, (m->heads - h) * 4);
    memcpy(mix, m->mix + h, (m->heads - h) * 4);
    V z = load(shift) - load(scale) * square, p = expo(-size_of(z));
    sizes = sizes + load(mix) * (either(z < 0.0f, p, all(1.0f)) / (1.0f + p));
  }
  for (int i = 0; i < WIDE; i++) size += sizes[i];
  for (long i = 0; i < n; i += WIDE) {
    V r = load(c + i) * size;
    if (m->weight) r = r * (m->unit ? load(m->weight + i) + 1.0f : load(m->weight + i));
    if (m->bias) r = r + load(m->bias + i);
    store(c + i, r);
  }
  float variance = square / d, place = mean < 0 ? -mean : mean;
  int live = !(variance <= 0x1p-46f * (place * place + variance)); /* not constant up to rounding; NaN is live */
  int left = !(variance >= m->low && variance <= m->high) || (m->layer && place > m->far * __builtin_sqrtf(variance));
  return live && left;
}

/* weight and bias: 0, or padded to a multiple of LANES; room: threads rows of so many floats */
void attnforge_norm(const void *x, void *out, long rows, long channels, int half, const float *weight, const float *bias,
                    int unit, int layer, const float *scale, const float *shift, const float *mix, long heads, float low,
                    float high, float far, int64_t *outside, float *room, int threads) {
  Norm m = {weight, bias, scale, shift, mix, channels, heads, unit, layer, low, high, far};
  long found = 0, padded = (channels + LANES - 1) / LANES * LANES;
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(+ : found) schedule(static)
  for (int t = 0; t < threads; t++) {
    float *c = room + t * padded;
    for (long i = channels; i < padded; i++) c[i] = 0.0f;
    for (long row = rows * t / threads; row < rows * (t + 1) / threads; row++) {
      long at = row * channels, i = 0;
      if (half) {
        const uint16_t *from = (const uint16_t *)x + at;
        for (; i + WIDE <= channels; i += WIDE) store(c + i, widened(from + i));
        for (; i < channels; i++) {
          uint32_t bits = (uint32_t)from[i] << 16;
          memcpy(c + i, &bits, 4);
        }
      } else memcpy(c, (const float *)x + at, channels * 4);
      for (i = channels; i < padded; i++) c[i] = 0.0f;
      found += normed(&m, c);
      if (half) {
        uint16_t *to = (uint16_t *)out + at;
        for (i = 0; i + WIDE <= channels; i += WIDE) halved(to + i, load(c + i));
        if (i < channels) {
          uint16_t rest[WIDE];
          halved(rest, load(c + i));
          memcpy(to + i, rest, (channels - i) * 2);
        }
      } else memcpy((float *)out + at, c, channels * 4);
    }
  }
  if (outside) *outside += found;
}

/* ---- softmax heads with constant keys (R5) ---- */

#define MOST_SLOTS 1024 /* 64 KB with the widest vectors: more than a first cache, less than a second */
#define MOST_COORDINATES 8
#if defined(__AVX512F__) /* rounded, and not fused with what follows */
#define KEEP(v) __asm__("" : "+v"(v))
#else
#define KEEP(v) __asm__("" : "+m"(v))
#endif

typedef double W __attribute__((vector_size(BYTES)));
typedef int64_t J __attribute__((vector_size(BYTES)));

INLINE V larger_f(V a, V b) { return either(a > b, a, b); }
INLINE W larger_d(W a, W b) {
  J mask = a > b;
  return (W)((mask & (J)a) | (~mask & (J)b));
}

/* e^x for x <= 0, within 3 u (R9): Taylor's polynomial of degree 13 */
INLINE W expo_d(W x) {
  const W magic = 0x1.8p52 - (W){0};
  W t = x * 0x1.71547652b82fep+0 + magic, n = t - magic;
  W r = x - n * 0x1.62e42fefap-1; /* 36 bits: the product is exact */
  r = r - n * 0x1.cf79abc9e3b3ap-40;
  W p = r * (1 / 6227020800.0) + 1 / 479001600.0;
  p = p * r + 1 / 39916800.0;
  p = p * r + 1 / 3628800.0;
  p = p * r + 1 / 362880.0;
  p = p * r + 1 / 40320.0;
  p = p * r + 1 / 5040.0;
  p = p * r + 1 / 720.0;
  p = p * r + 1 / 120.0;
  p = p * r + 1 / 24.0;
  p = p * r + 1 / 6.0;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  J power = ((J)t - (J)magic + 1023) << 52;
  return (W)((J)(p * (W)power) & ~(x < -708.39642));
}

void attnforge_exp_d(const double *x, double *out, long n) {
  for (long i = 0; i + WIDE / 2 <= n; i += WIDE / 2) {
    W v;
    memcpy(&v, x + i, sizeof v);
    v = expo_d(v);
    memcpy(out + i, &v, sizeof v);
  }
}

/* of a step in a program: what it does, and how many numbers say so */
enum { DONE, DENSE, SPARSE, HEADS, LATTICE, SUM };
#define STEP 16

#define REAL float
#define VECTOR V
#define MASK I
#define SIGN ((int32_t)0x80000000)
#define LANE_COUNT WIDE
#define EXP expo
#define NAME(x) x##_f
#include "whole.h"

#define REAL double
#define VECTOR W
#define MASK J
#define SIGN ((int64_t)0x8000000000000000)
#define LANE_COUNT (WIDE / 2)
#define EXP expo_d
#define NAME(x) x##_d
#include "whole.h"
