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
#include "oci_state.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <sched.h>
#include <stddef.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define CPU_S 10
#define MAX_CACHE (64 << 20)
/* As many as fit the kernel's sets: a newer kernel has more than the headers here know. */
#define CAPABILITIES 64

const char FAILURE[] = "the container's library cache cannot be updated";
const char REMEDY[] = "; nodePlugin.injection: native works without it";

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
    char *bundle = text_in(member(read_all(STDIN_FILENO, "the state"), "bundle"), "bundle in the state");
    if (chdir(bundle))
        fail("%s", bundle);
    int config = open("config.json", O_RDONLY | O_CLOEXEC);
    if (config < 0)
        fail("%s/config.json", bundle);
    char *root = text_in(member(member(read_all(config, "config.json"), "root"), "path"), "root in config.json");
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
