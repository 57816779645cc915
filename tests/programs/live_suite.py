"""Uses of torch.distributed that programs may choose: each rank appends a line `case: digest` for each to the file OUT.RANK.

Run it under torchrun with an even number of ranks. Any two runs with the same options write the same lines. A digest is of
all bytes of all results; of an exception it is the type and the text's first line. What a backend refuses is a case too, where
it refuses it on all ranks alike. Sums are of small whole numbers; those of models' gradients always have the same order.
"""

import subprocess
import sys
import threading
import zlib
from datetime import timedelta
from functools import partial

import live_functional
import live_models
import live_streams
import live_types
import torch
import torch.distributed as dist
from live_job import (
    CASES,
    START,
    after,
    backend,
    batch,
    before,
    case,
    case_if,
    cuda,
    current,
    device,
    done,
    even,
    options,
    outcome,
    pair,
    rank,
    wait_all,
    world,
    written,
    x,
    zeros,
)
from torch._C import _distributed_c10d
from torch.distributed import ReduceOp, distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

# Collectives: synchronous, asynchronous, in a group of two; n is the group's size


def chosen(value, o):
    """The value on the group's rank 1, the root of every case; None elsewhere."""
    return value if dist.get_rank(o.get("group")) == 1 else None


def reduced(n, **o):
    result, work = written(dist.reduce, x(4), group_dst=1, **o)
    return chosen(result, o), work


def uneven_single(n, **o):
    """Rank i sends j + 1 rows to rank j."""
    mine = dist.get_rank(o.get("group")) + 1
    sent = [j + 1 for j in range(n)]
    return written(
        dist.all_to_all_single, torch.zeros(n * mine, 2, device=device), x(sum(sent), 2), [mine] * n, sent, **o
    )


def uneven_lists(n, **o):
    mine = dist.get_rank(o.get("group")) + 1
    return written(dist.all_to_all, zeros(*[mine] * n), [x(j + 1) for j in range(n)], **o)


def uneven_gather(n, **o):
    mine = dist.get_rank(o.get("group")) + 1
    return written(dist.all_gather, zeros(*range(1, n + 1)), x(mine), **o)


COLLECTIVES = {
    "all_reduce": lambda n, **o: written(dist.all_reduce, x(4), **o),
    "reduce": reduced,
    "broadcast": lambda n, **o: written(dist.broadcast, x(4), group_src=1, **o),
    "all_gather": lambda n, **o: written(dist.all_gather, zeros(*[4] * n), x(4), **o),
    "all_gather_uneven": uneven_gather,
    "all_gather_into": lambda n, **o: written(dist.all_gather_into_tensor, *zeros(4 * n), x(4), **o),
    "all_gather_stacked": lambda n, **o: written(dist.all_gather_into_tensor, *zeros((n, 4)), x(4), **o),
    "gather": lambda n, **o: written(partial(dist.gather, x(4)), chosen(zeros(*[4] * n), o), group_dst=1, **o),
    "scatter": lambda n, **o: written(
        dist.scatter, *zeros(4), chosen([x(4) + i for i in range(n)], o), group_src=1, **o
    ),
    "reduce_scatter": lambda n, **o: written(dist.reduce_scatter, *zeros(4), [x(4) + i for i in range(n)], **o),
    "reduce_scatter_tensor": lambda n, **o: written(dist.reduce_scatter_tensor, *zeros(3), x(3 * n), **o),
    "all_to_all": lambda n, **o: written(dist.all_to_all, zeros(*[2] * n), [x(2) + i for i in range(n)], **o),
    "all_to_all_uneven": uneven_lists,
    "all_to_all_single": lambda n, **o: written(dist.all_to_all_single, *zeros(2 * n), x(2 * n), **o),
    "all_to_all_single_uneven": uneven_single,
    "all_gather_coalesced": lambda n, **o: written(
        dist.all_gather_coalesced, [zeros(4, 3) for _ in range(n)], [x(4), x(3)], **o
    ),
    "all_reduce_coalesced": lambda n, **o: written(dist.all_reduce_coalesced, [x(4), x(3)], **o),
    "barrier": lambda n, **o: (None, dist.barrier(**o)),
}
if world == 2:  # the group is the world
    WAYS = {"": {}, "_async": {"async_op": True}}
else:
    WAYS = {"": {}, "_async": {"async_op": True}, "_pair": {"group": pair}}
for way, more in WAYS.items():
    for name, collective in COLLECTIVES.items():
        size = dist.get_world_size(more.get("group"))
        case(lambda collective=collective, size=size, more=more: done(*collective(size, **more)), name + way)


