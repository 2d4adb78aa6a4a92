#define _GNU_SOURCE
#include "oci_state.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* etcd stores no object that is larger than a few MiB; the rest is the runtime's. */
#define MAX_JSON (64 << 20)
#define MAX_DEPTH 64
#define MAX_DIGITS 9

void fail(const char *format, ...) {
    va_list arguments;
    int code = errno;
    fprintf(stderr, "quotient: %s: ", FAILURE);
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fprintf(stderr, "%s%s%s\n", code ? ": " : "", code ? strerror(code) : "", REMEDY);
    exit(1);
}

char *read_all(int file, const char *name) {
    size_t size = 0, room = 1 << 16;
    char *text = malloc(room + 1);
    ssize_t count;
    while (text && (count = read(file, text + size, room - size)) != 0) {
        if (count < 0)
            fail("%s", name);
        size += (size_t)count;
        if (size == room) {
            errno = EFBIG;
            if (room >= MAX_JSON)
                fail("%s", name);
            text = realloc(text, (room *= 2) + 1);
        }
    }
    if (!text)
        fail("%s", name);
    text[size] = 0;
    return text;
}

static const char *skip_space(const char *at) { return at + strspn(at, " \t\r\n"); }

static const char *skip_string(const char *at) {
    for (at++; *at && *at != '"'; at++)
        if (*at == '\\' && at[1])
            at++;
    return *at ? at + 1 : at;
}

static const char *skip_value(const char *at, int depth) {
    at = skip_space(at);
    if (*at == '"')
        return skip_string(at);
    if (*at != '{' && *at != '[')
        return at + strcspn(at, ",]} \t\r\n");
    if (depth == MAX_DEPTH)
        return at + strlen(at);
    for (at = skip_space(at + 1); *at && *at != '}' && *at != ']';) {
        at = skip_space(skip_value(at, depth + 1));
        if (*at == ',' || *at == ':')
            at = skip_space(at + 1);
    }
    return *at ? at + 1 : at;
}

const char *member(const char *object, const char *key) {
    const char *at = object ? skip_space(object) : "";
    size_t length = strlen(key);
    if (*at != '{')
        return NULL;
    at = skip_space(at + 1);
    while (*at == '"') {
        const char *end = skip_string(at), *value = skip_space(end);
        int found = (size_t)(end - at) == length + 2 && !strncmp(at + 1, key, length);
        if (*value != ':')
            return NULL;
        value = skip_space(value + 1);
        if (found)
            return value;
        at = skip_space(skip_value(value, 1));
        if (*at == ',')
            at = skip_space(at + 1);
    }
    return NULL;
}

char *text_in(const char *value, const char *name) {
    size_t length = value && *value == '"' ? strcspn(value + 1, "\"\\") : 0;
    errno = 0;
    if (!length || value[length + 1] != '"')
        fail("no %s", name);
    return strndup(value + 1, length);
}

long number_in(const char *value, const char *name) {
    size_t length = value ? strspn(value, "0123456789") : 0;
    long number = length && length <= MAX_DIGITS ? strtol(value, NULL, 10) : 0;
    errno = 0;
    if (!number || !strchr(",} \t\r\n", value[length]))
        fail("no %s", name);
    return number;
}
