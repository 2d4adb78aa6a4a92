/* The YAML file that describes the cards, for the fake NVML and the fake CUDA driver: `gpus.yaml` beside the library, or
 * $QUOTIENT_FAKE_GPUS. `nodeplugin/fake/gpus.yaml` documents its content. Supported YAML: block mappings and sequences
 * of plain or quoted scalars, and flow collections on a single line. `nodeplugin.fake.describe` converts any YAML to
 * this form.
 *
 * No function takes a lock: the caller holds its library's own.
 */
#ifndef DESCRIPTION_H
#define DESCRIPTION_H

#define MAX_CARDS 64

/* Its path. */
const char *description_file(void);
/* Read the file if it was replaced or changed; returns 0 if there is none. */
int load_description(void);
/* The value at a path such as cards[0].uuid, or NULL. */
__attribute__((format(printf, 1, 2))) const char *get(const char *format, ...);
/* Whether any path starts with this prefix. */
int has(const char *prefix);
int count_of(const char *list);
unsigned long long number(const char *value, unsigned long long otherwise);
int truth(const char *value);

#endif
