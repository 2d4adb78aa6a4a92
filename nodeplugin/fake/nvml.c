/* A fake libnvidia-ml.so.1 for machines without GPUs.
 *
 * It implements NVML from a YAML file (description.h). The file is read again when it has changed, so a card that is
 * marked as lost there is lost with the next call. What programs do on the fake CUDA driver is added.
 *
 * Compiled with -DR470 it lacks the functions that a driver of that branch lacks; with -DR615 it has those of that one.
 */
#define _GNU_SOURCE
#include "description.h"
#include "device_state.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, TIMEOUT = 10, GPU_IS_LOST = 15, UNKNOWN = 999
};
static const struct { const char *name; int code; } ERRORS[] = {
    {"uninitialized", UNINITIALIZED}, {"not_supported", NOT_SUPPORTED}, {"no_permission", NO_PERMISSION},
    {"not_found", NOT_FOUND}, {"driver_not_loaded", DRIVER_NOT_LOADED}, {"timeout", TIMEOUT},
    {"gpu_is_lost", GPU_IS_LOST}, {"unknown", UNKNOWN}};
/* nvmlGpuTopologyLevel_t */
static const struct { const char *name; unsigned level; } PATHS[] = {
    {"board", 0}, {"pix", 10}, {"pxb", 20}, {"phb", 30}, {"node", 40}, {"sys", 50}};

#define MAX_MIG 8
/* nvmlEventTypeXidCriticalError */
#define XID_EVENT 8ULL
/* NVML_FI_DEV_GET_GPU_RECOVERY_ACTION */
#define RECOVERY_ACTION 230
/* An event of the whole card. */
#define NO_INSTANCE 0xFFFFFFFF

static int initialized;
/* Guards everything here and the description. Every NVML call holds it from begin() to done(), except while it lingers
 * for delayMs: a card may hang while others answer. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Handles are fixed addresses, so that they stay valid when the file changes; mig is -1 for the card itself. */
struct handle { int card, mig; };
static struct handle handles[MAX_CARDS][MAX_MIG + 1];

static int error_named(const char *value) {
    if (!value) return SUCCESS;
    for (size_t each = 0; each < sizeof ERRORS / sizeof *ERRORS; each++)
        if (!strcmp(ERRORS[each].name, value)) return ERRORS[each].code;
    return (int)number(value, UNKNOWN);
}

/* Wait for delayMs, which ends early when the file says so: a card that hangs may answer at last. */
static void linger(int card) {
    for (unsigned long long waited = 0; waited < number(get("cards[%d].delayMs", card), 0); waited += 10) {
        pthread_mutex_unlock(&lock);
        usleep(10000);
        pthread_mutex_lock(&lock);
        load_description();
    }
}

/* Start a call: take the lock, read the file, and return the error that the file configures for it. */
static int begin(const char *call) {
    pthread_mutex_lock(&lock);
    int error = initialized ? (load_description() ? SUCCESS : DRIVER_NOT_LOADED) : UNINITIALIZED;
    return error ? error : error_named(get("failures.%s", call));
}

static int begin_device(const struct handle *device, const char *call) {
    int error = begin(call);
    if (error) return error;
    if (!device || device < &handles[0][0] || device >= &handles[MAX_CARDS][0]) return INVALID_ARGUMENT;
    linger(device->card);
    if (device->card >= count_of("cards") || truth(get("cards[%d].lost", device->card))) return GPU_IS_LOST;
    error = error_named(get("cards[%d].failures.%s", device->card, call));
    return error || device->mig < 0 ? error : error_named(get("cards[%d].mig[%d].failures.%s", device->card, device->mig, call));
}

static int done(int result) {
    pthread_mutex_unlock(&lock);
    return result;
}

static int text(char *target, unsigned length, const char *value) {
    if (!value) return NOT_SUPPORTED;
    if (strlen(value) >= length) return INSUFFICIENT_SIZE;
    strcpy(target, value);
    return SUCCESS;
}