def all_reduced(op, dtype):
    return done(*written(dist.all_reduce, x(6, dtype=dtype), op))


def short(dtype):
    return str(dtype).removeprefix("torch.")


OPS = {name: getattr(ReduceOp, name) for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")}
OPS["PREMUL_SUM"] = _distributed_c10d._make_nccl_premul_sum(2.0) if dist.is_nccl_available() else ReduceOp.PREMUL_SUM
for name, op in OPS.items():
    for dtype in (torch.float32, torch.int32, torch.bfloat16):
        case(partial(all_reduced, op, dtype), f"all_reduce_{name}_{short(dtype)}")
    case(
        lambda op=op: done(*written(dist.reduce_scatter_tensor, *zeros(3), x(3 * world), op)), f"reduce_scatter_{name}"
    )
for dtype in (torch.float64, torch.float16, torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64):
    case(partial(all_reduced, ReduceOp.SUM, dtype), f"all_reduce_{short(dtype)}")
    case(partial(all_reduced, ReduceOp.MAX, dtype), f"all_reduce_MAX_{short(dtype)}")
    case(lambda dtype=dtype: done(*written(dist.broadcast, x(5, dtype=dtype), 1)), f"broadcast_{short(dtype)}")
CASES.update(
    all_reduce_scalar=lambda: done(*written(dist.all_reduce, x(1)[0])),
    all_reduce_empty=lambda: done(*written(dist.all_reduce, x(0))),
    all_reduce_strided=lambda: done(*written(dist.all_reduce, x(4, 6).t())),
    all_reduce_not_dense=lambda: done(*written(dist.all_reduce, x(4, 6)[:, ::2])),
    all_reduce_large=lambda: done(*written(dist.all_reduce, x(1 << 18))),
    all_gather_of_other_type=lambda: done(*written(dist.all_gather_into_tensor, *zeros(4 * world), x(4).long())),
    all_gather_of_other_size=lambda: done(*written(dist.all_gather_into_tensor, *zeros(3 * world), x(4))),
    broadcast_from_nowhere=lambda: done(*written(dist.broadcast, x(4), world)),
    reduce_of_no_tensor=lambda: dist.all_reduce("text"),
)


@case_if(not cuda)
def all_reduce_sparse():
    """Each rank has the places up to its own number."""
    places = torch.arange(rank + 1)
    work = dist.all_reduce(torch.sparse_coo_tensor(places[None], x(rank + 1), (world,)), async_op=True)
    work.wait()
    return [tensor.to_dense() for tensor in work.result()]


@case_if(not cuda)
def monitored_barrier():
    dist.monitored_barrier(timeout=timedelta(seconds=30), wait_all_ranks=True)


@case_if(cuda)
def monitored_barrier_refused():
    dist.monitored_barrier()


# Works and futures


def summing(count=4):
    return written(partial(dist.all_reduce, async_op=True), x(count))


@case
def waited_in_reverse():
    pairs = [summing(count) for count in (4, 3, 2)]
    return [done(*each) for each in reversed(pairs)]


@case
def polled():
    tensor, work = summing()
    while not work.is_completed():
        pass
    return done(tensor, work)


@case
def succeeded():
    """NCCL's works do not say."""
    tensor, work = summing()
    return done(tensor, work), work.exception(), work.is_success()


@case
def waited_twice():
    tensor, work = summing()
    return work.wait(), work.wait(timedelta(seconds=30)), tensor, isinstance(work, dist.Work)


@case
def synchronized():
    tensor, work = summing()
    done(tensor, work)
    work.synchronize()
    return tensor, work.result()


@case_if(cuda)
def blocked_stream():
    tensor, work = summing()
    work.block_current_stream()
    return tensor


@case_if(cuda)
def never_waited():
    tensor, _ = summing()
    torch.cuda.synchronize()
    return tensor


@case
def work_outlives_its_tensor():
    """Results of works whose outputs nobody else holds."""
    works = [dist.all_gather(zeros(*[4] * world), x(4), async_op=True) for _ in range(3)]
    for work in works:
        work.wait()
    return [work.get_future().value() for work in works]


def doubled(future):
    return [2 * tensor for tensor in future.value()]


CASES.update(
    future_wait=lambda: summing()[1].get_future().wait(),
    future_then=lambda: summing()[1].get_future().then(doubled).wait(),
    future_chain=lambda: summing()[1].get_future().then(doubled).then(lambda f: f.value()[0] + 1).wait(),
    futures_collected=lambda: [
        each.value() for each in torch.futures.collect_all([summing(n)[1].get_future() for n in (3, 2)]).wait()
    ],
    future_of_a_gather=lambda: done(*COLLECTIVES["all_gather"](world, async_op=True)),
)


@case
def future_calls_back():
    called, values = threading.Event(), []
    _, work = summing()
    work.get_future().add_done_callback(lambda future: (values.append(future.value()), called.set()))
    work.wait()
    return called.wait(30), values


@case
def by_methods_of_the_group():
    """Without the module's functions, and without options."""
    group, tensor, parts = pair, x(4), zeros(4, 4)
    group.allreduce([tensor]).wait()
    group.allreduce(tensor, ReduceOp.MAX).wait()
    group.broadcast(tensor, 1).wait()
    group.allgather([parts], [tensor]).wait()
    group.barrier().wait()
    (group.send([tensor], 1, 5) if even else group.recv([tensor], 0, 5)).wait()
    return tensor, parts


@case
def profiled():
    """What a profile names, but for counts: waits differ."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.barrier()
        done(*summing())
    return sorted({event.key for event in profile.key_averages() if event.key.startswith(("gloo:", "nccl:", "c10d::"))})


@case
def from_a_thread():
    results = []
    thread = threading.Thread(target=lambda: results.append(done(*summing())))
    thread.start()
    thread.join()
    return results


# Coalescing


def coalesced(op, outputs, *inputs, **manager_options):
    with dist._coalescing_manager(**manager_options) as manager:
        for arguments in zip(outputs, *inputs, strict=True):
            op(*arguments)
    if manager_options.get("async_ops"):
        manager.wait()
    return outputs


def coalesced_on_device(how, **manager_options):
    """In a group of its own: where the backend refuses, torch leaves the group's state behind."""
    return COALESCED[how](group=dist.new_group(), device=device, **manager_options)


COALESCED = {
    "all_reduce": lambda **o: coalesced(partial(dist.all_reduce, group=o.get("group")), [x(4), x(3)], **o),
    "all_gather": lambda **o: coalesced(
        partial(dist.all_gather_into_tensor, group=o.get("group")), zeros(4 * world, 2 * world), [x(4), x(2)], **o
    ),
    "reduce_scatter": lambda **o: coalesced(
        partial(dist.reduce_scatter_tensor, group=o.get("group")), zeros(2, 1), [x(2 * world), x(world)], **o
    ),
    "broadcast": lambda **o: coalesced(partial(dist.broadcast, src=1, group=o.get("group")), [x(4), x(3)], **o),
}
for name, function in COALESCED.items():
    if name != "broadcast":  # it has no fast path: without a device it would just run
        case(function, f"coalesced_{name}")
        case(partial(function, async_ops=True), f"coalesced_{name}_async")
    case(partial(coalesced_on_device, name), f"coalesced_{name}_on_device")
    case(partial(coalesced_on_device, name, async_ops=True), f"coalesced_{name}_on_device_async")


@case_if(cuda)
def coalesced_messages():
    (tensor,) = zeros(4)
    with dist._coalescing_manager(device=device, async_ops=True) as manager:
        dist.isend(x(4), after)
        dist.irecv(tensor, before)
    manager.wait()
    return tensor


@case
def coalesced_nothing():
    with dist._coalescing_manager(async_ops=False):
        pass


# Objects


def written_list(op, objects, *arguments, **options):
    op(objects, *arguments, **options)
    return objects


def object_ring(**options):
    got = [None, None]
    if even:
        dist.send_object_list([{"from": rank}, "text" * rank], after, **options)
        dist.recv_object_list(got, before, **options)
    else:
        dist.recv_object_list(got, before, **options)
        dist.send_object_list([(rank, current["salt"]), None], after, **options)
    return got


CASES.update(
    object_all_gather=lambda: written_list(dist.all_gather_object, [None] * world, {"rank": rank, "text": "x" * rank}),
    object_all_gather_pair=lambda: written_list(
        dist.all_gather_object, [None] * 2, (rank, current["salt"]), group=pair
    ),
    object_broadcast=lambda: written_list(dist.broadcast_object_list, [{"from": [rank, 7]}, rank], 1),
    object_broadcast_device=lambda: written_list(dist.broadcast_object_list, [rank, "text"], 0, device=device),
    object_gather=lambda: written_list(partial(dist.gather_object, [rank] * rank), chosen([None] * world, {}), 1),
    object_scatter=lambda: written_list(dist.scatter_object_list, [None], [[i] * i for i in range(world)], 0),
    object_of_tensors=lambda: written_list(dist.broadcast_object_list, [x(3), x(2).cpu()], 1),
    object_ring=object_ring,
    object_ring_batched=lambda: object_ring(use_batch=True),
)


# Point to point


def ring(send, receive, count=4, **options):
    """To the next rank, from the one before; even ranks send first, so that blocking calls meet."""
    (tensor,) = zeros(count)
    calls = [lambda: send(x(count), after, **options), lambda: receive(tensor, before, **options)]
    works = [call() for call in (calls if even else reversed(calls))]
    wait_all([work for work in works if isinstance(work, dist.Work)])
    return tensor


def batch_with_all():
    peers = [peer for peer in range(world) if peer != rank]
    received = [(tensor, peer, None) for peer, tensor in zip(peers, zeros(*[3 + rank] * len(peers)), strict=True)]
    return batch(*[(x(3 + peer), peer) for peer in peers], *received)


def batch_of_one():
    return batch((x(4), rank ^ 1)) if even else batch((*zeros(4), rank ^ 1, None))


def tags_out_of_order():
    if even:
        return wait_all([dist.isend(x(2) * tag, rank ^ 1, tag=tag) for tag in (1, 2)])
    tensors = zeros(2, 2)
    return wait_all([dist.irecv(tensors[tag - 1], rank ^ 1, tag=tag) for tag in (2, 1)]), tensors


def from_anyone():
    """Only rank 0 receives: the order in which the others' messages come is not determined."""
    tensors = zeros(*[4] * world)
    if rank:
        return dist.send(x(4), 0, tag=9)
    for _ in range(1, world):
        (tensor,) = zeros(4)
        tensors[dist.recv(tensor, tag=9)].copy_(tensor)
    return tensors


LARGE = 16 << 20 if cuda else 1 << 16  # float32 of a large message: 64 MiB on a GPU
CASES.update(
    message=lambda: ring(dist.send, dist.recv),
    message_async=lambda: ring(dist.isend, dist.irecv),
    message_async_to_recv=lambda: ring(dist.isend, dist.recv),
    messages_again=lambda: [ring(dist.isend, dist.irecv, count) for count in (1, 5, 4)],
    message_large=lambda: ring(dist.send, dist.recv, LARGE),
    message_large_async=lambda: ring(dist.isend, dist.irecv, LARGE),
    message_in_pair=lambda: (
        done(*written(dist.isend, x(4), group=pair, group_dst=1))
        if even
        else done(*written(dist.irecv, *zeros(4), group=pair, group_src=0))
    ),
    message_to_itself=lambda: dist.send(x(4), rank),
    batch_of_one=batch_of_one,
    batch_ring=lambda: batch((x(4), after), (*zeros(4), before, None)),
    batch_ring_receive_first=lambda: batch((*zeros(4), before, None), (x(4), after)),
    batch_two_each=lambda: batch(
        *[(x(4) + j, after) for j in range(2)], *[(tensor, before, None) for tensor in zeros(4, 4)]
    ),
    batch_with_all=batch_with_all,
    batch_in_pair=lambda: batch((x(4), rank ^ 1), (*zeros(4), rank ^ 1, None), group=pair),
    batch_large=lambda: batch((x(LARGE), after), (*zeros(LARGE), before, None)),
    batch_of_nothing=lambda: dist.batch_isend_irecv([]),
)
if cuda:
    CASES.update(from_anyone_refused=lambda: dist.recv(*zeros(4)))
else:
    CASES.update(tags_out_of_order=tags_out_of_order, from_anyone=from_anyone)


# Groups


def outsider():
    """Ranks outside a group get a marker, with which operations do nothing."""
    group = dist.new_group([0, 1])
    member = group is not dist.GroupMember.NON_GROUP_MEMBER
    tensor = x(4)
    dist.all_reduce(tensor, group=group)
    return member, tensor


def facts(group):
    """What programs ask a group for."""
    return (
        (group.rank(), group.size(), group.name(), group.group_name, group.group_desc, group.bound_device_id),
        (dist.get_backend(group), dist.get_backend_config(group), dist.get_process_group_ranks(group)),
        (group._device_types, [group._get_backend(each).name() for each in group._device_types]),
        (isinstance(group, dist.ProcessGroup), group == dist.group.WORLD, {group: 1}[group]),
        (dist.get_group_rank(group, rank), dist.get_global_rank(group, group.rank()), dist.get_pg_count()),
    )


def split():
    group = dist.split_group(split_ranks=[[i, i + 1] for i in range(0, world, 2)], group_desc="halves")
    sent = batch((x(4), rank ^ 1), (*zeros(4), rank ^ 1, None), group=group)
    return done(*written(dist.all_reduce, x(4), group=group)), sent, facts(group)


def of_both_kinds():
    """One group with a backend for each kind of device."""
    group = dist.new_group(backend="cpu:gloo,cuda:nccl" if cuda else "cpu:gloo")
    tensors = [x(4), x(4).cpu()]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    return wait_all(works), tensors, dist.barrier(group), facts(group)


def subgroups():
    mine, groups = dist.new_subgroups(group_size=2, group_desc="of two")
    tensor = done(*written(dist.all_reduce, x(4), group=mine))
    local = dist.new_group([rank - rank % 2, rank - rank % 2 + 1], use_local_synchronization=True)
    return tensor, len(groups), done(*written(dist.all_reduce, x(4), group=local)), facts(mine)


def destroyed():
    group = dist.new_group(timeout=timedelta(seconds=30))
    tensor = done(*written(dist.all_reduce, x(4), group=group))
    dist.destroy_process_group(group)
    return tensor, done(*written(dist.all_reduce, x(4), group=dist.new_group()))


def from_store():
    store = dist.PrefixStore("suite", distributed_c10d._get_default_store())
    store.set(f"from{rank}", f"rank {rank}")
    store.wait([f"from{after}"])
    dist.barrier()
    return store.get(f"from{after}"), store.add("count", 0), store.check([f"from{before}", "nothing"])


def mesh_of_two():
    mesh = init_device_mesh(device.type, (world // 2, 2), mesh_dim_names=("outer", "inner"))
    tensors = [done(*written(dist.all_reduce, x(4), group=mesh[name].get_group())) for name in ("outer", "inner")]
    flat = mesh["outer", "inner"]._flatten("flat").get_group()
    return tensors, mesh.get_coordinate(), done(*written(dist.all_reduce, x(4), group=flat))


def gloo_beside():
    """A group with gloo as its only backend, whatever the default group has."""
    group = dist.new_group(backend="gloo")
    return done(*written(dist.all_reduce, x(4).cpu(), group=group)), dist.monitored_barrier(group), facts(group)


def after_its_end():
    """A group is asked for a sum after it was destroyed."""
    group = dist.new_group()
    dist.destroy_process_group(group)
    dist.all_reduce(x(4), group=group)


CASES.update(
    group_after_its_end=after_its_end,
    group_sequence=lambda: (pair._get_sequence_number_for_group(), pair._has_hooks()),
    group_facts=lambda: (facts(dist.group.WORLD), facts(pair)),
    group_outsider=outsider,
    group_split=split,
    group_of_both_kinds=of_both_kinds,
    group_subgroups=subgroups,
    group_destroyed=destroyed,
    group_gloo_beside=gloo_beside,
    group_store=from_store,
    group_mesh=mesh_of_two,
    group_of_nobody=lambda: dist.new_group([world]),
)
if cuda:
    CASES.update(group_gloo_on_cuda=lambda: done(*written(dist.all_reduce, x(4), group=dist.new_group(backend="gloo"))))

# What other files have, other processes, and the end

live_functional.register()
if cuda:
    live_streams.register()
else:
    live_types.register()
CASES.update({f"model_{name}": function for name, function in live_models.cases(device).items()})


@case
def in_a_subprocess():
    """Another Python of this environment is no rank, and says nothing more than it would."""
    if rank:
        return None
    script = "import torch.distributed as dist; print(dist.is_initialized())"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    return ran.returncode, ran.stdout, ran.stderr


@case
def initialised_again():
    """torchrun's store still has the first group's keys: the second one needs a prefix of its own."""
    store = dist.PrefixStore("again", distributed_c10d._get_default_store())
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group(None if backend == "mixed" else backend, store=store, rank=rank, world_size=world, **START)
    return done(*written(dist.all_reduce, x(4))), dist.barrier(), facts(dist.group.WORLD)


with open(f"{options.out}.{rank}", "a") as lines:
    for name, function in CASES.items():
        if name.startswith(options.only) and name != options.skip:
            current["salt"] = zlib.crc32(name.encode()) % 97
            print(f"{name}: {outcome(function)}", file=lines, flush=True)
    dist.destroy_process_group()
    print("end: destroyed", file=lines)
