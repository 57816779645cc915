/* The log of stamp.c, which alone includes this: the real functions, rows and events, what is known to be idle, and the head
 * start that the host gets. */
#include <dlfcn.h>
#include <link.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef int cudaError_t;
typedef void *cudaStream_t, *cudaEvent_t, *cudaGraph_t;

enum { RECORD, WAIT, SYNC_STREAM, SYNC_EVENT, SYNC_DEVICE, CALL, RETURN, MARK, POINT };

struct row {
    int64_t before; /* CLOCK_MONOTONIC ns when the program called */
    int64_t issued; /* when our timing event was handed to the driver */
    int64_t after;  /* when it went on, less what we took for ourselves where the call does not block */
    uint64_t stream, event;
    int32_t kind, stamp; /* stamp: index of our timing event, or one of those below */
    int32_t thread, node; /* node: the tracer's, for CALL, RETURN and MARK */
};

enum { NO_STAMP = -1, IDLE = -2 /* known to be where the stream was before */, ELSEWHERE = -3 /* on another device */ };

#define MAX_STREAMS 128
#define CALL_SUCCESS 0
#define NO_MEMORY 2 /* cudaErrorMemoryAllocation */
#define INVALID_HANDLE 400 /* cudaErrorInvalidResourceHandle: event and stream are of different devices */

static _Atomic int on, capturing;
/* In chunks that never move: other threads may be writing while there is made more room. Room is made ahead where it costs
 * the program nothing (prism_reserve), else when it is needed. */
#define CHUNK 4096
#define MAX_CHUNKS 65536
static struct row *_Atomic row_chunks[MAX_CHUNKS];
static cudaEvent_t *_Atomic event_chunks[MAX_CHUNKS];
static _Atomic int64_t n_rows, n_events;
static _Atomic int failed; /* the first error of our own: the runtime's number */
#define ROW(k) (row_chunks[(k) / CHUNK] + (k) % CHUNK)
#define EVENT(k) (event_chunks[(k) / CHUNK] + (k) % CHUNK)
static _Atomic(uint64_t) seen[MAX_STREAMS];
static _Atomic int n_seen, n_threads;
static __thread int thread_number = -1, in_call, call_async;
static __thread uint64_t call_stream, end_stream; /* the caller's, and the one that the operation runs on */
static __thread int64_t spent, entered; /* within the call: our own time, and when it began */

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

/* ---- the real functions ---- */

static int find_runtime(struct dl_phdr_info *info, size_t size, void *found) {
    (void)size;
    if (info->dlpi_name && strstr(info->dlpi_name, "libcudart.so")) {
        *(const char **)found = info->dlpi_name;
        return 1;
    }
    return 0;
}

static void *real(const char *name) {
    static void *_Atomic runtime;
    void *function = NULL, *handle = runtime;
    if (!handle) {
        const char *path = NULL;
        dl_iterate_phdr(find_runtime, &path);
        if (path)
            runtime = handle = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
    }
    if (handle)
        function = dlsym(handle, name);
    return function ? function : dlsym(RTLD_NEXT, name);
}

#define REAL(name, ...)                                       \
    static cudaError_t (*_Atomic function)(__VA_ARGS__);      \
    cudaError_t (*call)(__VA_ARGS__) = function;              \
    if (!call)                                                \
        function = call = (cudaError_t(*)(__VA_ARGS__))real(name); \
    if (!call)                                                \
        return 999 /* cudaErrorUnknown: there is no CUDA runtime */

static cudaError_t real_record(cudaEvent_t event, cudaStream_t stream) {
    REAL("cudaEventRecord", cudaEvent_t, cudaStream_t);
    return call(event, stream);
}

static void forget_error(void) {
    static cudaError_t (*last)(void);
    if (last || (last = (cudaError_t(*)(void))real("cudaGetLastError")))
        last();
}

/* The device of the log: a process may use others as well, and what it does there is not logged. */
static _Atomic int home = -1;

static int current_device(void) {
    static cudaError_t (*_Atomic get)(int *);
    int device = -1;
    if (get || (get = (cudaError_t(*)(int *))real("cudaGetDevice")))
        get(&device);
    return device;
}

static void set_device(int device) {
    cudaError_t (*set)(int) = (cudaError_t(*)(int))real("cudaSetDevice");
    if (set)
        set(device);
}

/* ---- the log ---- */

static uint64_t handle_of(cudaStream_t stream) { /* 1 is the legacy default stream's other name */
    return (uint64_t)stream == 1 ? 0 : (uint64_t)stream;
}

#define GONE UINT64_MAX /* in `seen`: a stream that was destroyed */

static void remember(uint64_t stream) {
    int count = n_seen;
    for (int k = 0; k < count && k < MAX_STREAMS; k++)
        if (seen[k] == stream)
            return;
    int place = atomic_fetch_add(&n_seen, 1);
    if (place < MAX_STREAMS)
        seen[place] = stream;
}

/* A zeroed chunk in its place; whoever comes second gives its own back. */
static void *chunk_of(void *_Atomic *place, size_t size) {
    void *chunk = *place, *none = NULL;
    if (chunk || !(chunk = calloc(CHUNK, size)))
        return chunk;
    if (atomic_compare_exchange_strong(place, &none, chunk))
        return chunk;
    free(chunk);
    return none;
}

