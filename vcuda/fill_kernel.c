/* What nodes will still take of a workload: the inner loops of vcuda/placement_costs.py.
 *
 * A scheduler asks this for every node and every GPU that a pod could get. Plain Python takes 0.7 ms for one state of a
 * node, this some microseconds: sequences of offers are the lanes of vectors, so each step serves all of them.
 * All results are sums of whole numbers, or sums in a fixed order, and do not depend on the machine.
 */
#include <math.h>
#include <stdint.h>

enum { SEQUENCES = 32, MAX_GPUS = 16, CARD = 100 };
/* Amounts are counted in steps, so that they fit into 16 bits: 2 TiB of memory, and 655 CPUs. */
enum { MIB_STEP = 64, CPU_STEP = 20 };
#define MAX16 32767

/* The offers to nodes of one model: one row for each step, with one element for each sequence. All amounts but the
 * number of GPUs are in steps. An element that stands for no offer requests more CPU than any node has. */
typedef struct {
    int64_t steps;
    const int16_t *host_cpu;
    const int16_t *host_mib;
    const int16_t *cores;
    const int16_t *mib;
    const int16_t *count;
} offers;

/* The typical tasks as nodes of one model see them. `weight` is the frequency; `price` is 0 for tasks of fewer than two
 * GPUs. `allowed` is 0 where the model is not. */
typedef struct {
    int64_t length;
    const int32_t *host_cpu;
    const int32_t *host_mib;
    const int32_t *cores;
    const int32_t *mib;
    const int32_t *count;
    const uint8_t *allowed;
    const double *weight;
    const double *price;
} tasks;

/* One model: its offers, its typical tasks, and where the price of a GPU is. */
typedef struct {
    offers offered;
    tasks typical;
    const double *price;
} model_workload;

/* The arrays of a GpuTable: `slots` rows of `width` columns. Free amounts of the node itself are by column. */
typedef struct {
    int64_t slots;
    int64_t width;
    const int32_t *free_cores;
    const int32_t *free_mib;
    const int32_t *card_mib;
    const int32_t *model;
    const uint8_t *usable;
    const int64_t *host_cpu;
    const int64_t *host_mib;
} gpu_table;

/* What is to be placed: `count` GPUs with `cores` free each, or the node's own resources alone if `count` is 0. With
 * `follows` the memory is the same share of a GPU as the cores. */
typedef struct {
    int32_t count;
    int32_t cores;
    int32_t mib;
    int32_t follows;
    int32_t host_cpu;
    int32_t host_mib;
} demand;

/* The factors of the parts of a cost. */
typedef struct {
    double fill;
    double slots;
    double model;
    double free;
    double fragmentation;
} factors;

/* The usable GPUs of one model on a node. */
typedef struct {
    int count;
    int slot[MAX_GPUS];
    int16_t cores[MAX_GPUS];
    int16_t mib[MAX_GPUS];
    int32_t host_cpu;
    int32_t host_mib;
} node_state;

static int32_t clamp32(int64_t value) {
    return value < 0 ? 0 : value > INT32_MAX / 2 ? INT32_MAX / 2 : (int32_t)value;
}

static int16_t clamp16(int64_t value) {
    return value < 0 ? 0 : value > MAX16 ? MAX16 : (int16_t)value;
}

/* The same, but below what stands for no offer. */
static int16_t clamp_below(int64_t value) {
    return value > MAX16 - 1 ? MAX16 - 1 : clamp16(value);
}

static void read_state(const gpu_table *table, int64_t column, int32_t model, node_state *state) {
    state->count = 0;
    state->host_cpu = clamp32(table->host_cpu[column]);
    state->host_mib = clamp32(table->host_mib[column]);
    for (int64_t slot = 0; slot < table->slots && state->count < MAX_GPUS; slot++) {
        int64_t at = slot * table->width + column;
        if (!table->usable[at] || table->model[at] != model)
            continue;
        state->slot[state->count] = (int)slot;
        state->cores[state->count] = clamp16(table->free_cores[at]);
        state->mib[state->count] = clamp16(table->free_mib[at] / MIB_STEP);
        state->count++;
    }
}

/* As wide as the registers of every x86-64 and arm64 processor: compilers do wider ones element by element. */
#define LANES 8
#define FILL static int64_t fill_narrow
#include "fill_lanes.h"
#undef LANES
#undef FILL

#if defined(__x86_64__) && defined(__linux__)
#define LANES 16
#define FILL __attribute__((target("avx2"))) static int64_t fill_wide
#include "fill_lanes.h"

