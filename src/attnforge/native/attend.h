/* Softmax heads with constant keys, for one type of numbers: `kernels.c` includes this for float and for double.
   REAL, VECTOR, LANE_COUNT, EXP and NAME are defined there.

   out[head][value] = sum_j w_j V_j, w = softmax(sum_c keys_jc q_c), q_c = scale_c X[place_c] + bias_c (no X where place_c
   is negative), for every row; with `own` the first key belongs to a value of the row's own. As in network.Heads: the
   largest logit is subtracted, weights are exponentials times the reciprocal of their sum, then values are summed. */

typedef struct {
  const REAL *x, *keys, *values, *own, *scale, *bias;
  const int32_t *place;
  REAL *out;
  long heads, rows;
  int slots, coordinates, width, shared_keys, shared_values;
} NAME(Heads);

INLINE VECTOR NAME(fetch)(const REAL *p, long count) {
  VECTOR v = {0};
  if (count >= LANE_COUNT) memcpy(&v, p, sizeof v);
  else memcpy(&v, p, count * sizeof(REAL));
  return v;
}

INLINE void NAME(head)(const NAME(Heads) *m, long head, long row, long count, int coordinates) {
  VECTOR logit[MOST_SLOTS], q[MOST_COORDINATES], most, total = {0};
  const REAL *keys = m->keys + (m->shared_keys ? 0 : head * m->slots * coordinates);
  for (int c = 0; c < coordinates; c++) {
    long at = head * coordinates + c;
    q[c] = m->bias[at] - (VECTOR){0};
    if (m->place[at] >= 0) {
      VECTOR x = NAME(fetch)(m->x + m->place[at] * m->rows + row, count) * m->scale[at];
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
    long to = (head * m->width + v) * m->rows + row;
    if (own) sum = sum + (logit[0] * share) * NAME(fetch)(m->own + to, count);
    memcpy(m->out + to, &sum, (count < LANE_COUNT ? count : LANE_COUNT) * sizeof(REAL));
  }
}

void NAME(attnforge_attend)(const REAL *x, long rows, const int32_t *place, const REAL *scale, const REAL *bias,
                            const REAL *keys, int shared_keys, const REAL *values, int shared_values, const REAL *own,
                            REAL *out, long heads, int slots, int coordinates, int width, int threads) {
  if (slots > MOST_SLOTS || coordinates > MOST_COORDINATES) return;
  NAME(Heads) m = {x, keys, values, own, scale, bias, place, out, heads, rows,
                   slots, coordinates, width, shared_keys, shared_values};
#pragma omp parallel for collapse(2) num_threads(threads) if (threads > 1) schedule(static)
  for (long h = 0; h < heads; h++)
    for (long row = 0; row < rows; row += LANE_COUNT) {
      if (coordinates == 1) NAME(head)(&m, h, row, rows - row, 1);
      else if (coordinates == 2) NAME(head)(&m, h, row, rows - row, 2);
      else NAME(head)(&m, h, row, rows - row, coordinates);
    }
}

#undef REAL
#undef VECTOR
#undef LANE_COUNT
#undef EXP
#undef NAME
