#define _GNU_SOURCE
/* Compiled for each library with LIBRARY, its name without a version, and the results of a missing library and of a
 * missing function. */
#include "loading.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "limits.h"

/* Where drivers are in containers, if they are not where the node plugin mounts them. */
static const char *const FOLDERS[] = {
    "/usr/local/nvidia/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib", "/lib64",
};
#define TEXT(name) #name,
static const char *const NAMES[] = {FUNCTIONS(TEXT)};

void *driver_functions[FUNCTION_COUNT];

static int no_driver(void) { return NO_LIBRARY; }
static int not_exported(void) { return NOT_EXPORTED; }

static void *open_in(const char *folder, const char *version) {
    char path[DRIVER_BYTES + 64];
    snprintf(path, sizeof path, "%s/" LIBRARY ".%s", folder, version);
    /* By the full path: the name without version is this library's own. */
    return dlopen(path, RTLD_NOW | RTLD_LOCAL);
}

static void *open_driver(void) {
    const struct limits_file *limits = container_limits();
    if (!limits)
        return NULL;
    char folder[DRIVER_BYTES + 1] = "", version[sizeof limits->driver_version + 1] = "";
    memcpy(folder, limits->driver_folder, sizeof limits->driver_folder);
    memcpy(version, limits->driver_version, sizeof limits->driver_version);
    void *opened = *folder ? open_in(folder, version) : NULL;
    for (size_t each = 0; !opened && each < sizeof FOLDERS / sizeof *FOLDERS; each++)
        opened = open_in(FOLDERS[each], version);
    if (!opened)
        WARN_ONCE(LIBRARY ".%s cannot be opened: %s", version, dlerror());
    return opened;
}

void *load_driver(enum function wanted) {
    /* Two threads may do this at the same time: the same library is opened twice, and the same values are written. */
    void *opened = open_driver();
    for (int each = 0; each < FUNCTION_COUNT; each++) {
        void *found = opened ? dlsym(opened, NAMES[each]) : (void *)no_driver;
        __atomic_store_n(&driver_functions[each], found ? found : (void *)not_exported, __ATOMIC_RELEASE);
    }
    return driver_functions[wanted];
}

int driver_has(enum function function) {
    void *found = driver_function(function);
    return found != (void *)not_exported && found != (void *)no_driver;
}
