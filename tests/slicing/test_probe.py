"""Probes: operations of larger groups than are run, and that this is said."""

from prism_tools.graph import file
from tests.graph.builder import build, comm, compute
from tests.tools import run


def test_large_groups_are_shown_by_analogy(tmp_path):
    file.write(build(20, {"w": list(range(20))}, lambda rank: [compute(), comm("barrier", "w")]), tmp_path / "bare.h5")
    done = run("slice", "probe", "bare.h5", "--repeats", 1, "-o", "probed.h5", cwd=tmp_path)
    what = "how long their operations take, and which members leave late, is by analogy (a fit)"
    assert done.stderr == f"prism-slice: warning: groups of 20 ranks are probed by 16 processes: {what}\n"
    probes = file.read(tmp_path / "probed.h5").probes
    assert (probes.size.tolist(), probes.processes.tolist(), len(probes.tails[0])) == ([20], [16], 20)
    assert probes.tails[0][16:].tolist() == probes.tails[0][:4].tolist()