static const char *of(const struct handle *device, const char *name) {
    return device->mig < 0 ? get("cards[%d].%s", device->card, name)
                           : get("cards[%d].mig[%d].%s", device->card, device->mig, name);
}

#define WITH_DEVICE(call) int error = begin_device(device, call); if (error) return done(error)

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    pthread_mutex_lock(&lock);
    int error = (load_description() ? SUCCESS : DRIVER_NOT_LOADED);
    if (!error) error = error_named(get("failures.init"));
    if (!error) {
        initialized++;
        for (int card = 0; card < MAX_CARDS; card++)
            for (int mig = 0; mig <= MAX_MIG; mig++) handles[card][mig] = (struct handle){card, mig - 1};
    }
    return done(error);
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlInit(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) {
    pthread_mutex_lock(&lock);
    if (initialized) initialized--;
    return done(SUCCESS);
}

const char *nvmlErrorString(int result) {
    for (size_t each = 0; each < sizeof ERRORS / sizeof *ERRORS; each++)
        if (ERRORS[each].code == result) return ERRORS[each].name;
    return result ? "failed" : "success";
}

int nvmlSystemGetDriverVersion(char *version, unsigned length) {
    int error = begin("driverVersion");
    const char *configured = get("driver");
    return done(error ? error : text(version, length, configured ? configured : "550.54.15"));
}
int nvmlSystemGetNVMLVersion(char *version, unsigned length) {
    int error = begin("nvmlVersion");
    return done(error ? error : text(version, length, "12.550.54.15"));
}
int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    int error = begin("cudaVersion");
    if (!error) *version = (int)number(get("cuda"), 12040);
    return done(error);
}
int nvmlSystemGetCudaDriverVersion(int *version) { return nvmlSystemGetCudaDriverVersion_v2(version); }

int nvmlDeviceGetCount_v2(unsigned *count) {
    int error = begin("count");
    if (!error) *count = (unsigned)count_of("cards");
    return done(error);
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct handle **device) {
    int error = begin("handle");
    if (!error && index >= (unsigned)count_of("cards")) error = INVALID_ARGUMENT;
    if (!error) linger((int)index);
    if (!error && truth(get("cards[%u].lost", index))) error = GPU_IS_LOST;
    if (!error) *device = &handles[index][0];
    return done(error);
}
int nvmlDeviceGetHandleByUUID(const char *uuid, struct handle **device) {
    int error = begin("handle");
    if (error) return done(error);
    for (int card = 0; card < count_of("cards"); card++) {
        const char *found = get("cards[%d].uuid", card);
        if (found && !strcmp(found, uuid)) {
            linger(card);
            *device = &handles[card][0];
            return done(truth(get("cards[%d].lost", card)) ? GPU_IS_LOST : SUCCESS);
        }
        for (int mig = 0; mig < MAX_MIG; mig++) {
            found = get("cards[%d].mig[%d].uuid", card, mig);
            if (found && !strcmp(found, uuid)) {
                *device = &handles[card][mig + 1];
                return done(SUCCESS);
            }
        }
    }
    return done(NOT_FOUND);
}

int nvmlDeviceGetUUID(struct handle *device, char *uuid, unsigned length) {
    WITH_DEVICE("uuid");
    return done(text(uuid, length, of(device, "uuid")));
}
int nvmlDeviceGetName(struct handle *device, char *name, unsigned length) {
    WITH_DEVICE("name");
    const char *product = get("cards[%d].product", device->card), *profile = of(device, "profile");
    char both[256];
    snprintf(both, sizeof both, device->mig < 0 ? "%s" : "%s MIG %s", product ? product : "NVIDIA T4", profile ? profile : "");
    return done(text(name, length, both));
}
int nvmlDeviceGetIndex(struct handle *device, unsigned *index) {
    WITH_DEVICE("index");
    *index = (unsigned)device->card;
    return done(SUCCESS);
}
int nvmlDeviceGetMinorNumber(struct handle *device, unsigned *minor) {
    WITH_DEVICE("minor");
    *minor = (unsigned)number(get("cards[%d].minor", device->card), (unsigned)device->card);
    return done(SUCCESS);
}
int nvmlDeviceGetCudaComputeCapability(struct handle *device, int *major, int *minor) {
    WITH_DEVICE("capability");
    const char *configured = get("cards[%d].capability", device->card);
    return done(sscanf(configured ? configured : "8.0", "%d.%d", major, minor) == 2 ? SUCCESS : UNKNOWN);
}

