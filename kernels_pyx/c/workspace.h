/* Memory that a kernel needs while it runs, kept for the next call.
 *
 * malloc gives large memory back to the system as soon as it is free. The next call then gets pages
 * that the system has to clear and map one by one, half a microsecond for each 4 kB: as long as
 * computing with them may take. */
#ifndef COURSE_WORKSPACE_H
#define COURSE_WORKSPACE_H

#include <stddef.h>

/* Memory for so many bytes, aligned to 64; NULL if there is none. Its contents are anything. */
void *take_workspace(size_t bytes);

/* Give back what take_workspace returned, or NULL. */
void give_workspace(void *memory);

#endif
