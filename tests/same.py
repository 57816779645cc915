"""Whether two recordings are one and the same."""

import numpy as np

from prism_tools.emulate.sandbox import open_payloads
from prism_tools.graph import file
from prism_tools.graph.schema import Kind


def check_same(*paths):
    """Two recordings of one program, kept in these files: the same nodes, edges, call sites, sizes and payloads."""
    one, two = (file.read(path) for path in paths)
    assert one.world_size == two.world_size
    payloads = [open_payloads(graph, str(path)) for graph, path in zip((one, two), paths, strict=True)]
    for rank in range(one.world_size):
        a, b = one.program_of(rank), two.program_of(rank)
        names = [name for name in a.columns if name != "callsite"]
        assert all(np.array_equal(a.columns[name], b.columns[name]) for name in names)
        assert np.array_equal(a.edges, b.edges)
        sites = [[graph.strings[k] for k in graph.program_of(rank).callsite if k >= 0] for graph in (one, two)]
        assert sites[0] == sites[1]
        assert np.array_equal(one.values_of(rank).bytes, two.values_of(rank).bytes)
        for node in np.flatnonzero(a.kind == Kind.COMM).tolist():
            first, second = (reader.get(rank, node) for reader in payloads)
            assert (first is None) == (second is None) and (first is None or bytes(first) == bytes(second))
