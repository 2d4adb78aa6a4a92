#define _GNU_SOURCE
#include "limits.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define FOLDER "/etc/quotient"
#define LIMITS_NAME "gpu-limits"

void warn(const char *format, ...) {
    char line[512] = "quotient: ";
    size_t length = strlen(line);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line + length, sizeof line - length - 1, format, arguments);
    va_end(arguments);
    strcat(line, "\n");
    ssize_t ignored = write(STDERR_FILENO, line, strlen(line));
    (void)ignored;
}

void folder_path(char *path, size_t size, const char *name) {
    const char *folder = FOLDER;
#ifdef FOLDER_FROM_ENVIRONMENT
    /* Only in tests: a program could name a folder with limits of its own. */
    if (getenv("QUOTIENT_FOLDER"))
        folder = getenv("QUOTIENT_FOLDER");
#endif
    snprintf(path, size, "%s/%s", folder, name);
}

static const struct limits_file *map_limits(void) {
    char path[PATH_MAX_BYTES];
    folder_path(path, sizeof path, LIMITS_NAME);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    struct stat found;
    void *mapped = MAP_FAILED;
    if (file >= 0 && !fstat(file, &found) && found.st_size >= (off_t)sizeof(struct limits_file))
        mapped = mmap(NULL, sizeof(struct limits_file), PROT_READ, MAP_SHARED, file, 0);
    int code = errno;
    if (file >= 0)
        close(file);
    if (mapped == MAP_FAILED) {
        WARN_ONCE("%s cannot be read (%s): no GPU memory can be allocated", path, strerror(code));
        errno = code;
        return NULL;
    }
    const struct limits_file *limits = mapped;
    if (limits->magic == LIMITS_MAGIC && limits->version == FORMAT_VERSION && limits->card_count <= MAX_CARDS)
        return limits;
    warn("%s has another format than this library: no GPU memory can be allocated", path);
    munmap(mapped, sizeof(struct limits_file));
    errno = EINVAL;
    return NULL;
}

const struct limits_file *container_limits(void) {
    /* A mapping outlives a fork, and two threads that map it at the same time map the same file. */
    static const struct limits_file none, *_Atomic mapped;
    const struct limits_file *found = atomic_load_explicit(&mapped, memory_order_acquire);
    if (!found) {
        found = map_limits();
        /* Tried again if only files are scarce. */
        if (found || (errno != EMFILE && errno != ENFILE))
            atomic_store_explicit(&mapped, found ? found : &none, memory_order_release);
    }
    return found == &none ? NULL : found;
}

unsigned card_count(void) {
    const struct limits_file *limits = container_limits();
    return limits ? limits->card_count : 0;
}

struct card_limits limits_of(unsigned card) {
    const struct limits_file *limits = container_limits();
    struct card_limits copy = {0};
    if (!limits || card >= limits->card_count)
        return copy;
    /* The writer holds the lock for a microsecond. If it died within, what is there is used: it writes each number in
     * one piece, and the limits themselves never change. */
    for (int tries = 0; tries < 1000; tries++) {
        uint32_t before = atomic_load_explicit(&limits->sequence, memory_order_acquire);
        copy = limits->cards[card];
        atomic_thread_fence(memory_order_acquire);
        if (!(before & 1) && before == atomic_load_explicit(&limits->sequence, memory_order_relaxed))
            break;
    }
    return copy;
}

/* GPU-01234567-89ab-... or MIG-...: the hexadecimal digits after the first hyphen. */
static int parse_uuid(const char *text, unsigned char uuid[16]) {
    const char *at = strchr(text, '-');
    for (int digit = 0; at && digit < 32; digit++) {
        at += strspn(at, "-");
        const char *digits = "0123456789abcdefABCDEF", *found = *at ? strchr(digits, *at++) : NULL;
        if (!found)
            return 0;
        int value = (int)(found - digits);
        value = value > 15 ? value - 6 : value;
        uuid[digit / 2] = (unsigned char)(digit % 2 ? uuid[digit / 2] | value : value << 4);
    }
    return at != NULL;
}

int card_by_uuid(const unsigned char uuid[16]) {
    const struct limits_file *limits = container_limits();
    for (unsigned card = 0; limits && card < limits->card_count; card++) {
        unsigned char own[16];
        if (parse_uuid(limits->cards[card].uuid, own) && !memcmp(own, uuid, sizeof own))
            return (int)card;
    }
    return -1;
}
