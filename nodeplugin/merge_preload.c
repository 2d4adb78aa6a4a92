/* A createRuntime hook of the OCI runtime: keeps what an image itself preloads.
 *
 *     merge-preload FILE  < state of the container, as JSON
 *
 * FILE is mounted over the image's /etc/ld.so.preload, and names the library that limits GPU memory. The image's own
 * file is seen here only: the hook runs in the host's namespaces, where the container's mounts are not. Its lines are
 * appended to FILE, in place, because FILE is mounted already. The image is hostile: nothing outside of it is read.
 */
#define _GNU_SOURCE
#include "oci_state.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define OWN_FILE "etc/ld.so.preload"
/* A list of libraries; the node keeps a copy for each container. */
#define MAX_BYTES 4096

const char FAILURE[] = "what the container's image preloads cannot be kept";
const char REMEDY[] = "; remove /etc/ld.so.preload from the image, or request whole GPUs";

/* Returns the image's file, -1 if it has none. Links are followed within the image, as the container would. */
static int open_own(const char *bundle, const char *root) {
    struct open_how how = {.flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK, .resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS};
    /* A relative root is relative to the bundle. */
    if (chdir(bundle))
        fail("%s", bundle);
    int folder = open(root, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0)
        fail("%s", root);
    int file = (int)syscall(SYS_openat2, folder, OWN_FILE, &how, sizeof how);
    /* Before Linux 5.6; all files that this program needs besides are open. */
    if (file < 0 && errno == ENOSYS) {
        if (fchdir(folder) || chroot("."))
            fail("%s", root);
        file = open("/" OWN_FILE, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    }
    if (file < 0 && errno != ENOENT && errno != ENOTDIR)
        fail(OWN_FILE);
    close(folder);
    return file;
}

static size_t read_own(int file, char *lines) {
    struct stat found;
    if (fstat(file, &found))
        fail(OWN_FILE);
    errno = 0;
    if (!S_ISREG(found.st_mode) || found.st_size > MAX_BYTES)
        fail(OWN_FILE " is no file, or has more than %d bytes", MAX_BYTES);
    size_t size = 0;
    ssize_t count;
    while ((count = read(file, lines + size, MAX_BYTES - size)) > 0)
        size += (size_t)count;
    if (count < 0)
        fail(OWN_FILE);
    return size;
}

int main(int count, char **arguments) {
    static char lines[MAX_BYTES + 1];
    if (count != 2)
        fail("usage: merge-preload FILE");
    const char *bundle = text_in(member(read_all(STDIN_FILENO, "the state"), "bundle"), "bundle in the state");
    int target = open(arguments[1], O_WRONLY | O_APPEND | O_CLOEXEC | O_NOFOLLOW);
    if (target < 0)
        fail("%s", arguments[1]);
    if (chdir(bundle))
        fail("%s", bundle);
    int config = open("config.json", O_RDONLY | O_CLOEXEC);
    if (config < 0)
        fail("%s/config.json", bundle);
    const char *root = text_in(member(member(read_all(config, "config.json"), "root"), "path"), "root in config.json");
    int own = open_own(bundle, root);
    size_t size = own < 0 ? 0 : read_own(own, lines);
    errno = 0;
    if (size && write(target, lines, size) != (ssize_t)size)
        fail("%s", arguments[1]);
    return 0;
}
