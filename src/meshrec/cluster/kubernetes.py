"""Create Kubernetes manifests: a training job as JobSet or PyTorchJob, and a server with autoscaling.

All ranks in a pod run in the same container, so they share a PID namespace and a user. They can therefore
read each other's memory (the host link) without additional capabilities. /dev/shm is a memory volume, because
the default is only 64 MiB.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from meshrec.cluster.kubernetes_values import (
    check_bytes,
    check_counts,
    check_cpus,
    check_image,
    check_name,
    check_variable,
)

# torch's usual rendezvous port, and the port of the server inside its pods.
_PORT = 29500
_SERVE_PORT = 8080
# How long Kubernetes waits for a last checkpoint when it evicts a pod.
_GRACE_SECONDS = 120
RUNS = "/runs"
"""Path in training pods at which the volume with runs and checkpoints is mounted."""
MODELS = "/models"
"""Path in serving pods at which the volume with exported packages is mounted."""


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Settings of a training job on Kubernetes.

    Attributes:
        recipe: name of the recipe, or its path inside the image, as for `meshrec train`.
        arguments: further arguments for `meshrec train`.
        image: container image, such as "ghcr.io/team/meshrec:1".
        replicas: number of pods, which run on different nodes where possible.
        ranks_per_pod: number of ranks in a pod.
        name: job name, a DNS label.
        claim: name of the PersistentVolumeClaim for runs and checkpoints. All pods mount it (ReadWriteMany).
        cpus: cores per pod, such as "4" or "500m".
        memory: memory per pod, such as "16Gi", including /dev/shm.
        shm: size of /dev/shm, such as "2Gi".
        gpus: GPUs per pod.
        restarts: maximum restarts after failures. A restart resumes from the last checkpoint.
        environment: environment variables for the ranks.

    Raises:
        ValueError: Kubernetes would reject or misunderstand a value.
    """

    recipe: str
    arguments: Sequence[str] = ()
    image: str
    replicas: int = 2
    ranks_per_pod: int = 1
    name: str = "meshrec"
    claim: str = "meshrec-runs"
    cpus: str = "4"
    memory: str = "16Gi"
    shm: str = "2Gi"
    gpus: int = 0
    restarts: int = 10
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.replicas < 1 or self.ranks_per_pod < 1:
            raise ValueError(
                f"{self.replicas} replicas with {self.ranks_per_pod} ranks each: both must be at least 1."
            )
        check_counts(0, gpus=self.gpus, restarts=self.restarts)
        # The longest derived name, the last pod's, must be a DNS label.
        check_name("name", self.name, 63 - len(f"-ranks-0-{self.replicas - 1}-xxxxx"))
        check_name("claim", self.claim, 253, dots=True)
        check_image("image", self.image)
        check_cpus("cpus", self.cpus)
        # Kubernetes counts /dev/shm towards the memory limit, because it is stored in memory.
        if check_bytes("shm", self.shm) > check_bytes("memory", self.memory):
            raise ValueError(
                f"shm is {self.shm}, which counts towards memory ({self.memory}). Give more memory."
            )
        for name in self.environment:
            check_variable("environment", name)


@dataclass(frozen=True, kw_only=True)
class ServeJob:
    """Settings of a server on Kubernetes, whose number of pods depends on the load.

    Attributes:
        package: path of the exported package, relative to the model volume.
        image: container image, such as "ghcr.io/team/meshrec:1".
        name: server name, a DNS label.
        replicas: minimum pod count.
        max_replicas: maximum pod count.
        claim: name of the PersistentVolumeClaim for the model volume.
        workers: number of processes per pod.
        cpus: cores per pod, such as "2" or "500m".
        memory: memory per pod, such as "8Gi".
        requests_per_second: requests per second and pod above which the autoscaler adds pods.
        secret: name of the Secret whose key ``token`` contains the access token required from clients.

    Raises:
        ValueError: Kubernetes would reject or misunderstand a value.
    """

    package: str
    image: str
    name: str = "meshrec-serve"
    replicas: int = 2
    max_replicas: int = 10
    claim: str = "meshrec-models"
    workers: int = 2
    cpus: str = "2"
    memory: str = "8Gi"
    requests_per_second: int = 200
    secret: str = "meshrec-token"

    def __post_init__(self) -> None:
        if not 1 <= self.replicas <= self.max_replicas:
            raise ValueError(
                f"{self.replicas} to {self.max_replicas} replicas: the first must be at least 1, and the "
                "second not below it."
            )
        check_counts(1, workers=self.workers, requests_per_second=self.requests_per_second)
        # A pod's name adds the hashes of its deployment and replica set, and must fit 63 characters.
        check_name("name", self.name, 63 - len("-0123456789-xxxxx"))
        check_name("claim", self.claim, 253, dots=True)
        check_name("secret", self.secret, 253, dots=True)
        check_image("image", self.image)
        check_cpus("cpus", self.cpus)
        check_bytes("memory", self.memory)
        path = PurePosixPath(self.package)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise ValueError(f"package is {self.package!r}; it must be a relative path in the model volume.")


