/* Whole networks of softmax heads with constant keys, for one type of numbers: `kernels.c` includes this for float and for
   double. REAL, VECTOR, MASK, LANE_COUNT, EXP and NAME are defined there.

   Rows are taken SPAN at a time; what is known of them lies in a room of slabs, a slab holding one channel of these rows.
   The program (`attnforge.native.whole` writes it) is a list of steps, each a few numbers: which slabs are read and
   written, and where the step's tables begin. Sums have no order in the model of rounding (R8), products and sums may be
   fused; terms of a layer are added in the order of network.AttentionLayer. */

#define SPAN (4 * LANE_COUNT)

/* A step over tables. w_j = softmax(sum_c keys_jc q_c), q_c = scale_c X[place_c] + bias_c (no X where place_c is
   negative), out[head][value] = sum_j w_j V_j; with `own` the first key belongs to a value of the row's own. As in
   network.Heads: the largest logit is subtracted, weights are exponentials times the reciprocal of their sum, then values
   are summed. */
typedef struct {
  const REAL *x, *keys, *values, *own, *scale, *bias;
  const int32_t *place;
  REAL *out;
  int heads, slots, coordinates, width, shared_keys, shared_values, shared_own;
} NAME(Heads);

INLINE VECTOR NAME(fetch)(const REAL *p) { VECTOR v; memcpy(&v, p, sizeof v); return v; }
INLINE void NAME(put)(REAL *p, VECTOR v) { memcpy(p, &v, sizeof v); }

INLINE void NAME(head)(const NAME(Heads) *m, long head, long lane, int coordinates) {
  VECTOR logit[MOST_SLOTS], q[MOST_COORDINATES], most, total = {0};
  const REAL *keys = m->keys + (m->shared_keys ? 0 : head * m->slots * coordinates);
  for (int c = 0; c < coordinates; c++) {
    long at = head * coordinates + c;
    q[c] = m->bias[at] - (VECTOR){0};
    if (m->place[at] >= 0) {
      VECTOR x = NAME(fetch)(m->x + m->place[at] * SPAN + lane) * m->scale[at];
      KEEP(x); /* product and sum are rounded apart, as they are elsewhere */
      q[c] = x + q[c];
    }
  }
  for (int j = 0; j < m->slots; j++) {
    VECTOR l = q[0] * keys[j * coordinates];
    for (int c = 1; c < coordinates; c++) l = q[c] * keys[j * coordinates + c] + l;
    KEEP(l); /* what is subtracted is what is compared: the largest has the exponential 1 */
    logit[j] = l;
    most = j ? NAME(larger)(most, l) : l;
  }
  for (int j = 0; j < m->slots; j++) {
    logit[j] = EXP(logit[j] - most);
    total = total + logit[j];
  }
  VECTOR share = (REAL)1 / total;
  int own = m->own != 0, values = m->slots - own;
  for (int v = 0; v < m->width; v++) {
    const REAL *value = m->values + ((m->shared_values ? 0 : head * m->width) + v) * values;
    VECTOR sum = {0};
    for (int j = 0; j < values; j++) sum = sum + (logit[j + own] * share) * value[j];
    if (own) sum = sum + (logit[0] * share) * NAME(fetch)(m->own + ((m->shared_own ? 0 : head * m->width) + v) * SPAN + lane);
    NAME(put)(m->out + (head * m->width + v) * SPAN + lane, sum);
  }
}

INLINE void NAME(heads)(const NAME(Heads) *m, int vectors) {
  for (long h = 0; h < m->heads; h++)
    for (int k = 0; k < vectors; k++) {
      if (m->coordinates == 1) NAME(head)(m, h, k * LANE_COUNT, 1);
      else if (m->coordinates == 2) NAME(head)(m, h, k * LANE_COUNT, 2);
      else NAME(head)(m, h, k * LANE_COUNT, m->coordinates);
    }
}

/* The same for heads of one table on an even lattice, with one exponential each (A8): numbers are [rate, centre, Q, P, R],
   polynomials from the lowest power on, R only if `odd`. */
