/* Names of nodes as kube-scheduler sends and gets them: the inner loops of vcuda/json_names.py.
 *
 * With 5,000 nodes a request has 100 kB of names, and its answer as much. Array operations and strings of Python take
 * two milliseconds for them, this a tenth.
 */
#include <stdint.h>
#include <string.h>

/* Return a hash of some bytes: FNV-1a, whose bits are mixed, as hashes are added up. */
static uint64_t hash_bytes(const uint8_t *text, int64_t length) {
    uint64_t hash = 0xCBF29CE484222325u;
    for (int64_t at = 0; at < length; at++)
        hash = (hash ^ text[at]) * 0x100000001B3u;
    hash = (hash ^ hash >> 31) * 0xBF58476D1CE4E5B9u;
    return hash ^ hash >> 31;
}

/* Hash the names of a JSON list like ["a","b"], `capacity` at most. Return how many there are, or -1 if the text is
 * anything else, or a character is escaped. */
int64_t hash_names(const uint8_t *text, int64_t length, int64_t capacity, uint64_t *hashes) {
    int64_t count = 0, at = 2;
    if (length < 4 || text[0] != '[' || text[1] != '"' || memchr(text, '\\', (size_t)length))
        return -1;
    while (count < capacity) {
        const uint8_t *end = memchr(text + at, '"', (size_t)(length - at));
        if (!end)
            return -1;
        int64_t size = end - (text + at);
        hashes[count++] = hash_bytes(text + at, size);
        at += size + 1;
        if (at == length - 1)
            return text[at] == ']' ? count : -1;
        if (length - at < 4 || text[at] != ',' || text[at + 1] != '"')
            return -1;
        at += 2;
    }
    return -1;
}

static char *append(char *out, const char *text, int64_t length) {
    memcpy(out, text, (size_t)length);
    return out + length;
}

/* Write the names at some positions, each with the text after it: `names` are all known ones, one after another, and
 * `offsets` where each begins, and the last one ends. Return the length of what was written. */
int64_t write_names(const char *names, const int64_t *offsets, const int64_t *positions, int64_t count,
                    const char *after, int64_t after_length, char *out) {
    char *next = out;
    for (int64_t at = 0; at < count; at++) {
        int64_t position = positions[at];
        next = append(next, names + offsets[position], offsets[position + 1] - offsets[position]);
        next = append(next, after, after_length);
    }
    return next - out;
}

static char *append_number(char *out, int64_t number) {
    char digits[20];
    int count = 0;
    do
        digits[count++] = (char)('0' + number % 10);
    while (number /= 10);
    while (count)
        *out++ = digits[--count];
    return out;
}

/* The same with a score, which is not negative, between two texts after each name. */
int64_t write_scores(const char *names, const int64_t *offsets, const int64_t *positions, const int64_t *scores,
                     int64_t count, const char *before, int64_t before_length, const char *after, int64_t after_length,
                     char *out) {
    char *next = out;
    for (int64_t at = 0; at < count; at++) {
        int64_t position = positions[at];
        next = append(next, names + offsets[position], offsets[position + 1] - offsets[position]);
        next = append(next, before, before_length);
        next = append_number(next, scores[at]);
        next = append(next, after, after_length);
    }
    return next - out;
}
