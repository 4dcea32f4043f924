/* Share independent pieces of work among threads.
 *
 * A piece is a whole head or a whole band of rows: no sum is ever split between threads, so the
 * number of threads changes no bit of a result. */
#ifndef COURSE_PARALLEL_H
#define COURSE_PARALLEL_H

#include <stddef.h>

/* One piece: its index, and which of `threads` runs it (0 to threads - 1, for scratch memory). */
typedef void (*piece_of_work)(void *context, ptrdiff_t index, int thread);

/* Run pieces 0 to count - 1, on at most `threads` threads; on one where OpenMP is missing. */
void parallel_for(ptrdiff_t count, int threads, piece_of_work run, void *context);

/* Some pieces of which none needs another. */
struct stage {
    ptrdiff_t count;
    piece_of_work run;
};

enum { MOST_STAGES = 4 };

/* Run the pieces of each stage, up to MOST_STAGES, after all of the stage before, on threads that
 * are started once: between two stages they wait for each other's pieces, which takes less than to
 * start them. */
void parallel_stages(const struct stage *stages, int count, int threads, void *context);

/* How many of `threads` a call of so many multiply-adds is worth: 1 where it would be done before
 * a second thread is awake. On a busy machine waiting for that one costs milliseconds. */
int useful_threads(double multiply_adds, int threads);

/* Multiply-adds that are worth a thread. Tests set it to 0: then small work is shared too. */
extern double worth_a_thread;

/* How often a call has started more than one thread: tests ask whether it did. */
long parallel_regions(void);

/* 1 if the build can use more than one thread. */
int parallel_available(void);

#endif