INLINE void NAME(lattice)(const REAL *x, REAL *out, int heads, const int32_t *place, const REAL *numbers, int terms,
                          int odd, int whole, int vectors) {
  REAL rate = numbers[0], centre = numbers[1], kept[3 * DEEPEST];
  memcpy(kept, numbers + 2, (odd ? 3 : 2) * terms * sizeof(REAL));
  const REAL *of_q = kept, *of_p = kept + terms, *of_r = kept + 2 * terms;
  int last = terms - 1;
  for (long h = 0; h < heads; h++)
    for (int k = 0; k < vectors; k += 2) { /* two at once: their polynomials wait for one another's products */
      VECTOR at[2], q[2], s[2], below[2], above[2];
      int other = k + 1 < vectors ? k + 1 : k;
      for (int i = 0; i < 2; i++) {
        at[i] = NAME(fetch)(x + place[h] * SPAN + (i ? other : k) * LANE_COUNT) - centre;
        q[i] = EXP((VECTOR)((MASK)at[i] & ~SIGN) * -rate);
        s[i] = q[i] / (q[i] * q[i] + 1);
        below[i] = of_q[last] - (VECTOR){0}, above[i] = of_p[last] - (VECTOR){0};
      }
      for (int j = last - 1; j >= 0; j--)
        for (int i = 0; i < 2; i++) below[i] = below[i] * s[i] + of_q[j], above[i] = above[i] * s[i] + of_p[j];
      if (odd) {
        VECTOR side[2];
        for (int i = 0; i < 2; i++) side[i] = of_r[last] - (VECTOR){0};
        for (int j = last - 1; j >= 0; j--)
          for (int i = 0; i < 2; i++) side[i] = side[i] * s[i] + of_r[j];
        for (int i = 0; i < 2; i++) {
          VECTOR p = whole ? q[i] * q[i] : q[i];
          VECTOR tilt = (1 - p) / (1 + p);
          above[i] = above[i] + side[i] * (VECTOR)((MASK)tilt | ((MASK)at[i] & SIGN));
        }
      }
      NAME(put)(out + h * SPAN + k * LANE_COUNT, above[0] / below[0]);
      if (other > k) NAME(put)(out + h * SPAN + other * LANE_COUNT, above[1] / below[1]);
    }
}

/* out (=, or + with `add`) table x (+ bias), of `tall` rows of the table at once */
INLINE void NAME(tile)(const REAL *x, REAL *out, const REAL *table, const REAL *bias, int n, int add, int tall, int vectors) {
  VECTOR sum[8][4] = {{{0}}};
  for (int c = 0; c < n; c++)
    for (int r = 0; r < tall; r++)
      for (int k = 0; k < vectors; k++)
        sum[r][k] = NAME(fetch)(x + c * SPAN + k * LANE_COUNT) * table[(long)r * n + c] + sum[r][k];
  for (int r = 0; r < tall; r++)
    for (int k = 0; k < vectors; k++) {
      REAL *to = out + r * SPAN + k * LANE_COUNT;
      VECTOR v = sum[r][k];
      if (add) v = NAME(fetch)(to) + v;
      if (bias) v = v + bias[r];
      NAME(put)(to, v);
    }
}

INLINE void NAME(dense)(const REAL *x, REAL *out, const REAL *table, const REAL *bias, int m, int n, int add, int tall,
                        int vectors) {
  int r = 0;
  for (; r + tall <= m; r += tall)
    NAME(tile)(x, out + r * SPAN, table + (long)r * n, bias ? bias + r : 0, n, add, tall, vectors);
  for (; r < m; r++) NAME(tile)(x, out + r * SPAN, table + (long)r * n, bias ? bias + r : 0, n, add, 1, vectors);
}

/* the same where most of the table is 0: entries of row r are from[r] to from[r + 1], `column` says where they stand */
INLINE void NAME(sparse)(const REAL *x, REAL *out, const REAL *table, const REAL *bias, int m, int add, const int32_t *from,
                         int vectors) {
  const int32_t *column = from + m + 1;
  for (int r = 0; r < m; r++)
    for (int k = 0; k < vectors; k++) {
      REAL *to = out + r * SPAN + k * LANE_COUNT;
      VECTOR v = {0};
      for (int e = from[r]; e < from[r + 1]; e++) {
        VECTOR part = NAME(fetch)(x + column[e] * SPAN + k * LANE_COUNT) * table[e];
        v = e > from[r] ? part + v : part;
      }
      if (add) v = NAME(fetch)(to) + v;
      if (bias) v = v + bias[r];
      NAME(put)(to, v);
    }
}