static int has_wide_registers(void) {
    return __builtin_cpu_supports("avx2");
}
#else
#define fill_wide fill_narrow

static int has_wide_registers(void) {
    return 0;
}
#endif

/* Return the cores filled in all sequences together, if the node takes of each sequence whatever fits, in order. A share
 * goes to the GPU with the fewest free cores that fits. */
static int64_t fill(const node_state *state, const offers *offered) {
    node_state open = {.count = 0, .host_cpu = state->host_cpu, .host_mib = state->host_mib};
    /* Full GPUs take nothing, and most GPUs of a busy cluster are full. */
    for (int gpu = 0; gpu < state->count; gpu++) {
        if (!state->cores[gpu])
            continue;
        open.cores[open.count] = state->cores[gpu];
        open.mib[open.count++] = state->mib[gpu];
    }
    if (!open.count)
        return 0;
    return has_wide_registers() ? fill_wide(&open, offered) : fill_narrow(&open, offered);
}

/* Return the cores that a typical task cannot use, in the mean: all that are free where it does not fit, and otherwise
 * those of GPUs that have too few for it. */
static double fragmentation(const node_state *state, const tasks *typical) {
    int64_t total = 0;
    double sum = 0;
    for (int gpu = 0; gpu < state->count; gpu++)
        total += state->cores[gpu];
    for (int64_t at = 0; at < typical->length; at++) {
        int64_t unusable = 0;
        int found = 0, wanted = typical->count[at];
        for (int gpu = 0; gpu < state->count; gpu++) {
            int fits = state->cores[gpu] >= typical->cores[at] && state->mib[gpu] >= typical->mib[at];
            found += fits;
            unusable += fits ? 0 : state->cores[gpu];
        }
        int runs = typical->allowed[at] && wanted && found >= wanted && state->host_cpu >= typical->host_cpu[at] &&
                   state->host_mib >= typical->host_mib[at];
        sum += typical->weight[at] * (double)(runs ? unusable : total);
    }
    return sum;
}

static int32_t least(int32_t one, int32_t other) {
    return one < other ? one : other;
}

/* Return how many of a typical task of several GPUs the node could take, if it took nothing else. */
static int32_t slots_of(const node_state *state, const tasks *typical, int64_t at, int32_t unused) {
    if (!typical->allowed[at])
        return 0;
    int32_t count = unused / typical->count[at];
    if (count && typical->host_cpu[at])
        count = least(count, state->host_cpu / typical->host_cpu[at]);
    if (count && typical->host_mib[at])
        count = least(count, state->host_mib / typical->host_mib[at]);
    return count;
}

static int32_t unused_gpus(const node_state *state) {
    int32_t unused = 0;
    for (int gpu = 0; gpu < state->count; gpu++)
        unused += state->cores[gpu] == CARD;
    return unused;
}

static double priced_slots(const node_state *state, const tasks *typical) {
    int32_t unused = unused_gpus(state);
    double sum = 0;
    for (int64_t at = 0; at < typical->length && unused > 1; at++)
        if (typical->count[at] > 1)
            sum += typical->price[at] * slots_of(state, typical, at, unused);
    return sum;
}

/* Take what is to be placed: `count` GPUs of those that are flagged, beginning with position `first`. */
static void place(node_state *state, const demand *wanted, int first, const int32_t *mib_of, const uint8_t *fits) {
    int left = wanted->count;
    for (int gpu = first; gpu < state->count && left; gpu++) {
        if (!fits[gpu])
            continue;
        state->cores[gpu] = clamp16(state->cores[gpu] - wanted->cores);
        state->mib[gpu] = clamp16(state->mib[gpu] - mib_of[gpu]);
        left--;
    }
    state->host_cpu = clamp32((int64_t)state->host_cpu - wanted->host_cpu);
    state->host_mib = clamp32((int64_t)state->host_mib - wanted->host_mib);
}

/* What each part of the cost is before and after a placement; kept by the caller, as `fill` takes the most time. */
typedef struct {
    double fill;
    double slots;
    double fragmentation;
} worth;

static worth worth_of(const node_state *state, const model_workload *workload, const factors *weights, float *known) {
    worth result = {0, 0, 0};
    if (weights->fill != 0) {
        if (isnan(*known))
            *known = (float)fill(state, &workload->offered);
        result.fill = (double)*known / (SEQUENCES * CARD);
    }
    if (weights->slots != 0)
        result.slots = priced_slots(state, &workload->typical);
    if (weights->fragmentation != 0)
        result.fragmentation = fragmentation(state, &workload->typical) / CARD;
    return result;
}

