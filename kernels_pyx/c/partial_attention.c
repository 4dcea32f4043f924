/* Attention over a part of the context, block after block, each merged into what came before. Of a
 * row and a block
 *
 *     score, e, weight, out   as in prefill.c, over the tokens of the block
 *     lse = (double)(max of scores) + ln(sum of e)
 *
 * and what came before with this block, (o1, l1) and (o2, l2), with M = max(l1, l2), make, in double,
 *
 *     a = exp(l1 - M), b = exp(l2 - M), total = a + b
 *     out = (float)(a / total) * o1 + (float)(b / total) * o2     in float, not fused
 *     lse = M + ln(total)
 *
 * A part without tokens, of lse -inf, changes nothing; what is merged into nothing is copied. exp
 * and ln use + - * / alone, so their bits are the same everywhere; NumPy does the same steps. */

enum { PARTIAL_ROWS = 4 * PREFILL_BAND };  /* of a piece of work: one query head's */

/* Neither function has a branch: compilers make vectors of a loop over a band's rows. */

static inline double partial_exp(double x)  /* of x <= 0; 0 below -700 and for NaN */
{
    const double magic = 6755399441055744.0;  /* 1.5 * 2^52: there doubles are the integers */
    double at_least = x >= -700.0 ? x : -701.0;
    double whole = at_least * 1.4426950408889634 + magic, n = whole - magic, total = 1.0, power;
    double r = (at_least - n * 0x1.62e42fee00000p-1) - n * 0x1.a39ef35793c76p-33;
    UNROLL for (int i = 13; i >= 1; i--)
        total = total * (r * (1.0 / i)) + 1.0;
    uint64_t bits;
    memcpy(&bits, &whole, sizeof bits);  /* its low bits are those of n */
    bits = (bits + 1023) << 52;
    memcpy(&power, &bits, sizeof power);
    return x >= -700.0 ? total * power : 0.0;
}

static inline double partial_ln(double x)  /* of x >= 1; the series of log2_of in rope_tables.c */
{
    uint64_t bits, high;
    double m, exponent;
    memcpy(&bits, &x, sizeof bits);
    high = bits >> 52 | 0x4330000000000000;  /* 2^52 + the biased exponent, as a double */
    memcpy(&exponent, &high, sizeof exponent);
    bits = (bits & 0xfffffffffffff) | 0x3fe0000000000000;
    memcpy(&m, &bits, sizeof m);  /* 1/2 <= m < 1 */
    exponent -= 4503599627370496.0 + 1022.0 + (m < 0.7071067811865476 ? 1.0 : 0.0);
    m *= m < 0.7071067811865476 ? 2.0 : 1.0;
    double s = (m - 1.0) / (m + 1.0), square = s * s, total = 0.0;
    UNROLL for (int i = 19; i >= 1; i -= 2)
        total = total * square + 1.0 / i;
    return exponent * 0.6931471805599453 + 2.0 * s * total;
}

struct partial_work {
    struct prefill_work prefill;  /* tokens: of a block; its scratch: without keys and values */
    const unsigned char *reads;   /* NULL or [blocks][num_kv_heads] */
    ptrdiff_t block_size, blocks;
    float *keys;                  /* [num_kv_heads][blocks][tokens][padded], packed */
    float *values;                /* [num_kv_heads][n][padded] where d is no whole vectors */
    ptrdiff_t bands;              /* pieces of a query head */
    double *lse;                  /* [num_heads][rows] */
};

static int partial_is_read(const struct partial_work *work, ptrdiff_t block, ptrdiff_t kv_head)
{
    return work->reads == NULL || work->reads[block * work->prefill.in->num_kv_heads + kv_head];
}

static float *partial_keys(const struct partial_work *work, ptrdiff_t block, ptrdiff_t kv_head)
{
    ptrdiff_t size = work->prefill.tokens * work->prefill.padded;
    return work->keys + (kv_head * work->blocks + block) * size;
}

static void partial_pack(void *context, ptrdiff_t index, int thread)
{
    (void)thread;
    const struct partial_work *work = context;
    const struct prefill_input *in = work->prefill.in;
    ptrdiff_t kv_head = index / work->blocks, block = index % work->blocks;
    ptrdiff_t first = block * work->block_size;
    ptrdiff_t n = in->n - first < work->block_size ? in->n - first : work->block_size;
    if (!partial_is_read(work, block, kv_head))
        return;
    tile_pack_keys(in->k + kv_head * in->k_head_stride + first * in->d, n, in->d,
                   partial_keys(work, block, kv_head));
    if (in->d % 16)
        prefill_pad_values(in->v + kv_head * in->v_head_stride + first * in->d, n, in->d,
                           work->values + (kv_head * in->n + first) * work->prefill.padded);
}

/* What merging a band of parts takes, for all its rows, so that loops have a constant length: the
 * LSEs before and of the part, -inf for rows that are not there, and the weights of both. */
struct partial_merge {
    double before[PREFILL_BAND], part[PREFILL_BAND];
    float weight_before[PREFILL_BAND], weight_part[PREFILL_BAND];
    unsigned char fresh[PREFILL_BAND], absent[PREFILL_BAND];  /* nothing before; no part */
};

