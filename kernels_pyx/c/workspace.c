#include "workspace.h"

#include <stdint.h>
#include <stdlib.h>

/* So many pieces of memory wait for the next call, none larger than this: 64 MB together. */
enum { KEPT = 4 };
static const size_t LARGEST_KEPT = (size_t)16 << 20;

/* What malloc keeps by itself, and what a sanitizer should watch, is left to it. */
#if defined(__SANITIZE_ADDRESS__)
static const size_t SMALLEST_KEPT = SIZE_MAX;
#else
static const size_t SMALLEST_KEPT = (size_t)64 << 10;
#endif

/* In front of the memory, in a cache line of its own. */
struct piece {
    _Alignas(64) size_t bytes;
};

static struct piece *kept[KEPT];

/* Put a piece, or NULL, into a place and return what was there: one step, whatever other threads
 * do, so that nobody else has it. */
static struct piece *exchange(int place, struct piece *with)
{
    return __atomic_exchange_n(&kept[place], with, __ATOMIC_ACQ_REL);
}

/* Keep a piece in a free place, or in that of a smaller one; free the one that is left over. */
static void keep(struct piece *piece)
{
    for (int place = 0; piece && place < KEPT; place++) {
        struct piece *other = exchange(place, piece);
        if (other && other->bytes > piece->bytes)
            other = exchange(place, other);
        piece = other;
    }
    free(piece);
}

void *take_workspace(size_t bytes)
{
    struct piece *piece = NULL;
    for (int place = 0; bytes >= SMALLEST_KEPT && place < KEPT; place++) {
        piece = exchange(place, NULL);
        if (piece && piece->bytes >= bytes)
            return piece + 1;
        if (piece)
            keep(piece);
    }
    if (bytes > SIZE_MAX - 2 * sizeof *piece)
        return NULL;
    const size_t whole = sizeof *piece + (bytes + 63) / 64 * 64;
    piece = aligned_alloc(64, whole);
    if (piece == NULL) {  /* what waits for a next call may be just what is missing */
        for (int place = 0; place < KEPT; place++)
            free(exchange(place, NULL));
        piece = aligned_alloc(64, whole);
    }
    if (piece == NULL)
        return NULL;
    piece->bytes = bytes;
    return piece + 1;
}

void give_workspace(void *memory)
{
    struct piece *piece = memory ? (struct piece *)memory - 1 : NULL;
    if (piece && piece->bytes >= SMALLEST_KEPT && piece->bytes <= LARGEST_KEPT)
        keep(piece);
    else
        free(piece);
}
