/* A createRuntime hook of the OCI runtime: has the node plugin set the driver's memory limit on a container's cgroup.
 *
 *     apply-memory-limit SOCKET TOKEN  < state of the container, as JSON
 *
 * It runs in the host's namespaces, when the container's cgroup exists and none of its programs runs. It only asks: the
 * plugin finds the cgroup, sets the limit and reads it back. Any other answer than "ok", or none in time, makes the
 * runtime give up the container, because it would have the whole card's memory.
 */
#define _GNU_SOURCE
#include "oci_state.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

/* For everything: the state, connecting, and the answer. The kubelet starts containers of a pod one after another. */
#define WAIT_S 5
#define RETRY_NS 50000000
#define MAX_MESSAGE 512
#define MAX_ANSWER 4096

const char FAILURE[] = "the driver's memory limit of the container cannot be set";
const char REMEDY[] = "";

/* What the hook waits for, for the signal handler. */
static const char *volatile waiting_for = "the runtime has sent no state";

static void give_up(int signal) {
    static const char before[] = "quotient: the driver's memory limit of the container cannot be set: ";
    static const char after[] = " within 5 s; see the log of Quotient's node plugin on this node\n";
    const char *reason = waiting_for;
    (void)signal;
    if (write(STDERR_FILENO, before, sizeof before - 1) < 0 || write(STDERR_FILENO, reason, strlen(reason)) < 0 ||
        write(STDERR_FILENO, after, sizeof after - 1) < 0)
        _exit(1);
    _exit(1);
}

/* The kernel's timer of this kind is monotonic. A mask or handler of the runtime's is inherited. */
static void limit_time(void) {
    struct sigaction action = {.sa_handler = give_up};
    struct itimerval timer = {.it_value = {.tv_sec = WAIT_S}};
    sigset_t alarms;
    sigemptyset(&alarms);
    sigaddset(&alarms, SIGALRM);
    if (sigaction(SIGALRM, &action, NULL) || sigprocmask(SIG_UNBLOCK, &alarms, NULL) ||
        setitimer(ITIMER_REAL, &timer, NULL))
        fail("timer");
}

/* A plugin that is being replaced has no socket, or a dead one, for a moment: that must not fail a start. */
static int connect_to(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct timespec pause = {.tv_nsec = RETRY_NS};
    errno = ENAMETOOLONG;
    if (strlen(path) >= sizeof address.sun_path)
        fail("%s", path);
    strcpy(address.sun_path, path);
    waiting_for = "Quotient's node plugin, which sets it, did not accept a connection";
    for (;;) {
        int connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (connection < 0)
            fail("socket");
        if (!connect(connection, (struct sockaddr *)&address, sizeof address))
            return connection;
        if (errno != ENOENT && errno != ECONNREFUSED && errno != EAGAIN)
            fail("%s", path);
        close(connection);
        nanosleep(&pause, NULL);
    }
}

static void send_all(int connection, const char *text, size_t length) {
    while (length) {
        ssize_t count = send(connection, text, length, MSG_NOSIGNAL);
        if (count < 0)
            fail("the node plugin does not read the request");
        text += count, length -= (size_t)count;
    }
}

static void receive_answer(int connection) {
    static char answer[MAX_ANSWER + 1];
    size_t size = 0;
    ssize_t count;
    while (size < MAX_ANSWER && (count = recv(connection, answer + size, MAX_ANSWER - size, 0)) != 0) {
        if (count < 0)
            fail("the node plugin does not answer");
        size += (size_t)count;
    }
    errno = 0;
    /* A part of an answer is none. */
    if (!size || answer[size - 1] != '\n')
        fail("the node plugin closed the connection without an answer");
    answer[size - 1] = 0;
    if (strcmp(answer, "ok"))
        fail("%s", answer);
}

int main(int count, char **arguments) {
    char message[MAX_MESSAGE];
    if (count != 3)
        fail("usage: apply-memory-limit SOCKET TOKEN");
    limit_time();
    const char *state = read_all(STDIN_FILENO, "the state"), *token = arguments[2];
    long pid = number_in(member(state, "pid"), "process in the state");
    const char *id = text_in(member(state, "id"), "id in the state");
    errno = 0;
    if (strpbrk(token, "\"\\\n"))
        fail("the token is not valid");
    int length = snprintf(message, sizeof message, "{\"token\":\"%s\",\"pid\":%ld,\"id\":\"%s\"}\n", token, pid, id);
    if (length < 0 || (size_t)length >= sizeof message)
        fail("the token or the container's id is too long");
    int connection = connect_to(arguments[1]);
    waiting_for = "Quotient's node plugin, which sets it, did not answer";
    send_all(connection, message, (size_t)length);
    receive_answer(connection);
    return 0;
}
