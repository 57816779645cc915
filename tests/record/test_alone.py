"""Recordings by rules beside switched ones: the same nodes where values do not steer, and the differences where they do."""

import re

import numpy as np
import pytest

from prism_tools.analyze.summary import summary
from prism_tools.emulate.sandbox import open_payloads
from prism_tools.graph import file
from prism_tools.graph.check import check
from prism_tools.graph.names import callsite_text
from prism_tools.graph.schema import Kind, Op
from tests.tools import ROOT, program, run

RULES = ROOT / "share" / "prism" / "rules"
SELF = RULES / "self.toml"
GPT = ("--tp", 2, "--pp", 2, "--layers", 2, "--microbatches", 2, "--steps", 2)
EXPERTS = ("--ep", 2, "--layers", 1, "--steps", 2)


def groups_of(graph, rank):
    names = [(graph.groups.name[k], graph.groups.desc[k], graph.groups.backend[k]) for k in graph.ranks.slots[rank]]
    return names, [graph.groups.members[k].tolist() for k in graph.ranks.slots[rank]]


def differing(switched, alone):
    """Ranks whose nodes, edges or groups are not the same in both graphs."""
    odd = []
    for rank in range(switched.world_size):
        one, two = switched.program_of(rank), alone.program_of(rank)
        same = len(one) == len(two) and np.array_equal(one.edges, two.edges)
        for name in one.columns if same else ():
            if name == "callsite":
                sites = [[callsite_text(g, rank, n) for n in range(len(one))] for g in (switched, alone)]
                same = same and sites[0] == sites[1]
            else:
                same = same and np.array_equal(one.columns[name], two.columns[name])
        if not same or groups_of(switched, rank) != groups_of(alone, rank):
            odd.append(rank)
    return odd


def sizes_apart(switched, alone):
    """Operations whose bytes or splits differ."""
    found = set()
    for rank in range(switched.world_size):
        one, two = switched.values_of(rank), alone.values_of(rank)
        for node in range(len(switched.program_of(rank))):
            if one.bytes[node] != two.bytes[node] or one.splits[node].tolist() != two.splits[node].tolist():
                found.add(Op(switched.program_of(rank).op[node]).name)
    return found


def switches(made):
    return int(re.search(r"recorded: ([\d,]+) switches", made.stderr)[1].replace(",", ""))


@pytest.mark.parametrize(
    ("name", "arguments", "rules", "apart"),
    [
        ("ddp.py", (), "self.toml", set()),
        ("gpt.py", GPT, "pipelining.toml", set()),
        ("gpt.py", EXPERTS, "self.toml", {"ALL_TO_ALL"}),
        ("steered.py", (), "training.toml", {"ALL_TO_ALL"}),
    ],
)
def test_node_for_node(name, arguments, rules, apart, stages):
    world = 8 if "--pp" in arguments else 4
    switched = stages.recorded(name, *arguments, world=world)
    alone = stages.recorded(name, *arguments, world=world, options=("-v", "--rules", RULES / rules))
    one, two = file.read(switched.path), file.read(alone.path)
    assert differing(one, two) == []
    assert sizes_apart(one, two) == apart
    assert apart or check(two) == []
    assert switches(alone) == world  # each rank has run at a stretch


def test_what_steers_is_ruled(stages):
    rules = ("-v", "--rules", RULES / "training.toml")
    lines = stages.recorded("steered.py", world=4, options=rules).lines("check")
    assert len(lines) == 4 * 3
    for line in lines:
        rank, received, tokens = re.fullmatch(r"check rank (\d) step \d (\[.*?\]) \[(\[.*\])\]", line).groups()
        peer = 1 - int(rank) // 2
        assert eval(received)[peer] == 0 < eval(received)[1 - peer]
        assert all(0 <= token < 50 for row in eval(f"[{tokens}]") for token in row)


HOOKED = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
value = torch.tensor([float(rank + 1)])
dist.all_reduce(value)
objects = [None] * 2
dist.all_gather_object(objects, {"of": rank})
told = [None, None]
if rank == 0:
    told = ["from", 0]
dist.broadcast_object_list(told, 0)
print(f"check rank {rank} {value.item()} {objects} {told}\\n", end="", flush=True)
"""
HOOKS = """
[[rule]]
op = "all_reduce"
generate = "python:hooks:add_up"
[[rule]]
op = "broadcast_object_list"
generate = "python:hooks:tell"
[[rule]]
generate = "self"
"""


def record(folder, text, rules, *options, world=2, expect=0):
    (folder / "job.py").write_text(text)
    (folder / "rules.toml").write_text(rules)
    words = ["-n", world, "-j", 2, "--rules", "rules.toml", *options, "--", "job.py"]
    return run("record", *words, cwd=folder, expect=expect)


HOOK = """
def add_up(call):
    assert call.outs[0].item() == 2 * (call.me + 1) and call.ranks == (0, 1)
    call.outs[0].fill_(10 + call.rank)
