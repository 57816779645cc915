"""Call sites are lines of the user's program, whatever lies between it and the operation."""

import pytest

from prism_tools.capture.callsite import LIBRARY, NEVER, PROGRAM, kind_of_file
from prism_tools.graph import file
from tests.tools import ROOT, program


def sites(path):
    """Call sites of all operations of all ranks."""
    graph = file.read(path)
    found = set()
    for one in graph.programs:
        found |= {graph.strings[k] for k in one.columns["callsite"][one.columns["kind"] == 1].tolist()}
    return found


@pytest.mark.parametrize("name", ["ddp.py", "fsdp2.py", "pipeline.py", "moe.py", "collectives.py"])
def test_nothing_of_torch(name, bench):
    """Reducer, backward hooks, parameter gathering, schedules, functional and object collectives."""
    bench.run("record", "-n", 4, "-j", 2, "-o", "run.h5", "--", program(name))
    found = sites(bench.out / "run.h5")
    assert found and {site.split(":")[0] for site in found} == {name}


LIBRARY_CODE = """import torch, torch.distributed as dist

def mean(t):
    dist.all_reduce(t)

if __name__ == "__main__":
    dist.init_process_group("gloo")
    mean(torch.ones(1))
"""


def test_installed_libraries_are_named_only_where_nothing_else_is_there(bench):
    folder = bench.out / "site-packages"
    folder.mkdir()
    (folder / "means.py").write_text(LIBRARY_CODE)
    (bench.out / "job.py").write_text(
        "import sys\nsys.path.insert(0, 'site-packages')\nimport means, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\nmeans.mean(torch.ones(1))\n"
    )
    bench.run("record", "-n", 2, "-o", "run.h5", "--", "job.py")
    assert sites(bench.out / "run.h5") == {"job.py:5 <module>"}
    bench.run("record", "-n", 2, "-o", "run.h5", "--", "-m", "means", PYTHONPATH=f"{ROOT}:{folder}")
    assert sites(bench.out / "run.h5") == {"site-packages/means.py:4 mean"}


def test_whose_file_it_is():
    kinds = {
        "/home/u/train.py": PROGRAM,
        "/opt/venv/lib/python3.11/site-packages/megatron/core.py": LIBRARY,
        "/usr/lib/python3/dist-packages/x.py": LIBRARY,
        "<frozen runpy>": NEVER,
        "/tmp/torchinductor_u/ab/cab.py": NEVER,
        pytest.importorskip("torch").distributed.__file__: NEVER,
        __import__("threading").__file__: NEVER,
    }
    assert {path: kind_of_file(path) for path in kinds} == kinds
