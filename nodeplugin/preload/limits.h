/* The limits of this container, from a file that only the node plugin can write. */
#ifndef QUOTIENT_LIMITS_H
#define QUOTIENT_LIMITS_H

#include <stddef.h>

#include "formats.h"

#define PATH_MAX_BYTES 512

/* Map the file; NULL, with a message on stderr once, if there is none that can be used. */
const struct limits_file *container_limits(void);

/* The path of a file in the folder that is mounted into the container. */
void folder_path(char *path, size_t size, const char *name);

unsigned card_count(void);

/* The limits of a card as they are now. */
struct card_limits limits_of(unsigned card);

/* The index of a card by the 16 bytes of its UUID, -1 if the container has none such. */
int card_by_uuid(const unsigned char uuid[16]);

/* Write one line to stderr, at most once for each place that calls it. */
#define WARN_ONCE(...) do { \
        static _Atomic int warned_; \
        if (!atomic_exchange(&warned_, 1)) warn(__VA_ARGS__); \
    } while (0)
__attribute__((format(printf, 1, 2))) void warn(const char *format, ...);

#endif