def tell(call):
    return "told"
"""


def test_hooks(tmp_path):
    (tmp_path / "hooks.py").write_text(HOOK)
    done = record(tmp_path, HOOKED, HOOKS, "-o", "g.h5")
    assert done.lines("check") == [
        "check rank 0 10.0 [{'of': 0}, {'of': 0}] ['from', 0]",
        "check rank 1 11.0 [{'of': 1}, {'of': 1}] ['told', 'told']",
    ]


@pytest.mark.parametrize(
    ("rules", "hook", "message"),
    [
        (HOOKS, "", "rules.toml: line 2: python:hooks:add_up: module hooks has no add_up"),
        (
            "",
            "",
            "all_reduce 4 B float32 on world #0 (job.py:6 <module>): no rule answers it, and integers and payloads of "
            "64 KiB or less are never invented",
        ),
    ],
)
def test_what_cannot_be_answered_ends_the_recording(rules, hook, message, tmp_path):
    (tmp_path / "hooks.py").write_text(hook)
    done = record(tmp_path, HOOKED, rules, "-o", "g.h5", expect=1)
    first, second = done.stderr.splitlines()
    assert re.match(r"prism-record: rank [01]: all_reduce 4 B float32 on world #0 ", first) and message in first
    assert second == "partial graph kept in g.h5 (incomplete)"


ANYONE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
if rank:
    dist.send(torch.full((2,), float(rank)), 0)
for _ in range(1, 1 if rank else world):
    got = torch.empty(2)
    print(f"check rank 0 {dist.recv(got)} {got.tolist()}\\n", end="", flush=True)
"""
NEXT = "def answer(call):\n    call.peer = call.occasion.ordinal + 1\n    call.outs[0].fill_(call.peer)\n"


def test_a_receive_from_anyone(tmp_path):
    """Only a hook can say who sends."""
    (tmp_path / "hooks.py").write_text(NEXT)
    rule = "[[rule]]\ngenerate = 'python:hooks:answer'\n"
    done = record(tmp_path, ANYONE, rule, "-o", "g.h5", world=3)
    assert done.lines("check") == ["check rank 0 1 [1.0, 1.0]", "check rank 0 2 [2.0, 2.0]"] and done.stderr == ""
    program = file.read(tmp_path / "g.h5").program_of(0)
    assert program.peer[(program.op == Op.RECV) & (program.kind == Kind.COMM)].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("hook", "rule", "message"),
    [
        ("", "self", "who sends is not known; add a rule with a hook (python:MODULE:FUNCTION) that sets call.peer"),
        (
            "def answer(call): pass",
            "python:hooks:answer",
            "line 1: python:hooks:answer: does not set call.peer to the group rank of a sender: -1",
        ),
    ],
)
def test_a_receive_from_nobody(hook, rule, message, tmp_path):
    (tmp_path / "hooks.py").write_text(hook)
    rules = f"[[rule]]\ngenerate = '{rule}'\n"
    assert message in record(tmp_path, ANYONE, rules, "-o", "g.h5", expect=1).stderr.splitlines()[0]


STAGES = """
import torch, torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
dist.init_process_group("gloo")
rank, torch_layer = dist.get_rank(), torch.nn.Linear
layers = [torch_layer(4, 6), torch_layer(6, 5), torch_layer(5, 3), torch_layer(3, 2)]
stages = [
    PipelineStage(layers[k], k, 4, torch.device("cpu"), input_args=(torch.empty(2, layers[k].in_features),))
    for k in (rank, rank + 2)
]
schedule = ScheduleInterleaved1F1B(stages, 2, loss_fn=torch.nn.functional.mse_loss)
for _ in range(2):
    schedule.step(torch.ones(4, 4)) if rank == 0 else schedule.step(target=torch.ones(4, 2))
"""


def test_stages_that_ask_for_shapes(tmp_path):
    """They were given those of their inputs; the ready-made hooks say the rest, and that gradients come back."""
    (tmp_path / "job.py").write_text(STAGES)
    graphs = []
    for options in ([], ["--rules", RULES / "pipelining.toml"]):
        run("record", "-n", 2, "-j", 2, *options, "-o", "g.h5", "--", "job.py", cwd=tmp_path)
        graphs.append(file.read(tmp_path / "g.h5"))
    assert differing(*graphs) == [] and sizes_apart(*graphs) == set() and len(graphs[0].program_of(0)) > 40


