/* exp of `count` float32 whose bits follow each other, by the NEON kernel, to standard output.
 *
 *     exp_walk FIRST COUNT SIGN      FIRST: bits of the first magnitude; SIGN: 1 for negative ones
 */
#include <stdio.h>
#include <stdlib.h>

#define V16_NEON
#include "v16.h"

enum { PIECE = 1 << 16 };

int main(int argc, char **argv)
{
    static float x[PIECE], y[PIECE];
    if (argc != 4)
        return 2;
    uint32_t first = (uint32_t)strtoul(argv[1], NULL, 10);
    unsigned long count = strtoul(argv[2], NULL, 10);
    const uint32_t sign = strtoul(argv[3], NULL, 10) ? 0x80000000u : 0;
    while (count > 0) {
        const uint32_t part = count < PIECE ? (uint32_t)count : PIECE;
        for (uint32_t i = 0; i < PIECE; i++) {
            const uint32_t bits = (first + (i < part ? i : 0)) | sign;
            memcpy(x + i, &bits, sizeof bits);
        }
        for (uint32_t i = 0; i < PIECE; i += 16)
            v16_store(y + i, v16_exp(v16_load(x + i)));
        if (fwrite(y, sizeof *y, part, stdout) != part)
            return 1;
        first += part;
        count -= part;
    }
    return 0;
}