struct memory { unsigned long long total, free, used; };
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };
static int memory(struct handle *device, struct memory *found) {
    const char *configured = of(device, "memoryMiB");
    if (!configured) return NOT_SUPPORTED;
    unsigned long long used = number(of(device, "usedMiB"), 0);
    for (int each = 0; device->mig < 0 && get("cards[%d].processes[%d].pid", device->card, each); each++)
        used += number(get("cards[%d].processes[%d].memoryMiB", device->card, each), 0);
    found->total = number(configured, 0) << 20;
    found->used = (used << 20) + (device->mig < 0 ? observe_bytes(device->card) : 0);
    found->free = found->total > found->used ? found->total - found->used : 0;
    return SUCCESS;
}
int nvmlDeviceGetMemoryInfo(struct handle *device, struct memory *found) {
    WITH_DEVICE("memory");
    return done(memory(device, found));
}
#ifndef R470
int nvmlDeviceGetMemoryInfo_v2(struct handle *device, struct memory_v2 *found) {
    WITH_DEVICE("memory");
    struct memory plain = {0, 0, 0};
    error = memory(device, &plain);
    found->total = plain.total, found->reserved = number(of(device, "reservedMiB"), 0) << 20;
    found->used = plain.used;
    found->free = plain.free > found->reserved ? plain.free - found->reserved : 0;
    return done(error);
}
#endif

/* Only what GPU needs to be reset, which is known from r565 on: recoveryAction, 0 if none. */
struct field_value {
    unsigned field, scope;
    long long at, latency;
    int type, result;
    union { unsigned number; unsigned long long wide; double real; } value;
};
#ifndef R470
int nvmlDeviceGetFieldValues(struct handle *device, int count, struct field_value *values) {
    WITH_DEVICE("fields");
    for (int each = 0; each < count; each++) {
        const char *configured = get("cards[%d].recoveryAction", device->card);
        values[each].result = values[each].field == RECOVERY_ACTION && configured ? SUCCESS : NOT_SUPPORTED;
        values[each].value.wide = number(configured, 0);
    }
    return done(SUCCESS);
}
#endif

struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; };
static int pci(int card, struct pci *found) {
    char otherwise[32];
    snprintf(otherwise, sizeof otherwise, "00000000:%02X:00.0", card + 1);
    const char *configured = get("cards[%d].bus", card);
    memset(found, 0, sizeof *found);
    snprintf(found->bus_id, sizeof found->bus_id, "%s", configured ? configured : otherwise);
    snprintf(found->legacy, sizeof found->legacy, "%.15s", found->bus_id + 4);
    sscanf(found->bus_id, "%x:%x:%x", &found->domain, &found->bus, &found->device);
    return SUCCESS;
}
int nvmlDeviceGetPciInfo_v3(struct handle *device, struct pci *found) {
    WITH_DEVICE("pci");
    return done(pci(device->card, found));
}
int nvmlDeviceGetNumaNodeId(struct handle *device, unsigned *node) {
    WITH_DEVICE("numa");
    const char *configured = get("cards[%d].numa", device->card);
    *node = (unsigned)number(configured, 0);
    return done(configured ? SUCCESS : NOT_SUPPORTED);
}

