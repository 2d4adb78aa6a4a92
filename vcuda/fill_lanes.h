/* The fill of a node, for one width of vectors; fill_kernel.c includes this once for each. The results are the same.
 *
 * LANES is the number of 16-bit elements of a vector, and FILL the head of the function. A comparison of vectors gives 0
 * or -1 in each element. */
#define JOINED(name, width) name##width
#define OF_WIDTH(name, width) JOINED(name, width)
#define VECTOR OF_WIDTH(lanes_, LANES)
#define VECTOR_IN_ARRAY OF_WIDTH(lane_array_, LANES)

typedef int16_t VECTOR __attribute__((vector_size(2 * LANES)));
/* The same in the caller's arrays, which are aligned for their elements only. */
typedef VECTOR VECTOR_IN_ARRAY __attribute__((aligned(2), may_alias));

FILL(const node_state *state, const offers *offered) {
    int64_t total = 0;
    for (int first = 0; first < SEQUENCES; first += LANES) {
        VECTOR cores[MAX_GPUS], mib[MAX_GPUS], fits[MAX_GPUS], filled = {0};
        VECTOR host_cpu = (VECTOR){0} + clamp_below(state->host_cpu / CPU_STEP);
        VECTOR host_mib = (VECTOR){0} + clamp_below(state->host_mib / MIB_STEP);
        for (int gpu = 0; gpu < state->count; gpu++) {
            cores[gpu] = (VECTOR){0} + state->cores[gpu];
            mib[gpu] = (VECTOR){0} + state->mib[gpu];
        }
        for (int64_t step = 0; step < offered->steps; step++) {
            int64_t at = step * SEQUENCES + first;
            const VECTOR cpu_needed = *(const VECTOR_IN_ARRAY *)(offered->host_cpu + at);
            const VECTOR host_needed = *(const VECTOR_IN_ARRAY *)(offered->host_mib + at);
            const VECTOR cores_needed = *(const VECTOR_IN_ARRAY *)(offered->cores + at);
            const VECTOR mib_needed = *(const VECTOR_IN_ARRAY *)(offered->mib + at);
            const VECTOR wanted = *(const VECTOR_IN_ARRAY *)(offered->count + at);
            VECTOR best = (VECTOR){0} + MAX16, found = {0};
            for (int gpu = 0; gpu < state->count; gpu++) {
                fits[gpu] = (cores[gpu] >= cores_needed) & (mib[gpu] >= mib_needed);
                VECTOR value = cores[gpu] | (MAX16 & ~fits[gpu]);
                VECTOR smaller = value < best;
                best = (value & smaller) | (best & ~smaller);
                found -= fits[gpu];
            }
            VECTOR taken = (host_cpu >= cpu_needed) & (host_mib >= host_needed) & (found >= wanted);
            VECTOR left = wanted & taken;
            host_cpu -= cpu_needed & taken;
            host_mib -= host_needed & taken;
            filled += cores_needed * left;
            for (int gpu = 0; gpu < state->count; gpu++) {
                VECTOR given = fits[gpu] & (cores[gpu] == best) & (left > 0);
                left += given;
                cores[gpu] -= cores_needed & given;
                mib[gpu] -= mib_needed & given;
            }
        }
        for (int lane = 0; lane < LANES; lane++)
            total += filled[lane];
    }
    return total;
}

#undef JOINED
#undef OF_WIDTH
#undef VECTOR
#undef VECTOR_IN_ARRAY