def test_explained(tmp_path):
    (tmp_path / "hooks.py").write_text(HOOK)
    done = record(
        tmp_path,
        HOOKED,
        HOOKS.replace('generate = "self"', "op = 'recv'\ngenerate = 'zeros'"),
        "--explain-rules",
        expect=1,
    )
    rows = [re.split(r"  +", line) for line in done.stdout.splitlines()]
    assert [row[:7] for row in rows] == [
        ["rule", "answer", "operation", "group", "dtype", "bytes", "times"],
        ["line 2", "python:hooks:add_up", "all_reduce", "world", "float32", "4", "2"],
        ["line 5", "python:hooks:tell", "broadcast_object_list", "world", "int64", "16", "1"],
        ["line 5", "python:hooks:tell", "broadcast_object_list", "world", "uint8", rows[3][5], "1"],
        ["-", "NO RULE", "all_gather_object", "world", "int64", "8", "2"],
        ["-", "NO RULE", "all_gather_object", "world", "uint8", rows[5][5], "2"],
        ["line 8", "zeros", "nothing", "-", "-", "-", "0"],
    ]
    assert rows[1][7] == "job.py:6 <module>"
    assert "prism-record: rules.toml: 4 operations need a rule; see NO RULE above" in done.stderr.splitlines()
    assert {path.name for path in tmp_path.iterdir()} == {"job.py", "rules.toml", "hooks.py"}


def test_explained_until_a_rank_fails(tmp_path):
    """What was answered until then is what the user needs to see."""
    text = "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
    text += "dist.broadcast(torch.ones(1), 0)\ntold = [None]\ndist.broadcast_object_list(told, 0)\nassert told[0]\n"
    done = record(tmp_path, text, "[[rule]]\ndtype = 'float32'\ngenerate = 'zeros'\n", "--explain-rules", expect=1)
    rows = [re.split(r"  +", line)[:3] for line in done.stdout.splitlines()]
    assert rows[1:] == [["line 1", "zeros", "broadcast"], ["-", "NO RULE", "broadcast_object_list"]]
    assert "another rank's object is not made up; add a rule with object(LITERAL)" in done.stderr


def test_replicas_of_gpt(stages):
    """32 ranks: TP 2, PP 2, DP 8. One rank of each of four groups, and a sample."""
    arguments = (*GPT[:-1], 1, "--batch", 4)
    switched = stages.recorded("gpt.py", *arguments, world=32)
    options = ("-v", "--dedup", "--rules", RULES / "pipelining.toml")
    alone = stages.recorded("gpt.py", *arguments, world=32, options=options)
    one, two = file.read(switched.path), file.read(alone.path)
    assert differing(one, two) == [] and sizes_apart(one, two) == set() and check(two) == []
    ran = int(
        re.search(r"one rank of each mesh_dp group stands for the others; (\d+) of 32 ranks were run", alone.stderr)[1]
    )
    assert f"the same nodes; that {32 - ran} do the same is taken from this sample\n" in alone.stderr
    assert 4 < ran <= 4 + 1 + 1 + 3  # groups; the last rank, which showed that not all do the same; compared
    assert {len(one.programs), len(two.programs)} == {2}
    ranks = two.ranks.ran
    assert f"{ran} of 32 ranks, a sample: {32 - ran} are taken to do as one of these did: " in summary(two)
    assert "a sample" not in summary(one)
    assert one.ranks.ran is None and len(set(ranks.tolist())) == ran and (ranks[ranks] == ranks).all()
    payloads, skipped = open_payloads(two, str(alone.path)), int(np.flatnonzero(ranks != np.arange(32))[0])
    nodes = [node for rank, node in payloads.known if rank == ranks[skipped]]
    assert nodes and all(payloads.get(skipped, n) == payloads.get(int(ranks[skipped]), n) is not None for n in nodes)


ODD = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
value = torch.ones(1)
dist.all_reduce(value)
if rank == dist.get_world_size() - 1:
    dist.all_reduce(value)
else:
    dist.broadcast(value, 0)