/* Compute what it costs to place the demand on each of `length` columns: for every GPU that fits, and differs from those
 * before it, into `costs` (slots by columns, infinity elsewhere). `fitting` flags the GPUs that fit (slots by length).
 *
 * `fill_before` (by column of the table) and `fill_after` (slots by width of the table) keep what was computed for the
 * same state of a node; NaN where it was not. `models` are the numbers of the table's models. */
void placement_costs(const gpu_table *table, const model_workload *workloads, const demand *wanted,
                     const factors *weights, int64_t length, const int64_t *columns, const uint8_t *fitting,
                     float *fill_before, float *fill_after, double *costs) {
    for (int64_t at = 0; at < length * table->slots; at++)
        costs[at] = INFINITY;
    for (int64_t at = 0; at < length; at++) {
        int64_t column = columns[at];
        for (int64_t slot = 0; slot < table->slots; slot++) {
            int64_t place_at = slot * table->width + column;
            int32_t model = table->model[place_at];
            int is_first = 1;
            for (int64_t other = 0; other < slot && is_first; other++)
                is_first = table->model[other * table->width + column] != model;
            if (!model || !is_first)
                continue;
            node_state state;
            read_state(table, column, model, &state);
            if (!state.count)
                continue;
            uint8_t fits[MAX_GPUS];
            int32_t mib_of[MAX_GPUS], found = 0;
            double free_cores = 0;
            for (int gpu = 0; gpu < state.count; gpu++) {
                int64_t card = table->card_mib[state.slot[gpu] * table->width + column];
                int64_t mib = wanted->follows ? card * wanted->cores / CARD : wanted->mib;
                mib_of[gpu] = wanted->cores == CARD ? MAX16 : clamp16((mib + MIB_STEP - 1) / MIB_STEP);
                fits[gpu] = wanted->count && fitting[state.slot[gpu] * length + at];
                found += fits[gpu];
                free_cores += state.cores[gpu];
            }
            if (found < wanted->count)
                continue;
            const model_workload *workload = &workloads[model];
            worth before = worth_of(&state, workload, weights, &fill_before[slot * table->width + column]);
            for (int gpu = 0; gpu < state.count; gpu++) {
                int is_new = wanted->count ? fits[gpu] : gpu == 0;
                for (int other = 0; other < gpu && is_new; other++)
                    is_new = !fits[other] || state.cores[other] != state.cores[gpu] || state.mib[other] != state.mib[gpu];
                if (!is_new)
                    continue;
                node_state changed = state;
                place(&changed, wanted, gpu, mib_of, fits);
                float *known = &fill_after[state.slot[gpu] * table->width + column];
                worth after = worth_of(&changed, workload, weights, known);
                costs[state.slot[gpu] * length + at] =
                    weights->fill * (before.fill - after.fill) + weights->slots * (before.slots - after.slots) +
                    weights->fragmentation * (after.fragmentation - before.fragmentation) +
                    weights->free * free_cores / CARD +
                    weights->model * *workload->price * wanted->count * wanted->cores / CARD;
                if (wanted->count > 1 || wanted->cores == CARD)
                    break;
            }
        }
    }
}

/* Return the cores of the given columns that a typical task cannot use, in the mean. */
double cluster_fragmentation(const gpu_table *table, const model_workload *workloads, int64_t models, int64_t length,
                             const int64_t *columns) {
    double sum = 0;
    for (int64_t at = 0; at < length; at++) {
        for (int32_t model = 1; model < models; model++) {
            node_state state;
            read_state(table, columns[at], model, &state);
            if (state.count)
                sum += fragmentation(&state, &workloads[model].typical);
        }
    }
    return sum;
}

/* Add up over the given columns how many of each typical task of several GPUs fit, into `sums`. */
void cluster_slots(const gpu_table *table, const model_workload *workloads, int64_t models, int64_t length,
                   const int64_t *columns, int64_t *sums) {
    for (int64_t at = 0; at < length; at++) {
        for (int32_t model = 1; model < models; model++) {
            node_state state;
            read_state(table, columns[at], model, &state);
            if (!state.count)
                continue;
            const tasks *typical = &workloads[model].typical;
            int32_t unused = unused_gpus(&state);
            for (int64_t task = 0; task < typical->length && unused > 1; task++)
                if (typical->count[task] > 1)
                    sums[task] += slots_of(&state, typical, task, unused);
        }
    }
}
