"""Which nodes of an allocation a tool's ranks get."""

import pytest

from prism_tools.launch.slurm import Place, all_of, client, others, srun

PAIR = Place(1, ("--relative=1",), beside=1)
KINDS = {"SLURM_HET_SIZE": "2", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NUM_NODES_HET_GROUP_1": "3"}
WITHIN = KINDS | {"SLURM_JOB_ID": "7", "SLURM_JOB_ID_HET_GROUP_0": "7"}
TASK = {"SLURM_JOB_NUM_NODES": "2", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("nodes", "environ", "place"),
    [
        (None, {}, None),
        (None, {"SLURM_JOB_NUM_NODES": "1"}, None),
        (None, {"SLURM_JOB_NUM_NODES": "2"}, PAIR),
        (None, {"SLURM_JOB_NUM_NODES": "9"}, Place(4, ("--relative=1",), beside=1)),
        (2, {"SLURM_JOB_NUM_NODES": "9"}, PAIR),
        (None, {"SLURM_JOB_NUM_NODES": "4"}, Place(2, ("--relative=2",), beside=2)),
        (16, {"SLURM_JOB_NUM_NODES": "16"}, Place(4, ("--relative=4",), beside=4)),
        (4, KINDS, Place(3, ("--het-group=1",), beside=1)),
        (1, {"SLURM_JOB_NUM_NODES": "9"}, None),
        (None, {"SLURM_JOB_NUM_NODES": "two", "SLURM_HET_SIZE": ""}, None),
        (None, KINDS, Place(3, ("--het-group=1",), beside=1)),
        (2, KINDS, Place(1, ("--het-group=1",), beside=1)),
        (None, WITHIN, Place(3, ("--het-group=1",), beside=1)),
        (None, WITHIN | {"SLURM_JOB_ID": "8", "SLURM_JOB_NUM_NODES": "2"}, PAIR),  # submitted inside that one
        (None, TASK, None),
        (None, TASK | {"SLURM_STEP_NUM_TASKS": "1"}, PAIR),
    ],
)
def test_nodes_beside_the_assistant_s(nodes, environ, place):
    """For four ranks."""
    assert others(nodes, 4, environ) == place


def test_what_the_environment_adds_to_commands():
    environ = {"SLURM_CONF": "/etc/slurm.conf", "SLURM_MPI_TYPE": "pmix", "SBATCH_WAIT_ALL_NODES": "1", "PATH": "/bin"}
    assert client("sbatch", "a.sh", environ=environ) == ["sbatch", "a.sh"]
    environ |= {"SQUEUE_PARTITION": "gpu", "SCANCEL_INTERACTIVE": "1", "SBATCH_WAIT": "1"}
    filters = ["-u", "SQUEUE_PARTITION", "-u", "SCANCEL_INTERACTIVE", "-u", "SBATCH_WAIT"]
    assert client("squeue", environ=environ) == ["env", *filters, "squeue"]
    inside = environ | {"SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    others = ["-u", "SLURM_JOB_ID", "-u", "SLURM_ARRAY_TASK_ID"]
    assert client("sbatch", environ=inside) == ["env", "-u", "SLURM_MPI_TYPE", *filters, *others, "sbatch"]


def test_components_of_another_job_are_hidden_from_srun():
    plain = srun(4, 2, TASK)
    assert plain[0] == "srun" and srun(4, 2, WITHIN) == plain
    hidden = ["-u", "SLURM_HET_SIZE", "-u", "SLURM_JOB_NUM_NODES_HET_GROUP_1", "-u", "SLURM_JOB_ID_HET_GROUP_0"]
    assert srun(4, 2, WITHIN | {"SLURM_JOB_ID": "8"}) == ["env", *hidden, *plain]


def test_all_nodes():
    assert (all_of(4, 8), all_of(4, 2), all_of(1, 8)) == (Place(4), Place(2), None)
