#include "parallel.h"

#ifdef _OPENMP
#include <omp.h>
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

void parallel_stages(const struct stage *stages, int count, int threads, void *context)
{
#ifdef _OPENMP
    if (threads > 1) {
#pragma omp atomic
        regions++;
#pragma omp parallel num_threads(threads)
        for (int s = 0; s < count; s++) {
            if (s) {
#pragma omp barrier
            }
#pragma omp for schedule(dynamic, 1) nowait
            for (ptrdiff_t i = 0; i < stages[s].count; i++)
                stages[s].run(context, i, omp_get_thread_num());
        }
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