/* Merge the LSEs of a band's parts into those before, and find the weights. The larger of two LSEs
 * has exp(0) = 1, so one exp gives both. */
static void partial_merge_lse(struct partial_merge *m)
{
    double first[PREFILL_BAND], second[PREFILL_BAND], merged[PREFILL_BAND];
    for (ptrdiff_t r = 0; r < PREFILL_BAND; r++) {
        double before = m->before[r], part = m->part[r];
        double most = before > part ? before : part;
        double less = partial_exp((before > part ? part : before) - most), sum = 1.0 + less;
        first[r] = (before > part ? 1.0 : less) / sum;
        second[r] = (before > part ? less : 1.0) / sum;
        merged[r] = most + partial_ln(sum);
    }
    for (ptrdiff_t r = 0; r < PREFILL_BAND; r++)
        m->weight_before[r] = (float)first[r], m->weight_part[r] = (float)second[r];
    for (ptrdiff_t r = 0; r < PREFILL_BAND; r++) {
        m->fresh[r] = m->before[r] == -INFINITY;
        m->absent[r] = m->part[r] == -INFINITY;
        m->before[r] = m->absent[r] ? m->before[r] : m->fresh[r] ? m->part[r] : merged[r];
    }
}

/* Merge a row of a part into out[d]. A number that is not finite stays so, whatever its weight:
 * infinity times 0 is NaN. */
static inline void partial_merge_row(const float *part, float weight_before, float weight,
                                     ptrdiff_t d, float *out)
{
    const v16 a = v16_set(weight_before), b = v16_set(weight);
    ptrdiff_t j = 0;
    for (; j + 16 <= d; j += 16)
        v16_store(out + j, v16_add(v16_mul(a, v16_load(out + j)), v16_mul(b, v16_load(part + j))));
    if (j < d)
        v16_store_part(out + j, v16_add(v16_mul(a, v16_load_part(out + j, d - j)),
                                        v16_mul(b, v16_load_part(part + j, d - j))), d - j);
}

/* One block for a band of packed queries, merged into out[rows][d] and lse[rows]. */
static ptrdiff_t partial_block(const struct prefill_work *work, const struct prefill_scratch *s,
                               const float *values, const int64_t *visible, ptrdiff_t rows,
                               float *out, double *lse)
{
    ptrdiff_t d = work->in->d;
    struct partial_merge merge;
    float largest[PREFILL_BAND], total[PREFILL_BAND];
    band_scores(work, s, visible, rows);
    for (ptrdiff_t r = 0; r < PREFILL_BAND; r++) {
        struct softmax_sum sum = {-INFINITY, 1.0f};
        ptrdiff_t bad = r >= rows || visible[r] == 0 ? PREFILL_DONE : prefill_softmax(
            s->scores + r * work->tokens, (ptrdiff_t)visible[r], &sum);
        if (bad != PREFILL_DONE)
            return bad;
        largest[r] = sum.largest, total[r] = sum.total;
        merge.before[r] = r < rows ? lse[r] : -INFINITY;
    }
    for (ptrdiff_t r = 0; r < PREFILL_BAND; r++)
        merge.part[r] = (double)largest[r] + partial_ln((double)total[r]);
    partial_merge_lse(&merge);
    memcpy(lse, merge.before, (size_t)rows * sizeof *lse);
    band_outputs(work, s, values, visible, rows);
    for (ptrdiff_t r = 0; r < rows; r++) {
        const float *part = s->out + r * work->padded;
        if (merge.fresh[r])
            memcpy(out + r * d, part, (size_t)d * sizeof *out);
        else if (!merge.absent[r])
            partial_merge_row(part, merge.weight_before[r], merge.weight_part[r], d, out + r * d);
    }
    return PREFILL_DONE;
}

/* All blocks for a band of queries of one head. */
static ptrdiff_t partial_band(const struct partial_work *all, struct prefill_scratch *s,
                              ptrdiff_t head, ptrdiff_t first, ptrdiff_t rows)
{
    const struct prefill_work *work = &all->prefill;
    const struct prefill_input *in = work->in;
    ptrdiff_t kv_head = head * in->num_kv_heads / in->num_heads, row = head * in->rows + first;
    int packed = 0;
    for (ptrdiff_t block = 0; block < all->blocks; block++) {
        ptrdiff_t start = block * all->block_size;
        int64_t visible[PREFILL_BAND], most = 0;
        if (!partial_is_read(all, block, kv_head))
            continue;
        for (ptrdiff_t r = 0; r < rows; r++) {
            int64_t seen = in->visible[first + r] - start;
            seen = seen < 0 ? 0 : seen < all->block_size ? seen : all->block_size;
            visible[r] = seen;
            most = seen > most ? seen : most;
        }
        if (most == 0)
            continue;
        if (!packed)
            prefill_pack_band(work, s, in->q + row * in->d, rows);
        packed = 1;
        s->keys = partial_keys(all, block, kv_head);
        const float *values = in->d % 16 ? all->values + (kv_head * in->n + start) * work->padded
                                         : in->v + kv_head * in->v_head_stride + start * in->d;
        ptrdiff_t bad = partial_block(work, s, values, visible, rows, work->out + row * in->d,
                                      all->lse + row);
        if (bad != PREFILL_DONE)
            return start + bad;
    }
    return first_bad_value(work->out + row * in->d, rows * in->d) < 0 ? PREFILL_DONE
                                                                      : PREFILL_BAD_OUTPUT;
}