INLINE void NAME(steps)(const int32_t *code, const int32_t *index, const REAL *numbers, REAL *room, int vectors) {
  for (const int32_t *c = code; c[0] != DONE; c += STEP) {
    const REAL *x = room + (long)c[1] * SPAN;
    REAL *out = room + (long)c[2] * SPAN;
    if (c[0] == DENSE) {
      const REAL *bias = c[6] < 0 ? 0 : numbers + c[6];
      NAME(dense)(x, out, numbers + c[5], bias, c[3], c[4], c[7], vectors > 2 ? 4 : 8, vectors);
    } else if (c[0] == SPARSE) {
      NAME(sparse)(x, out, numbers + c[5], c[6] < 0 ? 0 : numbers + c[6], c[3], c[7], index + c[8], vectors);
    } else if (c[0] == HEADS) {
      NAME(Heads) m = {x, numbers + c[7], numbers + c[9], c[11] < 0 ? 0 : room + (long)c[11] * SPAN, numbers + c[13],
                       numbers + c[14], index + c[15], out, c[3], c[4], c[5], c[6], c[8], c[10], c[12]};
      NAME(heads)(&m, vectors);
    } else if (c[0] == LATTICE) {
      NAME(lattice)(x, out, c[3], index + c[8], numbers + c[5], c[4], c[6], c[7], vectors);
    } else { /* SUM: over heads, of c[4] values each */
      for (int v = 0; v < c[4]; v++)
        for (int k = 0; k < vectors; k++) {
          VECTOR sum = NAME(fetch)(x + v * SPAN + k * LANE_COUNT);
          for (int h = 1; h < c[3]; h++) sum = sum + NAME(fetch)(x + ((long)h * c[4] + v) * SPAN + k * LANE_COUNT);
          NAME(put)(out + v * SPAN + k * LANE_COUNT, sum);
        }
    }
  }
}

/* `tables` are the network's own, of `sizes` bytes, and `copies` what they were when the program was written, one after
   another: where they differ, nothing is computed and `changed` is set. `room`: for every thread, `slabs` of them. */
void NAME(attnforge_network)(const REAL *x, REAL *out, long rows, int inputs, int outputs, const int32_t *code,
                             const int32_t *index, const REAL *numbers, const void **tables, const int64_t *sizes,
                             const char *copies, int count, REAL *room, int slabs, int result, int64_t *changed,
                             int threads) {
  for (int t = 0; t < count; t++) {
    if (memcmp(tables[t], copies, sizes[t])) {
      *changed = 1;
      return;
    }
    copies += sizes[t];
  }
  long blocks = (rows + SPAN - 1) / SPAN;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int t = 0; t < threads; t++) {
    REAL *mine = room + (long)t * slabs * SPAN;
    for (long block = blocks * t / threads; block < blocks * (t + 1) / threads; block++) {
      long start = block * SPAN;
      int some = rows - start < SPAN ? rows - start : SPAN, vectors = (some + LANE_COUNT - 1) / LANE_COUNT;
      for (int c = 0; c < inputs; c++) {
        for (int r = 0; r < some; r++) mine[c * SPAN + r] = x[(start + r) * inputs + c];
        for (int r = some; r < vectors * LANE_COUNT; r++) mine[c * SPAN + r] = 0;
      }
      if (vectors == 4) NAME(steps)(code, index, numbers, mine, 4);
      else if (vectors == 1) NAME(steps)(code, index, numbers, mine, 1);
      else NAME(steps)(code, index, numbers, mine, vectors);
      for (int r = 0; r < some; r++)
        for (int c = 0; c < outputs; c++) out[(start + r) * outputs + c] = mine[((long)result + c) * SPAN + r];
    }
  }
}

/* Adds to `outside` how many numbers lie outside of their limits, NaN among them; the limits repeat after `period`. */
void NAME(attnforge_beyond)(const REAL *x, long n, const REAL *low, const REAL *high, long period, int64_t *outside) {
  long found = 0;
  for (long i = 0; i < n; i += period) {
    long some = n - i < period ? n - i : period;
    int64_t here = 0;
    for (long j = 0; j < some; j++) here += !((x[i + j] >= low[j]) & (x[i + j] <= high[j]));
    found += here;
  }
  *outside += found;
}

#undef SPAN
#undef REAL
#undef VECTOR
#undef MASK
#undef SIGN
#undef LANE_COUNT
#undef EXP
#undef NAME
