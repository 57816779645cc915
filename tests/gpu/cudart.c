/* Stands in for the CUDA runtime where there is no GPU: it counts calls, and streams are always idle. An event is reached as
 * soon as it is recorded. There are two devices: stream 0xbad is of the second one. What it cannot show, streams that lag behind,
 * is in tests/golden/live. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

struct event {
    int64_t at;
    void *stream;
    int device;
};
int records, waits, syncs, errors_forgotten, current;
static void *other_stream = (void *)0xbad, *broken_stream = (void *)0xdead;

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}
int cudaGetDevice(int *device) { return *device = current, 0; }
int cudaSetDevice(int device) { return current = device, 0; }
int cudaEventCreate(struct event **e) {
    if (!(*e = calloc(1, sizeof **e)))
        return 2;
    (*e)->device = current;
    return 0;
}
static int record(struct event *e, void *stream) {
    if (e->device != (stream == other_stream || ((uintptr_t)stream < 3 && current)))
        return 400;
    if (stream == broken_stream)
        return 700;
    e->at = now();
    e->stream = stream;
    records++;
    return 0;
}
int cudaEventRecord(struct event *e, void *stream) { return record(e, stream); }
int cudaEventRecordWithFlags(struct event *e, void *stream, unsigned flags) { return flags ? 1 : record(e, stream); }
int cudaStreamWaitEvent(void *stream, struct event *e, unsigned flags) {
    (void)stream, (void)e, (void)flags;
    return waits++, 0;
}
int cudaStreamSynchronize(void *stream) { return stream == broken_stream ? 700 : (syncs++, 0); }
int cudaEventSynchronize(struct event *e) { return e->at ? 0 : 1; }
int cudaDeviceSynchronize(void) { return syncs++, 0; }
int cudaMemcpy(void *to, const void *from, size_t size, int kind) { return (void)to, (void)from, (void)size, kind; }
int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
    return (void)to, (void)from, (void)size, (void)stream, kind == 2 ? 0 : 1;
}
int cudaPointerGetAttributes(int *type, const void *pointer) { return *type = (uintptr_t)pointer == 0x7000 ? 1 : 0, 0; }
int cudaStreamDestroy(void *stream) { return (void)stream, 0; }
int cudaStreamBeginCaptureToGraph(void *stream, void *graph, void *nodes, void *edges, size_t count, int mode) {
    return (void)stream, (void)graph, (void)nodes, (void)edges, (void)count, mode;
}
int cudaStreamBeginCapture(void *stream, int mode) { return (void)stream, mode; }
int cudaStreamEndCapture(void *stream, void **graph) { return (void)stream, *graph = NULL, 0; }
int cudaStreamCreateWithFlags(void **stream, unsigned flags) { return *stream = (void *)(uintptr_t)(0x1000 + flags), 0; }
int cudaGetLastError(void) { return errors_forgotten++, 0; }
int cudaLaunchHostFunc(void *stream, void (*body)(void *), void *data) { return (void)stream, body(data), 0; }
int cudaEventElapsedTime(float *ms, struct event *from, struct event *to) {
    return from->at && to->at ? (*ms = (to->at - from->at) / 1e6f, 0) : 400;
}
