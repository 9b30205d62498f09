"""Read the environment variables of a launcher. Those from MPI, Slurm and Flux are translated to torch's."""

import os
import re
from typing import NamedTuple

import torch.distributed as dist

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables from which torch forms a process group."""


class _Launcher(NamedTuple):
    """A launcher other than torchrun."""

    name: str
    variables: tuple[str, ...]
    """The launcher's environment variables with the values of `_RANK_VARIABLES`, in that order."""
    option: str
    """Command-line option which sets an environment variable on the ranks, for error messages."""


_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OPEN_MPI, _MVAPICH = (
    tuple(f"{prefix}_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    for prefix in ("OMPI", "MV2")
)
# mpiexec may start daemons through a Slurm step, which also sets Slurm's variables: check MPI first.
_LAUNCHERS = (
    _Launcher("Open MPI", _OPEN_MPI, "mpiexec -x "),
    _Launcher("MVAPICH", _MVAPICH, "mpiexec -env "),
    _Launcher("MPICH", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"), "mpiexec -genv "),
    _Launcher(
        "Slurm",
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
        "srun --export=ALL,",
    ),
    _Launcher(
        "Flux",
        ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_NNODES"),
        "flux run --env=",
    ),
)
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_FIRST_HOST = re.compile(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,]*))?")


def launched() -> bool:
    """Return whether a launcher has started this process as one of several ranks.

    If the launcher is MPI (Open MPI, MVAPICH, MPICH and others with Hydra), Slurm or Flux, set torch's
    environment variables from those of the launcher.

    Raises:
        ValueError: there are several ranks, and an environment variable is missing or wrong.
    """
    # torchrun sets all of them.
    missing = [name for name in LAUNCHER_VARIABLES if name not in os.environ]
    if not missing:
        return True
    sizes = {launcher: _size(launcher) for launcher in _LAUNCHERS}
    launcher = next((launcher for launcher, size in sizes.items() if size > 1), None)
    if launcher is not None:
        _translate(launcher)
        return True
    if dist.is_initialized():
        return False  # the caller formed a process group without these variables
    if _number("WORLD_SIZE", "1") > 1:
        raise ValueError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, and {', '.join(missing)} is not set: this process "
            f"would train alone. Set all of {', '.join(LAUNCHER_VARIABLES)}, as torchrun does."
        )
    # PMIx tells the rank, but not the number of ranks.
    if "PMIX_RANK" in os.environ and not any(sizes.values()):
        raise ValueError(
            f"PMIX_RANK is {os.environ['PMIX_RANK']}, and no variable has the number of ranks. Set all of "
            f"{', '.join(LAUNCHER_VARIABLES)}, or start the ranks with torchrun."
        )
    return False


def _size(launcher: _Launcher) -> int:
    """Return the number of ranks which a launcher has started; 0 if it has not started this process."""
    rank, size = launcher.variables[:2]
    return _number(size) if rank in os.environ and size in os.environ else 0


def _number(name: str, default: str | None = None) -> int:
    """Return the value of an environment variable, or else the default, as an integer."""
    text = os.environ.get(name, default)
    if text is None or not text.isdecimal():
        raise ValueError(f"{name} is {text!r}; it must be a number, as the launcher of ranks sets it.")
    return int(text)


def _translate(launcher: _Launcher) -> None:
    """Set torch's environment variables from those of another launcher."""
    values = dict(zip(_RANK_VARIABLES[:3], map(_number, launcher.variables[:3]), strict=True))
    rank, size = values["RANK"], values["WORLD_SIZE"]
    # Every launcher tells the number of ranks per node in another way.
    if launcher.name == "Slurm":
        values["LOCAL_WORLD_SIZE"] = _tasks_of_this_node()
    elif launcher.name == "Flux":
        if size % _number("FLUX_JOB_NNODES"):
            raise ValueError(f"FLUX_JOB_SIZE is {size}; it must be a multiple of FLUX_JOB_NNODES.")
        values["LOCAL_WORLD_SIZE"] = size // _number("FLUX_JOB_NNODES")
    else:
        values["LOCAL_WORLD_SIZE"] = _number(launcher.variables[3])
    if not (rank < size and values["LOCAL_RANK"] < values["LOCAL_WORLD_SIZE"] <= size):
        listed = ", ".join(f"{name}={os.environ[name]}" for name in launcher.variables)
        raise ValueError(f"{launcher.name} has set {listed}, which contradict each other. Use torchrun.")
    if not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        # Only Slurm lists the hosts of a job step.
        if launcher.name != "Slurm":
            option = launcher.option
            equals = " " if option.endswith("env ") else "="
            raise ValueError(
                f"{launcher.name} started {size} ranks, and no MASTER_ADDR and MASTER_PORT say where they "
                f"meet. On one machine, leave out the launcher: --nproc {size}. On several: "
                f"{option}MASTER_ADDR{equals}HOST_OF_RANK_0, and MASTER_PORT likewise, such as 29500; or use "
                "torchrun."
            )
        os.environ.setdefault("MASTER_ADDR", _first_host(os.environ.get("SLURM_STEP_NODELIST", "")))
        # As in the `meshrec launch slurm` script; every job step has a different port.
        port = 20000 + (_number("SLURM_JOB_ID") + 37 * _number("SLURM_STEP_ID", "0")) % 12000
        os.environ.setdefault("MASTER_PORT", str(port))
    os.environ.update({name: str(value) for name, value in values.items()})


def _tasks_of_this_node() -> int:
    """Return the number of Slurm tasks on this node.

    Slurm lists the tasks as, for example, ``2(x3),1``: 2 tasks on each of 3 nodes, then 1 task on the next
    node.
    """
    text = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    tasks: list[int] = []
    for part in text.split(","):
        match = _TASKS.fullmatch(part)
        if match is None:
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE is {text!r}; it must be as srun sets it: 2(x3),1.")
        tasks += [int(match[1])] * int(match[2] or 1)
    # Position of this node in the job step.
    node = _number("SLURM_NODEID", "0")
    if node >= len(tasks):
        raise ValueError(
            f"SLURM_NODEID is {node}, and SLURM_STEP_TASKS_PER_NODE {text!r} has no such node. Set both as "
            "srun does, or use torchrun."
        )
    return tasks[node]


def _first_host(nodes: str) -> str:
    """Return the first host in a Slurm node list, such as ``gpu007`` for ``gpu[007-010,12]``."""
    match = _FIRST_HOST.match(nodes)
    if match is None:
        raise ValueError(f"SLURM_STEP_NODELIST is {nodes!r}; set MASTER_ADDR to the host of rank 0.")
    return f"{match[1]}{match[2] or ''}{match[3] or ''}"