/* Some rows of one query head, band after band. */
static void partial_piece(void *context, ptrdiff_t index, int thread)
{
    struct partial_work *work = context;
    ptrdiff_t first = index % work->bands * PARTIAL_ROWS, all = work->prefill.in->rows;
    ptrdiff_t end = first + PARTIAL_ROWS < all ? first + PARTIAL_ROWS : all;
    struct prefill_scratch s = prefill_scratch_of(&work->prefill, thread);
    ptrdiff_t *status = &work->prefill.status[index];
    *status = PREFILL_DONE;
    for (; first < end && *status == PREFILL_DONE; first += PREFILL_BAND)
        *status = partial_band(work, &s, index / work->bands, first,
                               end - first < PREFILL_BAND ? end - first : PREFILL_BAND);
}

static ptrdiff_t partial_attention(const struct prefill_input *in, ptrdiff_t block_size,
                                   const unsigned char *reads, int threads, float *out, double *lse)
{
    block_size = block_size < in->n ? block_size : in->n;
    ptrdiff_t padded = tile_round_up(in->d, 16), tokens = tile_round_up(block_size, TILE_KEYS);
    ptrdiff_t blocks = (in->n + block_size - 1) / block_size;
    struct partial_work work = {
        .prefill = {.in = in, .keys_apart = 1, .padded = padded, .tokens = tokens, .out = out},
        .reads = reads, .block_size = block_size, .blocks = blocks,
        .bands = (in->rows + PARTIAL_ROWS - 1) / PARTIAL_ROWS, .lse = lse,
    };
    struct prefill_work *prefill = &work.prefill;
    size_t keys = (size_t)(in->num_kv_heads * blocks * tokens * padded);
    size_t values = in->d % 16 ? (size_t)(in->num_kv_heads * in->n * padded) : 0;
    ptrdiff_t pieces = in->num_heads * work.bands, result = PREFILL_NO_MEMORY;
    threads = useful_threads(
        2 * (double)in->num_heads * (double)in->rows * (double)in->n * (double)in->d, threads);
    threads = (int)(pieces < threads ? pieces : threads);
    prefill->scratch_size = prefill_scratch_size(padded, tokens);
    prefill->scratch = take_workspace((size_t)threads * prefill->scratch_size * sizeof(float));
    prefill->status = malloc((size_t)pieces * sizeof *prefill->status);
    work.keys = take_workspace((keys + values) * sizeof(float));
    work.values = work.keys ? work.keys + keys : NULL;
    if (prefill->scratch && prefill->status && work.keys) {
        const struct stage stages[] = {{in->num_kv_heads * blocks, partial_pack},
                                       {pieces, partial_piece}};
        parallel_stages(stages, 2, threads, &work);
        result = PREFILL_DONE;
        for (ptrdiff_t i = pieces - 1; i >= 0; i--)
            if (prefill->status[i] != PREFILL_DONE)
                result = prefill->status[i];
    }
    give_workspace(prefill->scratch);
    free(prefill->status);
    give_workspace(work.keys);
    return result;
}

struct merge_work {
    const float *part;
    const double *part_lse;
    ptrdiff_t rows, d;
    float *out;
    double *lse;
};

/* A band of rows of parts that are there already. */
static void merge_piece(void *context, ptrdiff_t index, int thread)
{
    (void)thread;
    const struct merge_work *work = context;
    ptrdiff_t first = index * PREFILL_BAND, d = work->d;
    ptrdiff_t rows = work->rows - first < PREFILL_BAND ? work->rows - first : PREFILL_BAND;
    struct partial_merge merge;
    for (ptrdiff_t r = 0; r < PREFILL_BAND; r++) {
        merge.before[r] = r < rows ? work->lse[first + r] : -INFINITY;
        merge.part[r] = r < rows ? work->part_lse[first + r] : -INFINITY;
    }
    partial_merge_lse(&merge);
    memcpy(work->lse + first, merge.before, (size_t)rows * sizeof *work->lse);
    for (ptrdiff_t r = 0; r < rows; r++) {
        const float *part = work->part + (first + r) * d;
        float *out = work->out + (first + r) * d;
        if (merge.absent[r])
            continue;
        if (merge.fresh[r])
            memcpy(out, part, (size_t)d * sizeof *out);
        else
            partial_merge_row(part, merge.weight_before[r], merge.weight_part[r], d, out);
    }
}

static void merge_parts(const float *part, const double *part_lse, ptrdiff_t rows, ptrdiff_t d,
                        int threads, float *out, double *lse)
{
    struct merge_work work = {part, part_lse, rows, d, out, lse};
    parallel_for((rows + PREFILL_BAND - 1) / PREFILL_BAND,
                 useful_threads(4 * (double)rows * (double)d, threads), merge_piece, &work);
}