static cudaEvent_t event_of(int64_t k) {
    static cudaError_t (*create)(cudaEvent_t *);
    if (!create && !(create = (cudaError_t(*)(cudaEvent_t *))real("cudaEventCreate")))
        return NULL;
    if (k / CHUNK >= MAX_CHUNKS || !chunk_of((void *_Atomic *)&event_chunks[k / CHUNK], sizeof(cudaEvent_t)))
        return NULL;
    if (*EVENT(k)) /* each index belongs to one thread */
        return *EVENT(k);
    int device = current_device(), away = home >= 0 && device != home; /* an event belongs to a device */
    if (away)
        set_device(home);
    if (create(EVENT(k)) != CALL_SUCCESS)
        *EVENT(k) = NULL;
    if (away)
        set_device(device);
    return *EVENT(k);
}

/* A stream of our own, on which nothing else ever runs. */
static cudaStream_t own_stream(void) {
    static cudaStream_t stream;
    cudaError_t (*create)(cudaStream_t *, unsigned);
    if (!stream && (create = (cudaError_t(*)(cudaStream_t *, unsigned))real("cudaStreamCreateWithFlags")))
        create(&stream, 1 /* non-blocking */);
    return stream;
}

static void fail(int error) {
    int none = 0;
    atomic_compare_exchange_strong(&failed, &none, error);
    on = 0;
}

/* The next event, recorded; index -1 if that fails. The program must not find our error. */
static cudaError_t stamp_event(cudaStream_t stream, int32_t *index) {
    int64_t k = atomic_fetch_add(&n_events, 1);
    cudaEvent_t event = event_of(k);
    cudaError_t status = event ? real_record(event, stream) : NO_MEMORY;
    *index = status == CALL_SUCCESS ? (int32_t)k : NO_STAMP;
    if (status == CALL_SUCCESS)
        return status;
    forget_error();
    if (event)
        real_record(event, own_stream()); /* all events are read in the end */
    return status;
}

/* A stamp that fails ends the log, which would no longer be whole, unless it was for another device's stream. */
static void stamp(struct row *row, cudaStream_t stream) {
    cudaError_t status = stamp_event(stream, &row->stamp);
    if (status == INVALID_HANDLE && row->kind != CALL && row->kind != RETURN && row->kind != MARK)
        row->stamp = ELSEWHERE;
    else if (status != CALL_SUCCESS)
        fail(status);
    row->issued = now();
}

static struct row *add(int kind, cudaStream_t stream, cudaEvent_t event, int64_t before) {
    int64_t k = atomic_fetch_add(&n_rows, 1);
    if (k / CHUNK >= MAX_CHUNKS || !chunk_of((void *_Atomic *)&row_chunks[k / CHUNK], sizeof(struct row))) {
        fail(NO_MEMORY);
        return NULL;
    }
    if (thread_number < 0)
        thread_number = atomic_fetch_add(&n_threads, 1);
    struct row *row = ROW(k);
    row->before = before;
    row->issued = row->after = before;
    row->stream = handle_of(stream);
    row->event = (uint64_t)event;
    row->kind = kind;
    row->stamp = NO_STAMP;
    row->thread = thread_number;
    row->node = -1;
    return row;
}

/* Points at which a stream has done nothing since the one before need no stamp. Which they are is learnt from an iteration,
 * by their place among its points, and holds for as much of an iteration as has the same points. */
struct place {
    uint64_t stream;
    int32_t kind, idle;
};
static struct place *_Atomic places;
static _Atomic int64_t n_places, next_place;
static _Atomic int strayed; /* this iteration is another one */

static void stamp_point(struct row *row, cudaStream_t stream) {
    int64_t k = atomic_fetch_add(&next_place, 1);
    if (k >= n_places || places[k].kind != row->kind || places[k].stream != row->stream)
        strayed = 1;
    if (!strayed && places[k].idle) {
        row->stamp = IDLE;
        return;
    }
    stamp(row, stream);
    if (row->stamp >= 0)
        remember(row->stream);
}

/* The end of an entry: `cost` is what the real call took, `spent` what we took. */
static void leave(struct row *row, int64_t cost) {
    int64_t left = now();
    if (row)
        row->after = left - cost;
    if (in_call)
        spent += left - (row ? row->before : left) - cost;
}

static int active(void) { return on && !capturing; }

/* Whether a call for `stream` belongs into the log. The default stream, also by its names 1 and 2, is the current device's;
 * another device's other streams show when they are stamped. */
static int logs(cudaStream_t stream) { return active() && ((uintptr_t)stream > 2 || current_device() == home); }

/* ---- a head start for the host ---- */

/* In one iteration the stream is held until the host blocks, so that the host is ahead and every span of the stream shows
 * the device's own time. Bounded by time: the host may wait for somebody who waits for this device. */
static _Atomic int hold_on;
static _Atomic int64_t hold_limit, hold_until, held, released;
static cudaStream_t hold_stream;

static void hold_body(void *generation) {
    const struct timespec pause = {0, 20000};
    while (released < (int64_t)(intptr_t)generation && now() < hold_until)
        nanosleep(&pause, NULL);
}

static void release(void) { released = held; }

static void hold(cudaStream_t stream) {
    static cudaError_t (*launch)(cudaStream_t, void (*)(void *), void *);
    if (!hold_on || held > released)
        return;
    if (!launch && !(launch = (cudaError_t(*)(cudaStream_t, void (*)(void *), void *))real("cudaLaunchHostFunc")))
        return;
    hold_until = now() + hold_limit;
    held++;
    if (launch(stream, hold_body, (void *)(intptr_t)held) != CALL_SUCCESS) {
        release();
        forget_error();
    }
}
