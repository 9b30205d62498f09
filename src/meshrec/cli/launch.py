"""``meshrec launch``: start runs on Slurm, print Kubernetes manifests, or host a rendezvous store."""

import shlex
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import tyro

from meshrec.cli.arguments import UsageError, Words, check_output, parse
from meshrec.cluster import JobOptions, ServeJob, SlurmJob, job_set, pytorch_job, script, serving, submit
from meshrec.comms.joining import host_store
from meshrec.data.faults import did_you_mean, needs

Recipe = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")]


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """Write a Slurm batch script and submit it. Arguments after `--` are options of `meshrec train`.

    Run it in a folder shared by the nodes. When the job is preempted or reaches its time limit, it saves a
    checkpoint, is queued again, and continues.
    """

    recipe: Recipe
    """Recipe to train."""
    nodes: int = 1
    """Number of nodes."""
    ranks_per_node: int = 1
    """Number of ranks per node."""
    sbatch: Words = ()
    """More sbatch options: --sbatch time=12:00:00 partition=long exclusive."""
    env: Words = ()
    """Environment variables for the ranks: --env GLOO_SOCKET_IFNAME=ib0."""
    name: str = "meshrec"
    """Job name."""
    out: str = "runs"
    """Folder for runs, reachable by all nodes."""
    python: str = sys.executable
    """Python interpreter on the nodes."""
    save_seconds: int = 120
    """Seconds before the time limit at which the run saves and ends."""
    max_requeues: int = SlurmJob.max_requeues
    """Maximum number of requeues after a failure."""
    script: Path | None = None
    """Script file; none: NAME.sbatch."""
    force: bool = False
    """Replace an existing script."""
    dry_run: bool = False
    """Print the script instead of submitting it."""


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions:
    """Print a Kubernetes manifest for a training job. Arguments after `--` are options of `meshrec train`.

    meshrec launch k8s RECIPE --image IMAGE --replicas 4 | kubectl apply -f -
    """

    recipe: Recipe
    """Recipe to train, as a name or path inside the image."""
    image: str
    """Container image; the project's Dockerfile builds one."""
    kind: Literal["jobset", "pytorchjob"] = "jobset"
    """Job type: JobSet, or PyTorchJob for Kubeflow's training operator."""
    replicas: int = JobOptions.replicas
    """Number of pods."""
    ranks_per_pod: int = JobOptions.ranks_per_pod
    """Number of ranks per pod."""
    name: str = JobOptions.name
    """Job name. A job applied again with the same name continues its run."""
    claim: str = JobOptions.claim
    """PersistentVolumeClaim for runs and checkpoints, mounted by all pods (ReadWriteMany)."""
    cpus: str = JobOptions.cpus
    """Cores per pod."""
    memory: str = JobOptions.memory
    """Memory per pod."""
    shm: str = JobOptions.shm
    """Size of /dev/shm, which counts towards the memory."""
    gpus: int = JobOptions.gpus
    """GPUs per pod."""
    restarts: int = JobOptions.restarts
    """Maximum number of restarts after a failure."""
    env: Words = ()
    """Environment variables for the ranks: --env OMP_NUM_THREADS=4."""


@dataclass(frozen=True, kw_only=True)
class ServeManifestOptions:
    """Print Kubernetes manifests for `meshrec serve`: Deployment, Service and autoscaler."""

    package: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PACKAGE")]
    """Package to serve, as a path in the volume with the models."""
    image: str
    """Container image."""
    name: str = ServeJob.name
    """Server name."""
    replicas: int = ServeJob.replicas
    """Minimum number of pods."""
    max_replicas: int = ServeJob.max_replicas
    """Maximum number of pods."""
    claim: str = ServeJob.claim
    """PersistentVolumeClaim with the packages."""
    workers: int = ServeJob.workers
    """Processes per pod."""
    cpus: str = ServeJob.cpus
    """Cores per pod."""
    memory: str = ServeJob.memory
    """Memory per pod."""
    requests_per_second: int = ServeJob.requests_per_second
    """Requests per pod and second above which pods are added."""
    secret: str = ServeJob.secret
    """Kubernetes Secret with the bearer token for clients, under the key `token`."""


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """Host the rendezvous store for an elastic run, until interrupted.

    Start it on a machine that does not train, so that any training host may fail. Start torchrun on every
    host with --rdzv-backend c10d --rdzv-endpoint ADDRESS:PORT --rdzv-conf is_host=0.
    """

    address: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ADDRESS")]
    """Address to listen on. Whoever reaches it can run code in the launchers: use a private network."""
    port: int = 29400
    """Port to listen on."""


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand given by the first argument, and return the exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return 0 if arguments else 2
    name, *remaining = arguments
    if name not in _ACTIONS:
        raise UsageError(
            f"launch {name}: take one of {', '.join(_ACTIONS)}.{did_you_mean(name, list(_ACTIONS))}"
        )
    action, more = _ACTIONS[name], list[str]()
    # Words after -- are for `meshrec train`, and are not parsed here.
    if "--" in remaining:
        end = remaining.index("--")
        remaining, more = remaining[:end], remaining[end + 1 :]
    words = remaining if action.trains else [*remaining, *more]
    options = parse(action.options, words, program=f"meshrec launch {name}")
    return action.run(options, more) if action.trains else action.run(options)


