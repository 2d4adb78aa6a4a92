/* A createContainer hook of the OCI runtime: lets the dynamic linker of a container find the driver's libraries.
 *
 *     update-ldcache LDCONFIG FOLDER  < state of the container, as JSON
 *
 * Runs LDCONFIG, a static program, on the container's root file system, with FOLDER as a library folder beside those of
 * the image. At this point the container's mounts exist and none of its programs runs, but its image is hostile: so
 * ldconfig sees nothing but that root, has no capabilities, and cannot reach /proc, which is not masked yet. The hook is
 * static itself, and gets its environment from the CDI file: a runtime may otherwise pass that of the container.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* etcd stores no object that is larger than a few MiB; the rest is the runtime's. */
#define MAX_JSON (64 << 20)
#define MAX_DEPTH 64
#define CPU_S 10
#define MAX_CACHE (64 << 20)
/* As many as fit the kernel's sets: a newer kernel has more than the headers here know. */
#define CAPABILITIES 64

static _Noreturn void fail(const char *format, ...) {
    va_list arguments;
    int code = errno;
    fprintf(stderr, "quotient: the container's library cache cannot be updated: ");
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fprintf(stderr, "%s%s; nodePlugin.injection: native works without it\n", code ? ": " : "", code ? strerror(code) : "");
    exit(1);
}

static char *read_all(int file, const char *name) {
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

/* The JSON is the runtime's and well-formed, but has strings of the tenant: so it is read as JSON, not searched. */

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

/* Returns the value of a key of an object, NULL if there is none. */
static const char *member(const char *object, const char *key) {
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

/* Returns a path as text; paths with escapes are none that a runtime has. */
static char *path_in(const char *value, const char *name) {
    size_t length = value && *value == '"' ? strcspn(value + 1, "\"\\") : 0;
    errno = 0;
    if (!length || value[length + 1] != '"')
        fail("no %s", name);
    return strndup(value + 1, length);
}

static void enter_root(const char *bundle, const char *root) {
    /* A namespace of its own, so that nothing of this is left in the container. */
    if (chdir(bundle) || unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL))
        fail("%s", bundle);
    if (mount(root, root, NULL, MS_BIND | MS_REC, NULL) || chdir(root) || syscall(SYS_pivot_root, ".", "."))
        fail("%s", root);
    if (umount2(".", MNT_DETACH) || chdir("/"))
        fail("%s", root);
    umount2("/proc", MNT_DETACH | UMOUNT_NOFOLLOW);
    umount2("/sys", MNT_DETACH | UMOUNT_NOFOLLOW);
}

static void drop_rights(void) {
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct none[_LINUX_CAPABILITY_U32S_3] = {0};
    struct rlimit cpu = {CPU_S, CPU_S}, size = {MAX_CACHE, MAX_CACHE};
    for (int each = 0; each < CAPABILITIES; each++)
        if (prctl(PR_CAPBSET_DROP, each, 0, 0, 0) && errno != EINVAL)
            fail("capability %d", each);
    if (syscall(SYS_capset, &header, none) || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        fail("capabilities");
    if (setrlimit(RLIMIT_CPU, &cpu) || setrlimit(RLIMIT_FSIZE, &size))
        fail("limits");
}

int main(int count, char **arguments) {
    char *environment[] = {NULL};
    if (count != 3)
        fail("usage: update-ldcache LDCONFIG FOLDER");
    int program = open(arguments[1], O_RDONLY | O_CLOEXEC);
    if (program < 0)
        fail("%s", arguments[1]);
    char *bundle = path_in(member(read_all(STDIN_FILENO, "the state"), "bundle"), "bundle in the state");
    if (chdir(bundle))
        fail("%s", bundle);
    int config = open("config.json", O_RDONLY | O_CLOEXEC);
    if (config < 0)
        fail("%s/config.json", bundle);
    char *root = path_in(member(member(read_all(config, "config.json"), "root"), "path"), "root in config.json");
    enter_root(bundle, root);
    /* Debian's ldconfig does not know the standard folders of others. */
    int is_debian = !access("/etc/debian_version", F_OK);
    char *command[] = {"ldconfig", "-X", "-i", "-f", "/etc/ld.so.conf", "-C", "/etc/ld.so.cache", arguments[2],
                       is_debian ? NULL : "/lib64", "/usr/lib64", NULL};
    drop_rights();
    if (fcntl(program, F_SETFD, FD_CLOEXEC) || syscall(SYS_close_range, 3, ~0U, 4 /* CLOEXEC */))
        errno = 0; /* an old kernel: what the runtime left open is closed on exec as well */
    syscall(SYS_execveat, program, "", command, environment, AT_EMPTY_PATH);
    fail("ldconfig");
}
