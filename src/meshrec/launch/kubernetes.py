"""Manifests for Kubernetes: a training job as a JobSet or a PyTorchJob, and a server with its autoscaler.

All ranks of a pod share one PID namespace and one user, since they are processes of one container. Therefore
they read each other's memory (the host link) without any capability. /dev/shm is a volume in memory, because
Kubernetes alone gives it 64 MiB.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_PORT = 29500
_SERVE_PORT = 8080
_GRACE_SECONDS = 120
RUNS = "/runs"
"""Mount point of the volume with the runs, in every pod."""
MODELS = "/models"


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """A training job for Kubernetes.

    Attributes:
        recipe: the recipe, as `meshrec train` takes it in the image.
        arguments: further arguments of `meshrec train`.
        image: the image of the container.
        replicas: the number of pods, each on a node of its own where possible.
        ranks_per_pod: the number of ranks in each pod.
        name: the name of the job.
        claim: the PersistentVolumeClaim for runs and checkpoints, which all pods mount (ReadWriteMany).
        cpus: the cores of a pod.
        memory: the memory of a pod, such as 16Gi; /dev/shm counts towards it.
        shm: the size of /dev/shm.
        gpus: the GPUs of a pod.
        restarts: how often the job starts again after a failure, from the last checkpoint.
        environment: variables for the ranks.
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


@dataclass(frozen=True, kw_only=True)
class ServeJob:
    """A server for Kubernetes.

    Attributes:
        package: the package to serve, as a path below the volume with the models.
        image: the image of the container.
        name: the name of the server.
        replicas: the smallest number of pods.
        most_replicas: the largest number of pods.
        claim: the PersistentVolumeClaim with the packages.
        workers: the processes of a pod.
        cpus: the cores of a pod.
        memory: the memory of a pod.
        requests_per_second: the requests of a pod per second, above which there are more pods.
        secret: the Secret whose key ``token`` clients must send.
    """

    package: str
    image: str
    name: str = "meshrec-serve"
    replicas: int = 2
    most_replicas: int = 10
    claim: str = "meshrec-models"
    workers: int = 2
    cpus: str = "2"
    memory: str = "8Gi"
    requests_per_second: int = 200
    secret: str = "meshrec-token"

    def __post_init__(self) -> None:
        if not 1 <= self.replicas <= self.most_replicas:
            raise ValueError(
                f"{self.replicas} to {self.most_replicas} replicas: the first must be at least 1, and the "
                "second not below it."
            )


def job_set(job: JobOptions) -> dict[str, Any]:
    """Return the JobSet (jobset.x-k8s.io/v1alpha2) of a training job, with stable host names for its pods."""
    first = f"{job.name}-ranks-0-0.{job.name}"
    pod = _pod(job, _torchrun(job, first, "$(JOB_COMPLETION_INDEX)"))
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
                            "backoffLimit": 0,
                            "template": pod,
                        }
                    },
                }
            ],
        },
    }


def pytorch_job(job: JobOptions) -> dict[str, Any]:
    """Return the PyTorchJob (kubeflow.org/v1) of a training job; its operator names the first pod."""

    def replica(number: int) -> dict[str, Any]:
        pod = _pod(job, _torchrun(job, "$(MASTER_ADDR)", "$(RANK)"))
        pod["spec"]["containers"][0]["name"] = "pytorch"  # the operator looks for this name
        return {"replicas": number, "restartPolicy": "OnFailure", "template": pod}

    replicas = {"Master": replica(1)}
    if job.replicas > 1:
        replicas["Worker"] = replica(job.replicas - 1)
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
    """Return the Deployment, the Service and the HorizontalPodAutoscaler of a server.

    The autoscaler's metric is the rate of ``meshrec_requests_total`` of each pod, as prometheus-adapter
    offers it under the name ``meshrec_requests_per_second``.
    """
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
                "maxReplicas": job.most_replicas,
                "metrics": [
                    {
                        "type": "Pods",
                        "pods": {
                            "metric": {"name": "meshrec_requests_per_second"},
                            "target": {"type": "AverageValue", "averageValue": str(job.requests_per_second)},
                        },
                    }
                ],
                # A pod loads its tables before it is ready: do not end one for a short lull.
                "behavior": {"scaleDown": {"stabilizationWindowSeconds": 300}},
            },
        },
    ]


def _deployment(job: ServeJob, labels: dict[str, str]) -> dict[str, Any]:
    words = ["meshrec", "serve", f"{MODELS}/{job.package}", "--host", "0.0.0.0", "--port", str(_SERVE_PORT)]
    token = {"secretKeyRef": {"name": job.secret, "key": "token"}}
    container = {
        "name": "serve",
        "image": job.image,
        "command": [*words, "--workers", str(job.workers)],
        "env": [{"name": "MESHREC_TOKEN", "valueFrom": token}],
        "ports": [{"name": "http", "containerPort": _SERVE_PORT, "protocol": "TCP"}],
        "resources": {"requests": {"cpu": job.cpus, "memory": job.memory}, "limits": {"memory": job.memory}},
        # Loading tables may take minutes; the other probes begin after it.
        "startupProbe": _probe("ready", periodSeconds=5, failureThreshold=120),
        "readinessProbe": _probe("ready", periodSeconds=5),
        "livenessProbe": _probe("live", periodSeconds=10, failureThreshold=6),
        "securityContext": _security(),
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
                    "terminationGracePeriodSeconds": 60,
                    "securityContext": _user(),
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
    environment = {
        "MESHREC_LAUNCH": job.name,
        "XDG_STATE_HOME": f"{RUNS}/.state",  # the key that seals runs: one for all pods
        "PYTHONUNBUFFERED": "1",
        **job.environment,
    }
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
        "securityContext": _security(),
        "volumeMounts": [
            {"name": "runs", "mountPath": RUNS},
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    apart = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {"app": job.name}},
    }
    return {
        "metadata": {"labels": {"app": job.name}},
        "spec": {
            # For the last checkpoint, when a pod is evicted.
            "terminationGracePeriodSeconds": _GRACE_SECONDS,
            # One PID namespace for all containers of a pod, should a sidecar start ranks.
            "shareProcessNamespace": True,
            "topologySpreadConstraints": [apart],
            "securityContext": _user(),
            "containers": [container],
            "volumes": [
                {"name": "runs", "persistentVolumeClaim": {"claimName": job.claim}},
                _in_memory("shm", job.shm),
                {"name": "tmp", "emptyDir": {}},
            ],
        },
    }


def _torchrun(job: JobOptions, first: str, number: str) -> list[str]:
    return [
        *("python", "-m", "torch.distributed.run", "--nnodes", str(job.replicas)),
        *("--nproc-per-node", str(job.ranks_per_pod), "--node-rank", number),
        *("--master-addr", first, "--master-port", str(_PORT)),
        *("-m", "meshrec", "train", job.recipe, "--out", RUNS, "--quiet", *job.arguments),
    ]


def _probe(what: str, **options: int) -> dict[str, Any]:
    return {"httpGet": {"path": f"/v2/health/{what}", "port": "http"}, **options}


def _in_memory(name: str, size: str) -> dict[str, Any]:
    return {"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": size}}


def _user() -> dict[str, Any]:
    return {"runAsNonRoot": True, "runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000}


def _security() -> dict[str, Any]:
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