print(f"check rank {rank}\\n", end="", flush=True)
"""


def test_ranks_that_differ_are_all_run(tmp_path):
    done = record(tmp_path, ODD, "[[rule]]\ngenerate = 'self'\n", "-o", "g.h5", "--dedup", world=4)
    assert done.stderr == (
        "prism-record: warning: no groups have members that do the same (ranks 0 and 3 differ first at node 3: "
        "broadcast (job.py:10 <module>), all_reduce (job.py:8 <module>)); all 4 ranks were run\n"
        "prism-record: warning: what ranks did alone does not fit together: rank 0 broadcast on 0, node 3 (job.py:10 <module>): "
        "but rank 3 all_reduce on 0, node 3 (job.py:8 <module>) is the same operation in order; see prism-inspect check\n"
    )
    assert len(done.lines("check")) == 4


TAGS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
sent = dist.isend(torch.ones(1), (rank + 1) % world, tag=rank)
dist.recv(torch.empty(1), (rank - 1) % world, tag=(rank - 1) % world)
sent.wait()
"""


def test_ranks_whose_tags_differ_are_all_run(tmp_path):
    """Sends and receives of one rank's tags, given to all, would not find each other."""
    done = record(tmp_path, TAGS, "[[rule]]\ngenerate = 'self'\n", "-o", "g.h5", "--dedup", world=4)
    assert (
        "(ranks 0 and 3 differ first at node 1: send, tag 0 (job.py:5 <module>), send, tag 3 (job.py:5 <" in done.stderr
    )
    assert check(file.read(tmp_path / "g.h5")) == []


UNSEEN = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1:
    dist.all_reduce(torch.ones(1))
"""


def test_what_is_only_taken_from_the_sample_is_said(tmp_path):
    """Rank 1 is not run: nobody sees that it differs, and nobody may think that it was looked at."""
    done = record(tmp_path, UNSEEN, "[[rule]]\ngenerate = 'self'\n", "-o", "g.h5", "--dedup", world=4)
    assert done.stderr == (
        "prism-record: warning: one rank of each world group stands for the others; 2 of 4 ranks were run, 1 of them to "
        "compare: the same nodes; that 2 do the same is taken from this sample\n"
    )
    assert file.read(tmp_path / "g.h5").ranks.ran.tolist() == [0, 0, 0, 3]


SCATTERED = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
objects, out = [None], torch.empty(2)
dist.scatter_object_list(objects, [{"of": 0}, {"of": 1}] if rank == 0 else None, src=0)
dist.scatter(out, [torch.tensor([4.0, 5.0]), torch.tensor([6.0, 7.0])] if rank == 0 else None, src=0)
print(f"check rank {rank} {objects} {out.tolist()}\\n", end="", flush=True)
"""


def test_a_root_keeps_its_own_part_and_needs_no_rule(tmp_path):
    rules = "[[rule]]\nop = 'scatter_object_list'\ngenerate = \"object('told')\"\n[[rule]]\ngenerate = 'constant(3)'\n"
    done = record(tmp_path, SCATTERED, rules, "-o", "g.h5")
    assert done.lines("check") == ["check rank 0 [{'of': 0}] [4.0, 5.0]", "check rank 1 ['told'] [3.0, 3.0]"]


KEYS = """
import torch.distributed as dist
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
store = dist.distributed_c10d._get_default_store()
store.set(f"key{rank}", "value")
store.get(f"key{(rank + 1) % world}")
"""


def test_keys_of_the_store(tmp_path):
    """Ranks wait for each other's keys, if all run; a key of a rank that does not run is missed."""
    rules = "[[rule]]\ngenerate = 'self'\n"
    assert record(tmp_path, KEYS, rules, "-o", "g.h5", world=4).stderr == ""
    lines = record(tmp_path, KEYS, rules, "-o", "d.h5", "--dedup", world=4, expect=1).stderr.splitlines()
    assert lines[0] == "prism-record: deadlock: no rank can run"
    assert "a rank that was not run may be the one that sets it; leave --dedup out" in lines


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-n", 2, "-o", "g.h5", "--dedup"], "--dedup: needs --rules RULES"),
        (["-n", 2, "--explain-rules"], "--explain-rules: needs --rules RULES"),
        (
            ["-n", 2, "--rules", SELF, "--explain-rules", "-o", "g.h5"],
            "-o: --explain-rules records nothing; leave it out",
        ),
        (["-n", 2, "--rules", SELF], "-o: name a file for the graph"),
        (["--live", "-o", "g.h5", "--rules", SELF], "--live: the peers are there; leave --rules out"),
    ],
)
def test_options_that_do_not_go_together(options, message, tmp_path):
    done = run("record", *options, "--", program("ddp.py"), cwd=tmp_path, expect=2)
    assert done.stderr == f"prism-record: {message}\n"
