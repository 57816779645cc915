/* Stamps of streams and events: preloaded before the CUDA runtime, it sees every event that is recorded, every stream that
 * waits for one and every host call that blocks, in torch's C++ as well as in Python (torch.cuda.Event, autograd's
 * synchronisation of streams, NCCL's works), and passes all of them on unchanged.
 *
 * While it is on, each such call becomes one row of a log, with the host's time and, where a stream is at a point that
 * matters, a timing event of our own on that stream. Events are made before they are needed and read after the window.
 * No CUDA header is needed to build this: handles are pointers.
 */
#define _GNU_SOURCE
#include "log.h"

/* ---- what the program calls ---- */

static cudaError_t recorded(cudaEvent_t event, cudaStream_t stream, unsigned flags, int with_flags) {
    REAL("cudaEventRecordWithFlags", cudaEvent_t, cudaStream_t, unsigned);
    if (!logs(stream))
        return with_flags ? call(event, stream, flags) : real_record(event, stream);
    int64_t before = now();
    struct row *row = add(RECORD, stream, event, before);
    int handed_over = in_call && call_async && handle_of(stream) == call_stream; /* NCCL's stream shall wait for the caller's */
    if (in_call && !handed_over)
        end_stream = handle_of(stream);
    else if (row && !in_call)
        stamp_point(row, stream);
    int64_t called = now();
    cudaError_t status = with_flags ? call(event, stream, flags) : real_record(event, stream);
    leave(row, now() - called);
    return status;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return recorded(event, stream, 0, 0); }

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    return recorded(event, stream, flags, 1);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    REAL("cudaStreamWaitEvent", cudaStream_t, cudaEvent_t, unsigned);
    if (!logs(stream))
        return call(stream, event, flags);
    int64_t before = now();
    struct row *row = add(WAIT, stream, event, before);
    if (row && !in_call)
        stamp_point(row, stream);
    int64_t called = now();
    cudaError_t status = call(stream, event, flags);
    leave(row, now() - called);
    return status;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    REAL("cudaStreamSynchronize", cudaStream_t);
    release();
    if (!logs(stream))
        return call(stream);
    struct row *row = add(SYNC_STREAM, stream, NULL, now());
    if (row)
        stamp(row, stream);
    cudaError_t status = call(stream);
    hold(stream);
    leave(row, 0);
    return status;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    REAL("cudaEventSynchronize", cudaEvent_t);
    release();
    if (!active())
        return call(event);
    struct row *row = add(SYNC_EVENT, NULL, event, now());
    cudaError_t status = call(event);
    leave(row, 0);
    return status;
}

static void stamp_all(void) {
    int count = n_seen < MAX_STREAMS ? n_seen : MAX_STREAMS;
    for (int k = 0; k < count; k++) {
        if (seen[k] == GONE)
            continue;
        struct row *row = add(POINT, (cudaStream_t)seen[k], NULL, now());
        if (row)
            stamp(row, (cudaStream_t)seen[k]);
    }
}

cudaError_t cudaDeviceSynchronize(void) {
    REAL("cudaDeviceSynchronize", void);
    release();
    if (!logs(NULL))
        return call();
    stamp_all();
    struct row *row = add(SYNC_DEVICE, NULL, NULL, now());
    cudaError_t status = call();
    hold(hold_stream);
    leave(row, 0);
    return status;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, int kind) {
    REAL("cudaMemcpy", void *, const void *, size_t, int);
    release();
    if (!logs(NULL))
        return call(to, from, size, kind);
    struct row *row = add(SYNC_STREAM, NULL, NULL, now());
    if (row)
        stamp(row, NULL);
    cudaError_t status = call(to, from, size, kind);
    leave(row, 0);
    return status;
}

/* To memory that is not pinned the host waits for the copy, and so for the stream. */
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, cudaStream_t stream) {
    REAL("cudaMemcpyAsync", void *, const void *, size_t, int, cudaStream_t);
    static cudaError_t (*attributes)(void *, const void *);
    if (kind != 2 /* device to host */ || in_call || !logs(stream))
        return call(to, from, size, kind, stream);
    if (!attributes)
        attributes = (cudaError_t(*)(void *, const void *))real("cudaPointerGetAttributes");
    int64_t found[32] = {0}; /* cudaPointerAttributes begins with the type: 0 is memory that CUDA does not know */
    if (!attributes || attributes(found, to) != CALL_SUCCESS || (int32_t)found[0] != 0)
        return call(to, from, size, kind, stream);
    struct row *row = add(SYNC_STREAM, stream, NULL, now());
    if (row)
        stamp(row, stream);
    release();
    cudaError_t status = call(to, from, size, kind, stream);
    hold(stream);
    leave(row, 0);
    return status;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, int mode) {
    REAL("cudaStreamBeginCapture", cudaStream_t, int);
    cudaError_t status = call(stream, mode);
    if (status == CALL_SUCCESS)
        atomic_fetch_add(&capturing, 1);
    return status;
}

cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t graph, const void *dependencies,
                                          const void *edges, size_t count, int mode) {
    REAL("cudaStreamBeginCaptureToGraph", cudaStream_t, cudaGraph_t, const void *, const void *, size_t, int);
    cudaError_t status = call(stream, graph, dependencies, edges, count, mode);
    if (status == CALL_SUCCESS)
        atomic_fetch_add(&capturing, 1);
    return status;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    REAL("cudaStreamEndCapture", cudaStream_t, cudaGraph_t *);
    cudaError_t status = call(stream, graph);
    if (atomic_fetch_sub(&capturing, 1) <= 0)
        capturing = 0;
    return status;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    REAL("cudaStreamDestroy", cudaStream_t);
    for (int k = 0; k < n_seen && k < MAX_STREAMS; k++)
        if (seen[k] == handle_of(stream))
            seen[k] = GONE;
    if (hold_stream == stream)
        hold_on = 0;
    return call(stream);
}

/* ---- what the tracer calls (prism_tools/gpu/stamp.py) ---- */

/* An operation begins at host time `before` on the caller's stream; `asynchronous`: it will run on another one. Returns
 * whether a graph is being captured: then nothing is logged. */
int prism_call(uint64_t stream, int32_t node, int asynchronous, int64_t before) {
    if (capturing)
        return 1;
    if (!on)
        return 0;
    struct row *row = add(CALL, (cudaStream_t)stream, NULL, before);
    if (row) {
        row->node = node;
        stamp(row, (cudaStream_t)stream);
        remember(handle_of((cudaStream_t)stream));
    }
    in_call = 1;
    call_async = asynchronous;
    end_stream = call_stream = handle_of((cudaStream_t)stream);
    spent = 0;
    entered = now();
    if (row)
        row->after = entered;
    return 0;
}

/* It has returned; `ours`: ns of it that went to the tracer. It ends on the stream on which the backend
 * recorded its last event, without one on the caller's. `node` -1: it was refused. */
void prism_return(int32_t node, int64_t ours) {
    int64_t returned = now();
    if (!in_call)
        return;
    in_call = 0;
    struct row *row = add(RETURN, (cudaStream_t)end_stream, NULL, returned);
    if (!row)
        return;
    row->node = node;
    stamp(row, (cudaStream_t)end_stream);
    row->after = now() - (returned - entered - spent - ours);
}

/* The same two as Python functions, because a foreign function's call takes longer than all that they do. Their arguments
 * are integers, and only an interpreter calls them: what they need of it, its stable ABI, may be missing elsewhere. */
struct method {
    const char *name;
    void *(*function)(void *, void *const *, intptr_t);
    int flags;
    const char *doc;
};
#define METH_FASTCALL 0x80
extern long long PyLong_AsLongLong(void *) __attribute__((weak));
extern unsigned long long PyLong_AsUnsignedLongLong(void *) __attribute__((weak));
extern void *PyLong_FromLong(long) __attribute__((weak));
extern void *PyCFunction_NewEx(struct method *, void *, void *) __attribute__((weak));

static void *python_call(void *self, void *const *arguments, intptr_t count) {
    (void)self, (void)count;
    int captured = prism_call(PyLong_AsUnsignedLongLong(arguments[0]), (int32_t)PyLong_AsLongLong(arguments[1]),
                              (int)PyLong_AsLongLong(arguments[2]), PyLong_AsLongLong(arguments[3]));
    return PyLong_FromLong(captured);
}

static void *python_return(void *self, void *const *arguments, intptr_t count) {
    (void)self, (void)count;
    prism_return((int32_t)PyLong_AsLongLong(arguments[0]), PyLong_AsLongLong(arguments[1]));
    return PyLong_FromLong(0);
}

void *prism_python(int which) {
    static struct method methods[] = {{"call", python_call, METH_FASTCALL, NULL}, {"leave", python_return, METH_FASTCALL, NULL}};
    return PyCFunction_NewEx(&methods[which], NULL, NULL);
}

static struct row *marked;