def job_set(job: JobOptions) -> dict[str, Any]:
    """Return the JobSet manifest (jobset.x-k8s.io/v1alpha2) for a training job, to be written as YAML."""
    # The first pod's DNS name, which the JobSet's subdomain keeps after restarts.
    first = f"{job.name}-ranks-0-0.{job.name}"
    pod = _pod(job, _torchrun(job, first, "$(JOB_COMPLETION_INDEX)"))
    # The JobSet restarts all pods together, because ranks cannot join a running group again.
    pod["spec"]["restartPolicy"] = "Never"
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": job.name},
            "failurePolicy": {"maxRestarts": job.restarts},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["ranks"]},
            "replicatedJobs": [
                {
                    "name": "ranks",
                    "replicas": 1,
                    "template": {
                        "spec": {
                            "parallelism": job.replicas,
                            "completions": job.replicas,
                            "completionMode": "Indexed",
                            # The first failed pod fails the Job, and the JobSet's failurePolicy restarts it.
                            "backoffLimit": 0,
                            "template": pod,
                        }
                    },
                }
            ],
        },
    }


def pytorch_job(job: JobOptions) -> dict[str, Any]:
    """Return the PyTorchJob manifest (kubeflow.org/v1) for a training job, to be written as YAML."""

    def replica_spec(num_pods: int) -> dict[str, Any]:
        """Return the ReplicaSpec for ``num_pods`` identical pods."""
        pod = _pod(job, _torchrun(job, "$(MASTER_ADDR)", "$(RANK)"))
        pod["spec"]["containers"][0]["name"] = "pytorch"  # required by the operator
        return {"replicas": num_pods, "restartPolicy": "OnFailure", "template": pod}

    # The operator sets MASTER_ADDR to the master, which is the pod with number 0.
    replicas = {"Master": replica_spec(1)}
    if job.replicas > 1:
        replicas["Worker"] = replica_spec(job.replicas - 1)
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": job.name},
        "spec": {
            "runPolicy": {"backoffLimit": job.restarts, "cleanPodPolicy": "None"},
            "pytorchReplicaSpecs": replicas,
        },
    }


def serving(job: ServeJob) -> list[dict[str, Any]]:
    """Return the manifests for a server: a Deployment, a Service and a HorizontalPodAutoscaler.

    The autoscaler reads the metric ``meshrec_requests_per_second``. prometheus-adapter must compute it as the
    rate of ``meshrec_requests_total`` per pod.
    """
    # By this label, the Service and the Deployment find the pods.
    labels = {"app": job.name}
    return [
        _deployment(job, labels),
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": job.name, "labels": labels},
            "spec": {
                "selector": labels,
                "ports": [{"name": "http", "protocol": "TCP", "port": 80, "targetPort": "http"}],
            },
        },
        {
            "apiVersion": "autoscaling/v2",
            "kind": "HorizontalPodAutoscaler",
            "metadata": {"name": job.name},
            "spec": {
                "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": job.name},
                "minReplicas": job.replicas,
                "maxReplicas": job.max_replicas,
                "metrics": [
                    {
                        "type": "Pods",
                        "pods": {
                            "metric": {"name": "meshrec_requests_per_second"},
                            "target": {"type": "AverageValue", "averageValue": str(job.requests_per_second)},
                        },
                    }
                ],
                # A new pod must load tables first, so do not remove pods during a short lull.
                "behavior": {"scaleDown": {"stabilizationWindowSeconds": 300}},
            },
        },
    ]


