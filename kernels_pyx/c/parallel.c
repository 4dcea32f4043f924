#include "parallel.h"

#ifdef _OPENMP
#include <omp.h>
#include <sched.h>
#endif

static long regions;  /* state for tests alone: no result depends on it */

void parallel_for(ptrdiff_t count, int threads, piece_of_work run, void *context)
{
#ifdef _OPENMP
    if (threads > 1 && count > 1) {
#pragma omp atomic
        regions++;
        /* dynamic: on a board the slow cores take fewer pieces than the fast ones. */
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
        for (ptrdiff_t i = 0; i < count; i++)
            run(context, i, omp_get_thread_num());
        return;
    }
#else
    (void)threads;
#endif
    for (ptrdiff_t i = 0; i < count; i++)
        run(context, i, 0);
}

#ifdef _OPENMP
/* How many pieces of a stage have been taken, and how many are done. */
struct progress {
    ptrdiff_t taken, done;
};

/* One thread's part of the stages: whatever piece is left. It waits for the pieces before its
 * stage, and not, as at a barrier of OpenMP, for the threads: one that the system has not started
 * yet, or has put aside for other work, holds up nobody until there is nothing left to do. */
static void take_pieces(const struct stage *stages, int count, struct progress *progress,
                        void *context)
{
    for (int s = 0; s < count; s++) {
        for (ptrdiff_t done = 0; s > 0;) {
#pragma omp atomic read seq_cst
            done = progress[s - 1].done;
            if (done == stages[s - 1].count)
                break;
            sched_yield();
        }
        for (ptrdiff_t i;;) {
#pragma omp atomic capture seq_cst
            i = progress[s].taken++;
            if (i >= stages[s].count)
                break;
            stages[s].run(context, i, omp_get_thread_num());
#pragma omp atomic update seq_cst
            progress[s].done++;
        }
    }
}
#endif

void parallel_stages(const struct stage *stages, int count, int threads, void *context)
{
#ifdef _OPENMP
    if (threads > 1) {
        struct progress progress[MOST_STAGES] = {{0, 0}};
#pragma omp atomic
        regions++;
#pragma omp parallel num_threads(threads)
        take_pieces(stages, count, progress, context);
        return;
    }
#else
    (void)threads;
#endif
    for (int s = 0; s < count; s++)
        for (ptrdiff_t i = 0; i < stages[s].count; i++)
            stages[s].run(context, i, 0);
}

double worth_a_thread = 1 << 20;  /* some 30 to 100 microseconds */

int useful_threads(double multiply_adds, int threads)
{
    if (multiply_adds >= worth_a_thread * threads)
        return threads;
    return multiply_adds >= 2 * worth_a_thread ? (int)(multiply_adds / worth_a_thread) : 1;
}

long parallel_regions(void)
{
    long count;
#ifdef _OPENMP
#pragma omp atomic read
#endif
    count = regions;
    return count;
}

int parallel_available(void)
{
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}