/* A point on the caller's stream: an optimizer step. `boundary`: the first one after communication, with which an iteration
 * ends; its row says so where others name an event. */
void prism_mark(uint64_t stream, int32_t node, int boundary) {
    marked = NULL;
    if (!active())
        return;
    struct row *row = marked = add(MARK, (cudaStream_t)stream, NULL, now());
    if (!row)
        return;
    row->node = node;
    row->event = boundary;
    stamp(row, (cudaStream_t)stream);
    remember(handle_of((cudaStream_t)stream));
    if (boundary)
        next_place = strayed = 0;
}

/* The tracer is done with the step. */
void prism_marked(void) {
    if (marked)
        marked->after = now();
}

/* Have room for so many rows and events in all. 0, or -1. Not while operations are under way on other threads. */
int64_t prism_reserve(int64_t want_rows, int64_t want_events) {
    static int64_t ready_rows, ready_events;
    if (capturing)
        return 0;
    for (; ready_rows < want_rows && ready_rows / CHUNK < MAX_CHUNKS; ready_rows += CHUNK)
        chunk_of((void *_Atomic *)&row_chunks[ready_rows / CHUNK], sizeof(struct row));
    for (ready_events = ready_events > n_events ? ready_events : n_events; ready_events < want_events; ready_events++) {
        cudaEvent_t event = event_of(ready_events);
        if (!event || real_record(event, own_stream()) != CALL_SUCCESS) { /* only now does the driver make it */
            forget_error();
            return -1;
        }
    }
    return 0;
}

/* Log what the current device does from now on (1), or no more (0). */
void prism_switch(int state) {
    if (state)
        home = current_device();
    on = state;
}

/* From the next step on, `count` points of an iteration are known. */
int prism_learn(const struct place *known, int64_t count) {
    struct place *copy = malloc(count * sizeof *copy + 1);
    if (!copy || places) /* once: other threads may be reading */
        return -1;
    memcpy(copy, known, count * sizeof *copy);
    places = copy;
    n_places = count;
    return 0;
}

/* Hold the caller's stream from now on, each time until the host blocks, `limit` ns at most; 0: no more. */
void prism_hold(uint64_t stream, int64_t limit) {
    release();
    if (capturing)
        limit = 0;
    hold_on = limit > 0;
    hold_limit = limit;
    hold_stream = (cudaStream_t)stream;
    hold(hold_stream);
}

int prism_capturing(void) { return capturing != 0; }

int64_t prism_rows(void) {
    int64_t count = n_rows;
    while (count && ((count - 1) / CHUNK >= MAX_CHUNKS || !row_chunks[(count - 1) / CHUNK]))
        count = (count - 1) / CHUNK * CHUNK; /* no memory for the last ones */
    return count;
}

int64_t prism_events(void) { return n_events; }

int prism_failed(void) { return failed; }

void prism_copy_rows(struct row *target, int64_t count) {
    for (int64_t k = 0; k < count; k++)
        target[k] = *ROW(k);
}

/* One comparison of the clocks. Fills the host's time before and after an event on an idle stream was reached; returns the
 * event's index or -1. */
int64_t prism_anchor(int64_t *before, int64_t *after) {
    cudaError_t (*wait)(cudaEvent_t) = (cudaError_t(*)(cudaEvent_t))real("cudaEventSynchronize");
    if (!wait)
        return -1;
    *before = now();
    int32_t k;
    if (stamp_event(own_stream(), &k) != CALL_SUCCESS || wait(*EVENT(k)) != CALL_SUCCESS)
        return -1;
    *after = now();
    return k;
}

/* ns of each event of `index` after the event `base`; a float of ms loses precision, so the base moves along. 0, -2 where one has not
 * been reached yet, -1 for another error. */
int prism_elapsed(const int64_t *index, int64_t count, int64_t base, double *ns) {
    cudaError_t (*elapsed)(float *, cudaEvent_t, cudaEvent_t) =
        (cudaError_t(*)(float *, cudaEvent_t, cudaEvent_t))real("cudaEventElapsedTime");
    double passed = 0;
    for (int64_t k = 0; k < count; k++) {
        float ms;
        int status = elapsed ? elapsed(&ms, *EVENT(base), *EVENT(index[k])) : 999;
        if (status != CALL_SUCCESS) {
            forget_error();
            return status == 600 /* cudaErrorNotReady */ ? -2 : -1;
        }
        ns[k] = passed + ms * 1e6;
        if (ms > 100 || ms < -100) {
            passed = ns[k];
            base = index[k];
        }
    }
    return 0;
}
