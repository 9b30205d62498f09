"""The variables of MPI, Slurm and Flux, as their programs set them."""

import os

import pytest

from meshrec.comms.launchers import LAUNCHER_VARIABLES, launched

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu-[007-008]",
    "SLURM_JOB_ID": "12345",
    "SLURM_STEP_ID": "0",
}
FLUX = {"FLUX_TASK_RANK": "3", "FLUX_JOB_SIZE": "4", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_NNODES": "2"}
MEETING = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
TORCH = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.fixture
def environment(monkeypatch):
    """Sets variables; those that are translated are removed at the end."""
    for name in list(os.environ):
        if name.startswith(("OMPI_", "PMI", "MPI_", "SLURM_", "FLUX_", "MASTER_")) or name in TORCH:
            monkeypatch.delenv(name)

    def set_all(*variables):
        for values in variables:
            for name, value in values.items():
                monkeypatch.setenv(name, value)

    before = dict(os.environ)
    yield set_all
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize(
    "variables", [OPEN_MPI, MPICH, SLURM, FLUX], ids=["open-mpi", "mpich", "slurm", "flux"]
)
def test_ranks_of_other_launchers_are_ranks(environment, variables):
    environment(variables, MEETING)
    assert launched()
    assert {name: os.environ[name] for name in TORCH} == TORCH
    assert os.environ["MASTER_ADDR"] == "10.0.0.1"


@pytest.mark.parametrize(
    ("nodes", "first"), [("gpu-[007-008]", "gpu-007"), ("a,b", "a"), ("n[3,5].lan", "n3.lan"), ("one", "one")]
)
def test_ranks_of_slurm_meet_at_the_first_node(environment, nodes, first):
    environment(SLURM, {"SLURM_STEP_NODELIST": nodes})
    assert launched()
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == (first, "20345")


@pytest.mark.parametrize("variables", [OPEN_MPI, MPICH, FLUX])
def test_ranks_without_a_meeting_point_are_refused(environment, variables):
    environment(variables)
    with pytest.raises(ValueError, match=r"started 4 ranks.*--nproc 4.*MASTER_ADDR[= ]HOST_OF_RANK_0"):
        launched()
    assert "RANK" not in os.environ


@pytest.mark.parametrize(
    "variables",
    [{}, {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"}, {**SLURM, "SLURM_STEP_NUM_TASKS": "1"}, {"RANK": "0"}],
)
def test_a_process_alone_is_no_rank(environment, variables):
    environment(variables)
    assert not launched()


def test_torchs_variables_win(environment):
    environment(OPEN_MPI, TORCH, MEETING, {"RANK": "0"})
    assert launched()
    assert os.environ["RANK"] == "0"


@pytest.mark.parametrize("missing", LAUNCHER_VARIABLES)
def test_a_rank_that_lacks_a_variable_does_not_train_alone(environment, missing):
    environment({name: value for name, value in {**TORCH, **MEETING}.items() if name != missing})
    if missing == "WORLD_SIZE":
        assert not launched()  # nothing says that there are others
        return
    with pytest.raises(ValueError, match=missing):
        launched()


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK=4"),
        ({**MPICH, "MPI_LOCALNRANKS": "x"}, "MPI_LOCALNRANKS"),
        ({"PMIX_RANK": "1"}, "PMIX_RANK"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2x"}, "2"),
        ({**SLURM, "SLURM_NODEID": "7"}, "SLURM_NODEID"),
        ({**FLUX, "FLUX_JOB_NNODES": "3"}, "FLUX_JOB_NNODES"),
        ({**MPICH, "MPI_LOCALRANKID": "2"}, "MPI_LOCALRANKID=2"),
    ],
)
def test_contradictions_are_named(environment, wrong, name):
    environment(wrong, MEETING)
    with pytest.raises(ValueError, match=name):
        launched()
