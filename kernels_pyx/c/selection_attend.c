/* Sparse attention: probe, choice and attention over the chosen blocks in one call. */

struct sparse_task {
    struct probe_task probe;
    const struct choice *choice;
    int shared;
    float *out;
    int32_t *first;         /* the blocks reserved by importance, then scratch of every thread */
    float *attend_scratch;  /* of every thread */
    size_t attend_floats;
    ptrdiff_t *status;      /* of every KV head: as an attention function's, or BAD_PROBE */
};

enum { BAD_PROBE = -100 };

/* The scores of a group's heads become the largest of them, block by block. */
static void share_scores(float *scores, ptrdiff_t group, ptrdiff_t n_blocks)
{
    for (ptrdiff_t h = 1; h < group; h++)
        for (ptrdiff_t b = 0; b < n_blocks; b++) {
            float score = scores[h * n_blocks + b];
            scores[b] = score > scores[b] ? score : scores[b];
        }
    for (ptrdiff_t h = 1; h < group; h++)
        memcpy(scores + h * n_blocks, scores, (size_t)n_blocks * sizeof *scores);
}

/* Give head `to` the choice of head `from`. */
static void copy_choice(const struct choice *choice, ptrdiff_t from, ptrdiff_t to)
{
    const ptrdiff_t k = choice->k;
    memcpy(choice->order + to * k, choice->order + from * k, (size_t)k * sizeof *choice->order);
    memcpy(choice->ids + to * k, choice->ids + from * k, (size_t)k * sizeof *choice->ids);
    choice->recency[to] = choice->recency[from];
    choice->evicted[to] = choice->evicted[from];
}

/* All of one KV head and the query heads that read it: what one step brought into the caches, the
 * next one finds there. */
static void sparse_kv_head(void *context, ptrdiff_t kh, int thread)
{
    const struct sparse_task *task = context;
    const struct probe_task *probe = &task->probe;
    const struct choice *choice = task->choice;
    ptrdiff_t group = probe->heads / probe->rows->num_kv_heads, d = probe->rows->d, k = choice->k;
    ptrdiff_t head = kh * group;
    float *scores = probe->scores + head * choice->n_blocks;
    char *scratch = (char *)task->first + reserved_bytes(choice)
                    + (size_t)thread * choice_bytes(choice);
    float *attend_scratch = task->attend_scratch + (size_t)thread * task->attend_floats;
    probe_kv_head(&task->probe, kh);
    task->status[kh] = BAD_PROBE;
    if (first_bad_value(scores, group * choice->n_blocks) >= 0)
        return;
    if (task->shared)
        share_scores(scores, group, choice->n_blocks);
    for (ptrdiff_t h = 0; h < group; h++) {
        if (h == 0 || !task->shared)
            choose_blocks(scores + h * choice->n_blocks, choice, task->first, head + h, scratch);
        else
            copy_choice(choice, head, head + h);
        if (h == 0 && k < choice->n_blocks)  /* they come while the next head chooses */
            fetch_first_blocks(probe->rows, kh, choice->ids + head * k, k, probe->block_size);
    }
    ptrdiff_t status = ATTEND_DONE, together = task->shared ? group : 1;
    for (ptrdiff_t h = head; h < head + group && status == ATTEND_DONE; h += together)
        status = attend_rows(probe->q + h * d, together, probe->rows, kh,
                             k < choice->n_blocks ? choice->ids + h * k : NULL, k,
                             probe->block_size, attend_scratch, task->out + h * d);
    task->status[kh] = status;
}

static enum sparse_status sparse_attention(const float *q, ptrdiff_t heads,
                                           const struct kv_rows *rows,
                                           const struct kv_rows *samples, ptrdiff_t block_size,
                                           ptrdiff_t n_probe, int shared,
                                           const struct choice *choice, float *scores, float *out,
                                           int threads, ptrdiff_t *bad_token)
{
    ptrdiff_t kv_heads = rows->num_kv_heads;
    ptrdiff_t tokens = choice->k < choice->n_blocks ? choice->k * block_size : rows->n;
    const struct probe_task probe = {q, heads, rows, samples, block_size, n_probe, scores};
    threads = useful_threads(
        probe_work(&probe) + 2 * (double)heads * (double)tokens * (double)rows->d, threads);
    threads = threads < kv_heads ? threads : (int)kv_heads;
    struct sparse_task task = {
        probe, choice, shared, out, start_choices(choice, threads), NULL,
        attend_rows_scratch(shared ? heads / kv_heads : 1, tokens, rows->d), NULL,
    };
    task.attend_scratch = malloc((size_t)threads * task.attend_floats * sizeof(float));
    task.status = malloc((size_t)kv_heads * sizeof *task.status);
    enum sparse_status status = SPARSE_NO_MEMORY;
    if (task.first && task.attend_scratch && task.status) {
        status = SPARSE_DONE;
        parallel_for(kv_heads, threads, sparse_kv_head, &task);
        for (ptrdiff_t kh = 0; kh < kv_heads && status != SPARSE_BAD_PROBE; kh++) {
            ptrdiff_t found = task.status[kh];
            if (found == BAD_PROBE) {
                status = SPARSE_BAD_PROBE;  /* whatever attention over other heads found */
            } else if (found != ATTEND_DONE && status == SPARSE_DONE) {
                status = found == ATTEND_BAD_OUTPUT ? SPARSE_BAD_OUTPUT : SPARSE_BAD_SCORE;
                *bad_token = found;
            }
        }
    }
    free(task.first);
    free(task.attend_scratch);
    free(task.status);
    return status;
}