/* An attribute of the link between two cards, as in links: [{a: 0, b: 1, nvlink: 4, path: pix}]. */
static const char *link_of(int one, int other, const char *what) {
    for (int each = 0; get("links[%d].a", each); each++) {
        int a = (int)number(get("links[%d].a", each), 0), b = (int)number(get("links[%d].b", each), 0);
        if ((a == one && b == other) || (a == other && b == one)) return get("links[%d].%s", each, what);
    }
    return NULL;
}
int nvmlDeviceGetTopologyCommonAncestor(struct handle *device, struct handle *other, unsigned *level) {
    WITH_DEVICE("topology");
    const char *path = link_of(device->card, other->card, "path");
    const char *mine = get("cards[%d].numa", device->card), *its = get("cards[%d].numa", other->card);
    *level = mine && its && !strcmp(mine, its) ? 40 : 50;
    for (size_t each = 0; path && each < sizeof PATHS / sizeof *PATHS; each++)
        if (!strcmp(PATHS[each].name, path)) *level = PATHS[each].level;
    return done(SUCCESS);
}
/* The card at the other end of an NVLink, -1 for an NVSwitch; returns whether the link is active. Links to switches are
 * numbered first, then those to each other card in the order of the cards. */
static int peer_of(int card, unsigned link, int *peer) {
    unsigned before = (unsigned)number(get("cards[%d].nvswitchLinks", card), 0);
    if (link < before) return *peer = -1, 1;
    for (int other = 0; other < count_of("cards"); other++) {
        unsigned links = other == card ? 0 : (unsigned)number(link_of(card, other, "nvlink"), 0);
        if (link < before + links) return *peer = other, 1;
        before += links;
    }
    return 0;
}
int nvmlDeviceGetNvLinkState(struct handle *device, unsigned link, unsigned *active) {
    WITH_DEVICE("nvlink");
    if (link < number(get("cards[%d].unusedNvlinks", device->card), 0)) return done(NOT_SUPPORTED);
    link -= (unsigned)number(get("cards[%d].unusedNvlinks", device->card), 0);
    int peer, any = has("links[0].nvlink") || get("cards[%d].nvswitchLinks", device->card);
    *active = (unsigned)peer_of(device->card, link, &peer);
    return done(*active ? SUCCESS : any && link < 18 ? SUCCESS : NOT_SUPPORTED);
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(struct handle *device, unsigned link, struct pci *found) {
    WITH_DEVICE("nvlink");
    int peer;
    link -= (unsigned)number(get("cards[%d].unusedNvlinks", device->card), 0);
    if (!peer_of(device->card, link, &peer)) return done(NOT_SUPPORTED);
    if (peer >= 0) return done(pci(peer, found));
    memset(found, 0, sizeof *found);
    strcpy(found->bus_id, "00000000:C0:00.0");
    return done(SUCCESS);
}
int nvmlDeviceGetNvLinkRemoteDeviceType(struct handle *device, unsigned link, unsigned *type) {
    WITH_DEVICE("nvlink");
    int peer;
    link -= (unsigned)number(get("cards[%d].unusedNvlinks", device->card), 0);
    if (!peer_of(device->card, link, &peer)) return done(NOT_SUPPORTED);
    *type = peer >= 0 ? 0 : 2;
    return done(SUCCESS);
}

int nvmlDeviceGetMigMode(struct handle *device, unsigned *current, unsigned *coming) {
    WITH_DEVICE("mig");
    if (!truth(get("cards[%d].migCapable", device->card)) && !get("cards[%d].mig[0].uuid", device->card) &&
        !truth(get("cards[%d].migMode", device->card)))
        return done(NOT_SUPPORTED);
    *current = *coming = get("cards[%d].mig[0].uuid", device->card) || truth(get("cards[%d].migMode", device->card));
    return done(SUCCESS);
}
int nvmlDeviceGetMaxMigDeviceCount(struct handle *device, unsigned *count) {
    WITH_DEVICE("mig");
    *count = MAX_MIG;
    return done(SUCCESS);
}
int nvmlDeviceGetMigDeviceHandleByIndex(struct handle *device, unsigned index, struct handle **found) {
    WITH_DEVICE("mig");
    if (index >= MAX_MIG || !get("cards[%d].mig[%u].uuid", device->card, index)) return done(NOT_FOUND);
    *found = &handles[device->card][index + 1];
    return done(SUCCESS);
}
int nvmlDeviceGetGpuInstanceId(struct handle *device, unsigned *id) {
    WITH_DEVICE("mig");
    *id = (unsigned)number(of(device, "gi"), 0);
    return done(device->mig < 0 ? NOT_SUPPORTED : SUCCESS);
}
int nvmlDeviceGetComputeInstanceId(struct handle *device, unsigned *id) {
    WITH_DEVICE("mig");
    *id = (unsigned)number(of(device, "ci"), 0);
    return done(device->mig < 0 ? NOT_SUPPORTED : SUCCESS);
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(struct handle *device, struct handle **found) {
    WITH_DEVICE("mig");
    *found = &handles[device->card][0];
    return done(SUCCESS);
}
int nvmlDeviceIsMigDeviceHandle(struct handle *device, unsigned *is) {
    WITH_DEVICE("mig");
    *is = device->mig >= 0;
    return done(SUCCESS);
}

/* What a card did in the last second, as it was lagMs ago: the real driver also reports late, and about no longer time. */
#define LONGEST_SAMPLE_US 1000000
struct sample_time { unsigned long long from_us, to_us; };
static unsigned long long real_time_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (unsigned long long)now.tv_sec * 1000000 + (unsigned long long)now.tv_nsec / 1000;
}
static struct sample_time sample_since(int card, unsigned long long since_us) {
    unsigned long long to = real_time_us() - 1000 * number(get("cards[%d].lagMs", card), 100);
    return (struct sample_time){since_us > to - LONGEST_SAMPLE_US ? since_us : to - LONGEST_SAMPLE_US, to};
}
/* The processes of the fake CUDA driver, with the time that they were busy. */
static int observe(int card, struct sample_time time, struct observed_process *found) {
    uint64_t now = now_ns(), real = real_time_us();
    return observe_processes(card, now - (real - time.from_us) * 1000, now - (real - time.to_us) * 1000, found, MAX_PROCESSES);
}
static unsigned percent(uint64_t busy, struct sample_time time) {
    uint64_t length = (time.to_us - time.from_us) * 1000;
    return (unsigned)((100 * busy + length / 2) / length);
}

static unsigned described_processes(int card) {
    unsigned total = 0;
    while (get("cards[%d].processes[%u].pid", card, total)) total++;
    return total;
}

struct process { unsigned pid; unsigned long long used; unsigned gi, ci; };
int nvmlDeviceGetComputeRunningProcesses_v2(struct handle *device, unsigned *count, struct process *found) {
    WITH_DEVICE("processes");
    static struct observed_process observed[MAX_PROCESSES];
    unsigned described = described_processes(device->card), capacity = *count;
    int running = device->mig < 0 ? observe(device->card, sample_since(device->card, 0), observed) : 0;
    *count = described + (unsigned)running;
    if (*count > capacity) return done(INSUFFICIENT_SIZE);
    for (unsigned each = 0; each < described; each++)
        found[each] = (struct process){
            (unsigned)number(get("cards[%d].processes[%u].pid", device->card, each), 0),
            number(get("cards[%d].processes[%u].memoryMiB", device->card, each), 0) << 20, NO_INSTANCE, NO_INSTANCE};
    for (int each = 0; each < running; each++)
        found[described + (unsigned)each] = (struct process){observed[each].pid, observed[each].bytes, NO_INSTANCE, NO_INSTANCE};
    return done(SUCCESS);
}
int nvmlDeviceGetGraphicsRunningProcesses_v2(struct handle *device, unsigned *count, struct process *found) {
    (void)found;
    WITH_DEVICE("processes");
    *count = 0;
    return done(SUCCESS);
}
#ifndef R470
int nvmlDeviceGetComputeRunningProcesses_v3(struct handle *device, unsigned *count, struct process *found) {
    return nvmlDeviceGetComputeRunningProcesses_v2(device, count, found);
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(struct handle *device, unsigned *count, struct process *found) {
    return nvmlDeviceGetGraphicsRunningProcesses_v2(device, count, found);
}
#endif
struct sample { unsigned pid; unsigned long long at; unsigned sm, mem, enc, dec; };
int nvmlDeviceGetProcessUtilization(struct handle *device, struct sample *found, unsigned *count, unsigned long long since) {
    WITH_DEVICE("processUtilization");
    static struct observed_process observed[MAX_PROCESSES];
    struct sample_time time = sample_since(device->card, since);
    unsigned described = described_processes(device->card), capacity = found ? *count : 0;
    int running = time.from_us < time.to_us ? observe(device->card, time, observed) : 0;
    *count = described + (unsigned)running;
    if (!*count) return done(NOT_FOUND);
    if (*count > capacity) return done(INSUFFICIENT_SIZE);
    for (unsigned each = 0; each < described; each++)
        found[each] = (struct sample){
            (unsigned)number(get("cards[%d].processes[%u].pid", device->card, each), 0), since + 1,
            (unsigned)number(get("cards[%d].processes[%u].sm", device->card, each), 0), 0, 0, 0};
    for (int each = 0; each < running; each++)
        found[described + (unsigned)each] = (struct sample){observed[each].pid, time.to_us, percent(observed[each].busy_ns, time), 0, 0, 0};
    return done(SUCCESS);
}
int nvmlDeviceGetUtilizationRates(struct handle *device, unsigned found[2]) {
    WITH_DEVICE("utilization");
    static struct observed_process observed[MAX_PROCESSES];
    struct sample_time time = sample_since(device->card, 0);
    uint64_t busy = 0;
    for (int each = observe(device->card, time, observed); each--;) busy += observed[each].busy_ns;
    unsigned sum = (unsigned)number(get("cards[%d].utilization", device->card), 0) + percent(busy, time);
    found[0] = sum > 100 ? 100 : sum, found[1] = 0;
    return done(SUCCESS);
}
int nvmlDeviceGetTemperature(struct handle *device, unsigned sensor, unsigned *degrees) {
    (void)sensor;
    WITH_DEVICE("temperature");
    *degrees = (unsigned)number(get("cards[%d].temperature", device->card), 40);
    return done(SUCCESS);
}
int nvmlDeviceGetPowerUsage(struct handle *device, unsigned *milliwatts) {
    WITH_DEVICE("power");
    *milliwatts = (unsigned)number(get("cards[%d].powerW", device->card), 50) * 1000;
    return done(SUCCESS);
}

/* An event set: events that are appended to the file's list after its creation are reported to it, once each. */
struct set { int reported; unsigned long long cards; };
int nvmlEventSetCreate(struct set **set) {
    int error = begin("events");
    if (!error) {
        *set = calloc(1, sizeof **set);
        (*set)->reported = count_of("events");
    }
    return done(error);
}
int nvmlEventSetFree(struct set *set) {
    free(set);
    return SUCCESS;
}
int nvmlDeviceGetSupportedEventTypes(struct handle *device, unsigned long long *types) {
    WITH_DEVICE("events");
    *types = XID_EVENT;
    return done(SUCCESS);
}
int nvmlDeviceRegisterEvents(struct handle *device, unsigned long long types, struct set *set) {
    WITH_DEVICE("events");
    if (types & XID_EVENT) set->cards |= 1ULL << device->card;
    return done(SUCCESS);
}
struct event { struct handle *device; unsigned long long type, data; unsigned gi, ci; };
int nvmlEventSetWait_v2(struct set *set, struct event *event, unsigned timeout_ms) {
    for (unsigned waited = 0;; waited += 50) {
        int error = begin("wait");
        if (error) return done(error);
        while (set->reported < count_of("events")) {
            int card = (int)number(get("events[%d].card", set->reported), 0);
            unsigned long long xid = number(get("events[%d].xid", set->reported), 0);
            set->reported++;
            if (card < 0 || card >= MAX_CARDS || !(set->cards >> card & 1)) continue;
            unsigned gi = (unsigned)number(get("events[%d].gi", set->reported - 1), NO_INSTANCE);
            unsigned ci = (unsigned)number(get("events[%d].ci", set->reported - 1), NO_INSTANCE);
            *event = (struct event){&handles[card][0], XID_EVENT, xid, gi, ci};
            return done(SUCCESS);
        }
        done(SUCCESS);
        if (waited >= timeout_ms) return TIMEOUT;
        usleep(50000);
    }
}

/* The memory limits of cgroups, of drivers from r615 on: compiled with -DR615. They are stored in memory-limits.txt
 * beside the description, or in $QUOTIENT_FAKE_LIMITS, one line for each card and cgroup: uuid, soft limit, hard limit,
 * inode, path. Removing a cgroup removes its limits, which the inode tells from a new one at the same path. */
#ifdef R615
#define NO_LIMIT 0xFFFFFFFFFFFFFFFFULL
#define MAX_LINE 4700
struct limits { char *cgroup; unsigned long long soft, hard, used; };

static const char *limits_file(const char *suffix) {
    static char path[4200];
    const char *named = getenv("QUOTIENT_FAKE_LIMITS"), *described = description_file(), *slash = strrchr(described, '/');
    if (named && *named) snprintf(path, sizeof path, "%s%s", named, suffix);
    else snprintf(path, sizeof path, "%.*smemory-limits.txt%s", slash ? (int)(slash - described) + 1 : 0, described, suffix);
    return path;
}

/* Look a cgroup up in the file. With `copy`, all other lines are written there. */
static void find_limits(const char *uuid, const struct stat *folder, struct limits *found, FILE *copy) {
    char line[MAX_LINE], whose[128];
    unsigned long long soft, hard, inode;
    FILE *stream = fopen(limits_file(""), "r");
    while (stream && fgets(line, sizeof line, stream)) {
        int is_it = sscanf(line, "%127s %llu %llu %llu ", whose, &soft, &hard, &inode) == 4 && !strcmp(whose, uuid) &&
                    inode == folder->st_ino;
        if (is_it) found->soft = soft, found->hard = hard;
        else if (copy) fputs(line, copy);
    }
    if (stream) fclose(stream);
}

static int find_folder(const struct handle *device, const struct limits *limits, struct stat *folder) {
    if (device->mig >= 0 || get("cards[%d].mig[0].uuid", device->card) || !get("cards[%d].uuid", device->card))
        return NOT_SUPPORTED;
    if (!limits || !limits->cgroup) return INVALID_ARGUMENT;
    return stat(limits->cgroup, folder) || !S_ISDIR(folder->st_mode) ? NOT_FOUND : SUCCESS;
}

int nvmlDeviceSetMemoryLimits_v1(struct handle *device, struct limits *limits) {
    WITH_DEVICE("setMemoryLimits");
    struct stat folder;
    if ((error = find_folder(device, limits, &folder))) return done(error);
    if (limits->soft > limits->hard) return done(INVALID_ARGUMENT);
    if (truth(get("cards[%d].ignoresMemoryLimits", device->card))) return done(SUCCESS);
    const char *uuid = get("cards[%d].uuid", device->card);
    FILE *copy = fopen(limits_file(".new"), "w");
    if (!copy) return done(NO_PERMISSION);
    struct limits old;
    find_limits(uuid, &folder, &old, copy);
    if (limits->soft || limits->hard != NO_LIMIT)
        fprintf(copy, "%s %llu %llu %llu %s\n", uuid, limits->soft, limits->hard, (unsigned long long)folder.st_ino,
                limits->cgroup);
    fclose(copy);
    char from[4200];
    snprintf(from, sizeof from, "%s", limits_file(".new"));
    return done(rename(from, limits_file("")) ? UNKNOWN : SUCCESS);
}

/* The caller's struct has one field more than that of the other call. */
int nvmlDeviceGetMemoryLimits_v1(struct handle *device, struct limits *limits) {
    WITH_DEVICE("getMemoryLimits");
    struct stat folder;
    if ((error = find_folder(device, limits, &folder))) return done(error);
    limits->soft = 0, limits->hard = NO_LIMIT, limits->used = 0;
    find_limits(get("cards[%d].uuid", device->card), &folder, limits, NULL);
    return done(SUCCESS);
}
#endif
