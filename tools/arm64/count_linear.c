/* One product of a Q8_0 matrix of ROWS rows and 160 columns with one row of x, for counting.
 *
 *     count_linear ROWS
 *
 * Compiled with -DVARIANT='"variants/dotprod.c"' or another. Everything but the rows costs the same
 * for any ROWS: the difference between two runs is the rows' own. */
#include VARIANT

#include <stdio.h>
#include <stdlib.h>

enum { COLS = 160, MAX_ROWS = 4096 };

static float x[COLS], out[MAX_ROWS];
static int8_t codes[MAX_ROWS * COLS];
static uint16_t scales[MAX_ROWS * COLS / 32];

int main(int argc, char **argv)
{
    const ptrdiff_t rows = argc == 2 ? atol(argv[1]) : -1;
    if (rows < 1 || rows > MAX_ROWS)
        return 2;
    for (int i = 0; i < COLS; i++)
        x[i] = (float)(i * 37 % 255 - 127);
    for (int i = 0; i < MAX_ROWS * COLS; i++)
        codes[i] = (int8_t)(i * 101 % 255 - 127);
    for (int i = 0; i < MAX_ROWS * COLS / 32; i++)
        scales[i] = 0x2000; /* 2^-7 */
    if (!linear_kernels.q8_0(x, 1, COLS, codes, scales, rows, out, 1))
        abort();
    /* Results are used, so that no product is left out. */
    float sum = 0.0f;
    for (int i = 0; i < MAX_ROWS; i++)
        sum += out[i];
    return sum == 12345.0f;
}
