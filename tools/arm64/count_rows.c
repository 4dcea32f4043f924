/* Runs one loop of the attention kernels over a number of KV rows of 128 values, for counting.
 *
 *     count_rows LOOP ROWS
 *
 * Compiled with -DVARIANT='"variants/dotprod.c"' or another, so the kernels' inner functions can be
 * called as well as the operations. Everything but the loop costs the same for any ROWS: the
 * difference between two runs is the loop's own. */
#include VARIANT

#include <stdio.h>
#include <stdlib.h>

enum { D = 128, MAX_ROWS = 4096, QUERIES = 2 };

static float k_f32[MAX_ROWS * D], v_f32[MAX_ROWS * D], scale[MAX_ROWS];
static int8_t k_q8[MAX_ROWS * D], v_q8[MAX_ROWS * D];
static float q[QUERIES * D], acc[QUERIES * D], scores[QUERIES * MAX_ROWS];
static int8_t q_values[QUERIES * D];
static float q_scales[QUERIES * D / GROUP];
static int32_t q_offsets[QUERIES * D / GROUP];

static void operation(attention_function *function, int q8, ptrdiff_t n)
{
    const struct kv_rows rows = {
        q8 ? (void *)k_q8 : (void *)k_f32, q8 ? (void *)v_q8 : (void *)v_f32,
        q8 ? scale : NULL, q8 ? scale : NULL, 1, n, D, MAX_ROWS * D, MAX_ROWS * D, MAX_ROWS,
        MAX_ROWS,
    };
    const struct block_lists all = {NULL, 1, 0, 0};
    if (function(q, QUERIES, &rows, &all, 1, acc) != ATTEND_DONE)
        abort();
}

int main(int argc, char **argv)
{
    if (argc != 3)
        return 2;
    const char *loop = argv[1];
    const ptrdiff_t n = atol(argv[2]);
    if (n < 0 || n > MAX_ROWS)
        return 2;
    for (int i = 0; i < MAX_ROWS * D; i++) {
        k_q8[i] = (int8_t)(i * 37 % 255 - 127), v_q8[i] = (int8_t)(i * 101 % 255 - 127);
        k_f32[i] = k_q8[i] / 127.0f, v_f32[i] = v_q8[i] / 127.0f;
    }
    for (int i = 0; i < MAX_ROWS; i++)
        scale[i] = 1.0f / 127.0f;
    for (int i = 0; i < QUERIES * D; i++)
        q[i] = k_f32[i];

    const struct q8_queries int_q = {q_values, q_scales, q_offsets, strstr(loop, "row") ? D : GROUP};
    const struct attention_kernels *a = &attention_kernels;
    quantize_queries(q, QUERIES, D, &int_q);
    const int both = strstr(loop, "-2") != NULL;  /* the query heads that share the rows */
    const ptrdiff_t queries = both ? 2 : 1;
    const volatile ptrdiff_t run = 32;  /* as in a kernel, no constant */
    if (!strncmp(loop, "score-q8-q8", 11))  /* also score-q8-q8-row */
        for (ptrdiff_t r = 0; r < n; r += 32)
            q8_dots_of_run(&int_q, queries, k_q8 + r * D, run, D, NULL, scores + r, MAX_ROWS);
    else if (!strncmp(loop, "score-q8", 8))
        for (ptrdiff_t r = 0; r < n; r += 32)
            dots_of_run(q, queries, (const char *)(k_q8 + r * D), run, D, 1, NULL, scores + r,
                        MAX_ROWS);
    else if (!strncmp(loop, "score-f32", 9))
        for (ptrdiff_t r = 0; r < n; r += 32)
            dots_of_run(q, queries, (const char *)(k_f32 + r * D), run, D, 0, NULL, scores + r,
                        MAX_ROWS);
    else if (!strncmp(loop, "sum-q8", 6))
        for (ptrdiff_t r = 0; r < n; r += 32)
            sums_of_run(acc, queries, scale, 0, (const char *)(v_q8 + r * D), run, D, 1, NULL);
    else if (!strncmp(loop, "sum-f32", 7))
        for (ptrdiff_t r = 0; r < n; r += 32)
            sums_of_run(acc, queries, scale, 0, (const char *)(v_f32 + r * D), run, D, 0, NULL);
    else if (!strcmp(loop, "single_pass_q8"))
        operation(a->single_pass_q8, 1, n);
    else if (!strcmp(loop, "single_pass_q8_row"))
        operation(a->single_pass_q8_row, 1, n);
    else if (!strcmp(loop, "single_pass-q8"))
        operation(a->single_pass, 1, n);
    else if (!strcmp(loop, "two_pass-q8"))
        operation(a->two_pass, 1, n);
    else if (!strcmp(loop, "two_pass-f32"))
        operation(a->two_pass, 0, n);
    else
        return 2;
    /* Results are used, so that no loop is left out. */
    float sum = 0.0f;
    for (int i = 0; i < QUERIES * MAX_ROWS; i++)
        sum += scores[i];
    for (int i = 0; i < QUERIES * D; i++)
        sum += acc[i];
    return sum == 12345.0f;
}
