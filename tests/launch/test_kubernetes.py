"""Manifests are those that the published schemas describe: nothing is missing, and no field is unknown to
them.

The schemas are the models that Kubeflow publishes, made from the API types of JobSet, Kubernetes and its own.
"""

import re

import pytest

from meshrec.launch import JobOptions, ServeJob, job_set, pytorch_job, serving

JOB = JobOptions(
    recipe="movielens_dlrm", image="meshrec:1", replicas=4, ranks_per_pod=2, gpus=1, name="films"
)


def pod_of(manifest):
    if manifest["kind"] == "JobSet":
        return manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    return manifest["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]


@pytest.mark.parametrize("make", [job_set, pytorch_job])
def test_ranks_of_a_pod_may_use_the_host_link(make):
    spec = pod_of(make(JOB))["spec"]
    (container,) = spec["containers"]
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    volumes = {each["name"]: each for each in spec["volumes"]}
    assert spec["shareProcessNamespace"]
    assert volumes[mounts["/dev/shm"]]["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}
    assert volumes[mounts["/runs"]]["persistentVolumeClaim"]["claimName"] == "meshrec-runs"
    words = container["command"]
    assert words[words.index("--nnodes") + 1] == "4"
    assert words[words.index("--nproc-per-node") + 1] == "2"
    assert words[words.index("--out") + 1] == "/runs"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_the_first_pod_is_found_by_its_name():
    words = pod_of(job_set(JOB))["spec"]["containers"][0]["command"]
    assert words[words.index("--master-addr") + 1] == "films-ranks-0-0.films"


def test_the_job_set_is_valid():
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="the published schema is not installed"
    )
    manifest = job_set(JOB)
    read = models.JobsetV1alpha2JobSet.from_dict(manifest).to_dict()
    assert read == manifest


def check_fields(models, kind, value, where):
    """Compare a value with a type of Kubeflow's training operator, as its client spells types."""
    inner = re.fullmatch(r"(?:[Dd]ict[(\[]str, ?|[Ll]ist\[)(.*)[)\]]", kind)
    if inner:
        for each in value.values() if isinstance(value, dict) else value:
            check_fields(models, inner[1], each, where)
    elif hasattr(models, kind):
        schema = getattr(models, kind)
        names = {json_name: name for name, json_name in schema.attribute_map.items()}
        assert not set(value) - set(names), where
        for name, each in value.items():
            check_fields(models, schema.openapi_types[names[name]], each, f"{where}.{name}")


def test_the_pytorch_job_is_valid():
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="the published schema is not installed"
    )
    training = pytest.importorskip("kubeflow.training.models", reason="the published schema is not installed")
    manifest = pytorch_job(JOB)
    check_fields(training, "KubeflowOrgV1PyTorchJob", manifest, "")
    for replica in manifest["spec"]["pytorchReplicaSpecs"].values():
        pod = replica["template"]
        assert models.IoK8sApiCoreV1PodTemplateSpec.from_dict(pod).to_dict() == pod
    with pytest.raises(AssertionError):
        check_fields(training, "KubeflowOrgV1PyTorchJob", {**manifest, "specs": {}}, "")


def test_the_server_is_valid():
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="the published schema is not installed"
    )
    deployment, service, scaler = serving(ServeJob(package="films/v1", image="meshrec:1"))
    read = models.IoK8sApiAutoscalingV2HorizontalPodAutoscaler.from_dict(scaler).to_dict()
    assert read == scaler
    assert models.IoK8sApiCoreV1Service.from_dict(service).to_dict() == service
    pod = deployment["spec"]["template"]
    assert models.IoK8sApiCoreV1PodTemplateSpec.from_dict(pod).to_dict() == pod
    container = pod["spec"]["containers"][0]
    for name, path in (("startup", "ready"), ("readiness", "ready"), ("liveness", "live")):
        assert container[f"{name}Probe"]["httpGet"]["path"] == f"/v2/health/{path}"


def test_wrong_numbers():
    with pytest.raises(ValueError, match="at least 1"):
        JobOptions(recipe="x", image="y", replicas=0)
    with pytest.raises(ValueError, match="not below it"):
        ServeJob(package="x", image="y", replicas=3, most_replicas=2)