def _deployment(job: ServeJob, labels: dict[str, str]) -> dict[str, Any]:
    """Return the Deployment manifest for a server."""
    # All interfaces, because the Service reaches the pod from outside the container.
    words = ["meshrec", "serve", f"{MODELS}/{job.package}", "--host", "0.0.0.0", "--port", str(_SERVE_PORT)]
    token = {"secretKeyRef": {"name": job.secret, "key": "token"}}
    container = {
        "name": "serve",
        "image": job.image,
        "command": [*words, "--workers", str(job.workers)],
        "env": [{"name": "MESHREC_TOKEN", "valueFrom": token}],
        "ports": [{"name": "http", "containerPort": _SERVE_PORT, "protocol": "TCP"}],
        "resources": {"requests": {"cpu": job.cpus, "memory": job.memory}, "limits": {"memory": job.memory}},
        # Loading tables may take minutes; the other probes start afterwards.
        "startupProbe": _probe("ready", periodSeconds=5, failureThreshold=120),
        # The startup probe allows 5 s * 120 = 10 minutes.
        "readinessProbe": _probe("ready", periodSeconds=5),
        "livenessProbe": _probe("live", periodSeconds=10, failureThreshold=6),
        "securityContext": _container_security(),
        "volumeMounts": [
            {"name": "models", "mountPath": MODELS, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    scraped = {"prometheus.io/scrape": "true", "prometheus.io/port": str(_SERVE_PORT)}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": job.name, "labels": labels},
        "spec": {
            "replicas": job.replicas,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels, "annotations": {**scraped, "prometheus.io/path": "/metrics"}},
                "spec": {
                    # As long as the server waits for unanswered requests when it stops.
                    "terminationGracePeriodSeconds": 60,
                    "securityContext": _pod_security(),
                    "containers": [container],
                    "volumes": [
                        {
                            "name": "models",
                            "persistentVolumeClaim": {"claimName": job.claim, "readOnly": True},
                        },
                        _in_memory("shm", "1Gi"),
                        {"name": "tmp", "emptyDir": {}},
                    ],
                },
            },
        },
    }


def _pod(job: JobOptions, words: list[str]) -> dict[str, Any]:
    """Return the pod template of a training job."""
    # The user's variables come last and replace these.
    environment = {
        "MESHREC_LAUNCH": job.name,
        "XDG_STATE_HOME": f"{RUNS}/.state",  # on the volume, so all pods share the key sealing runs
        "PYTHONUNBUFFERED": "1",
        "PYTHONSAFEPATH": "1",  # `python -m` must not import a torch.py from the working folder
        **job.environment,
    }
    # No CPU limit, which would throttle the pod; the CPU request reserves the cores.
    limits: dict[str, Any] = {"memory": job.memory}
    if job.gpus:
        limits["nvidia.com/gpu"] = str(job.gpus)
    container = {
        "name": "ranks",
        "image": job.image,
        "command": words,
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        "ports": [{"name": "ranks", "containerPort": _PORT, "protocol": "TCP"}],
        "resources": {"requests": {"cpu": job.cpus, "memory": job.memory}, "limits": limits},
        "securityContext": _container_security(),
        "volumeMounts": [
            {"name": "runs", "mountPath": RUNS},
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    # Spread pods over nodes if possible, but do not wait for free nodes.
    apart = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {"app": job.name}},
    }
    return {
        "metadata": {"labels": {"app": job.name}},
        "spec": {
            "terminationGracePeriodSeconds": _GRACE_SECONDS,
            # Needed for the host link if a sidecar starts ranks.
            "shareProcessNamespace": True,
            "topologySpreadConstraints": [apart],
            "securityContext": _pod_security(),
            "containers": [container],
            "volumes": [
                {"name": "runs", "persistentVolumeClaim": {"claimName": job.claim}},
                _in_memory("shm", job.shm),
                {"name": "tmp", "emptyDir": {}},
            ],
        },
    }


def _torchrun(job: JobOptions, first: str, number: str) -> list[str]:
    """Return the pod's command. ``first`` and ``number`` may contain $(NAME), which Kubernetes replaces."""
    return [
        *("python", "-m", "torch.distributed.run", "--nnodes", str(job.replicas)),
        *("--nproc-per-node", str(job.ranks_per_pod), "--node-rank", number),
        *("--master-addr", first, "--master-port", str(_PORT)),
        *("-m", "meshrec", "train", job.recipe, "--out", RUNS, "--quiet", *job.arguments),
    ]


def _probe(endpoint: str, **options: int) -> dict[str, Any]:
    """Return a probe by which Kubernetes asks the server's health endpoint, "ready" or "live"."""
    return {"httpGet": {"path": f"/v2/health/{endpoint}", "port": "http"}, **options}


def _in_memory(name: str, size: str) -> dict[str, Any]:
    """Return a volume which is stored in memory."""
    return {"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": size}}


def _pod_security() -> dict[str, Any]:
    """Return the security context of all pods, which run as an ordinary user."""
    # fsGroup lets this user write to mounted volumes.
    return {"runAsNonRoot": True, "runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000}


def _container_security() -> dict[str, Any]:
    """Return the security context of all containers, which have no privileges."""
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
