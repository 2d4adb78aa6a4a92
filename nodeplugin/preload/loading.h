/* The real library: every function that it exports, found when the first one is called.
 *
 * A process that never uses a GPU loads this library, too. So it opens the real one only then.
 */
#ifndef QUOTIENT_LOADING_H
#define QUOTIENT_LOADING_H

#include <stddef.h>

#include "names.h"

#define ENUMERATE(name) FUNCTION_##name,
enum function { FUNCTIONS(ENUMERATE) FUNCTION_COUNT };

/* NULL until it is looked up. What the real library does not export stands for a function that says so. */
extern void *driver_functions[FUNCTION_COUNT];

/* Open the library, look up all functions, and return the one wanted. */
void *load_driver(enum function function);

static inline void *driver_function(enum function function) {
    void *found = __atomic_load_n(&driver_functions[function], __ATOMIC_ACQUIRE);
    return found ? found : load_driver(function);
}

/* Whether the library exports it. */
int driver_has(enum function function);

#define REAL(name) ((__typeof__(&name))driver_function(FUNCTION_##name))
/* Defines an exported function in the place of the real one. The generator finds the names by this word. */
#define HOOK(name) __attribute__((visibility("default"))) RESULT name

#endif
