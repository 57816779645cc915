"""Collectives among several streams of the program, for live_suite.py (CUDA).

A long kernel before an operation, and the use of its result right after, show a missing wait as a wrong result.
"""

import torch
import torch.distributed as dist
from live_job import CASES, after, batch, before, device, done, pair, written, x, zeros


def late(count=4):
    """A tensor that is not ready for some milliseconds of the current stream."""
    tensor = x(count)
    torch.cuda._sleep(10_000_000)
    return tensor.add_(1)


def on_a_side_stream(kind):
    side, main = kind(device=device), torch.cuda.current_stream()
    tensor = late()
    side.wait_stream(main)
    with torch.cuda.stream(side) if kind is torch.cuda.Stream else side:
        torch.cuda._sleep(10_000_000)
        dist.all_reduce(tensor)
        result = tensor * 2
    main.wait_stream(side)
    result.record_stream(main)
    return result + 1


def through_events(stream_kind, event_kind):
    """Waited for on another stream than the one it was issued on."""
    first, second = stream_kind(device=device), stream_kind(device=device)
    begun, ended = event_kind(), event_kind()
    tensor = late()
    begun.record(torch.cuda.current_stream())
    first.wait_event(begun)
    with first if stream_kind is torch.Stream else torch.cuda.stream(first):
        work = dist.all_reduce(tensor, async_op=True)
    with second if stream_kind is torch.Stream else torch.cuda.stream(second):
        work.wait()
        result = tensor * 2
        ended.record(second)
    torch.cuda.current_stream().wait_event(ended)
    return result + 1


def overlapping():
    """Collectives of two groups from two streams at a time, waited for by the default stream."""
    streams, works = [torch.cuda.Stream() for _ in range(4)], []
    for i, stream in enumerate(streams):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            tensor = late(1 << 16)
            tensor.record_stream(torch.cuda.current_stream())
            works.append((tensor, dist.all_reduce(tensor, async_op=True, group=pair if i % 2 else None)))
    return [done(*each) * 2 for each in reversed(works)]


def timed():
    """Timing events around a collective, and synchronization by the host."""
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    tensor = done(*written(dist.all_reduce, late()))
    ended.record()
    ended.synchronize()
    return tensor, begun.elapsed_time(ended) > 0, ended.query()


def captured():
    """A CUDA graph with a collective in it, replayed twice."""
    tensor, graph = x(4), torch.cuda.CUDAGraph()
    dist.all_reduce(torch.zeros_like(tensor))
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        dist.all_reduce(tensor)
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    return tensor


def register():
    CASES.update(
        stream_late=lambda: done(*written(dist.all_reduce, late())) + 1,
        stream_late_async=lambda: done(*written(dist.all_reduce, late(), async_op=True)) + 1,
        stream_late_message=lambda: batch((late(), after), (*zeros(4), before, None)),
        stream_side=lambda: on_a_side_stream(torch.cuda.Stream),
        stream_side_generic=lambda: on_a_side_stream(torch.Stream),
        stream_events=lambda: through_events(torch.cuda.Stream, torch.cuda.Event),
        stream_events_generic=lambda: through_events(torch.Stream, torch.Event),
        stream_overlapping=overlapping,
        stream_timed=timed,
        stream_captured=captured,
    )