def _slurm(options: SlurmOptions, train_arguments: Sequence[str]) -> int:
    """Write a Slurm script, submit it, and return the exit code."""
    job = SlurmJob(
        recipe=options.recipe,
        arguments=train_arguments,
        nodes=options.nodes,
        ranks_per_node=options.ranks_per_node,
        name=options.name,
        python=options.python,
        out=options.out,
        save_seconds=options.save_seconds,
        max_requeues=options.max_requeues,
        sbatch={
            key: value if equals else None
            for key, equals, value in (word.removeprefix("--").partition("=") for word in options.sbatch)
        },
        environment=_variables(options.env),
    )
    text = script(job)
    if options.dry_run:
        print(text, end="")
        return 0
    path = options.script or Path(f"{options.name}.sbatch")
    check_output(path, force=options.force, option="--script")
    path.write_text(text)
    path.chmod(0o755)
    number = submit(path)
    print(
        f"job {number} is queued: {shlex.quote(str(path))}. squeue -j {number} shows it; scancel "
        f"{number} ends it."
    )
    return 0


def _kubernetes(options: KubernetesOptions, train_arguments: Sequence[str]) -> int:
    """Print the manifest for a training job, and return the exit code."""
    names = ("recipe", "image", "replicas", "ranks_per_pod", "name", "claim", "cpus", "memory", "shm", "gpus")
    values = {name: getattr(options, name) for name in (*names, "restarts")}
    job = JobOptions(**values, arguments=train_arguments, environment=_variables(options.env))
    _print_yaml((job_set if options.kind == "jobset" else pytorch_job)(job))
    return 0


def _serve(options: ServeManifestOptions) -> int:
    """Print the manifests for a server, and return the exit code."""
    _print_yaml(*serving(ServeJob(**vars(options))))
    return 0


def _store(options: StoreOptions) -> int:
    """Run a rendezvous store until Ctrl-C, and return the exit code."""
    store = host_store(options.address, options.port)
    print(f"the store listens at {options.address}:{store.port}", flush=True)
    try:
        # The store works in its own threads.
        threading.Event().wait()
    except KeyboardInterrupt:
        return 0
    return 0


def _print_yaml(*manifests: object) -> None:
    """Print manifests as YAML documents."""
    yaml = needs("yaml", "cli")
    print(yaml.safe_dump_all(manifests, sort_keys=False), end="")


def _variables(words: Sequence[str]) -> dict[str, str]:
    """Parse ``NAME=VALUE`` words to environment variables."""
    variables = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"--env {word}: give NAME=VALUE.")
        variables[name] = value
    return variables


class _Action(NamedTuple):
    """A subcommand, such as ``meshrec launch slurm``.

    Attributes:
        options: options class.
        run: function that runs the subcommand.
        trains: whether words after ``--`` are options for `meshrec train`. They are then passed to ``run`` as
            second argument.
    """

    options: type
    run: Callable[..., int]
    trains: bool = False


_ACTIONS = {
    "slurm": _Action(SlurmOptions, _slurm, trains=True),
    "k8s": _Action(KubernetesOptions, _kubernetes, trains=True),
    "k8s-serve": _Action(ServeManifestOptions, _serve),
    "store": _Action(StoreOptions, _store),
}


def _help() -> str:
    """Return the help text with all subcommands."""
    lines = [
        f"  {name:10} {(action.options.__doc__ or '').splitlines()[0]}" for name, action in _ACTIONS.items()
    ]
    return "\n".join(
        [
            "usage: meshrec launch [-h] {slurm,k8s,k8s-serve,store} ...",
            "",
            "Start runs on clusters.",
            "",
            *lines,
        ]
    )
