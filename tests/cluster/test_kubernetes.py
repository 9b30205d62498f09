"""Manifests are those that the published schemas describe: nothing is missing, and no field is unknown to
them.

The schemas are the models that Kubeflow publishes, made from the API types of JobSet, Kubernetes and its own.
"""

import re

import pytest

from meshrec.cluster import JobOptions, ServeJob, job_set, pytorch_job, serving

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
    with pytest.raises(ValueError, match="1"):
        JobOptions(recipe="x", image="y", replicas=0)
    with pytest.raises(ValueError, match="below"):
        ServeJob(package="x", image="y", replicas=3, max_replicas=2)


@pytest.mark.parametrize("option", ["memory", "shm"])
@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("8g", "8Gi"),
        ("8GB", "8Gi"),
        ("8 GiB", "8Gi"),
        ("2K", "2Ki"),
        ("0.5m", "0.5Mi"),
        ("16", "16Gi"),
        ("1.5t", "1.5Ti"),
        ("0", ""),
        ("-1Gi", ""),
        ("many", ""),
        ("1.0000001Mi", ""),
        ("8Gi ", "8Gi"),
        ("8Gi\n", ""),
        ("٨Gi", ""),
    ],
)
def test_wrong_quantities_of_bytes_are_refused(option, text, meant):
    with pytest.raises(ValueError, match=re.escape(repr(text))) as refused:
        JobOptions(recipe="x", image="y", **{option: text})
    assert option in str(refused.value)
    assert (f"Did you mean {meant}?" in str(refused.value)) == bool(meant)


@pytest.mark.parametrize("text", ["8Gi", "8G", "0.5Gi", "2048Mi", "4e9", "4E9", "3000000k", "+5Gi", "1Ti"])
def test_quantities_of_bytes(text):
    assert pod_of(job_set(JobOptions(recipe="x", image="y", memory=text, shm="1Mi")))


@pytest.mark.parametrize("text", ["2Gi", "0", "0.5m", "-1", "1.0001", "4c", "", "1e0"])
def test_wrong_numbers_of_cores_are_refused(text):
    with pytest.raises(ValueError, match=f"{re.escape(repr(text))}"):
        JobOptions(recipe="x", image="y", cpus=text)
    with pytest.raises(ValueError, match="cpus"):
        ServeJob(package="x", image="y", cpus=text)


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "Films"},
        {"name": "my_job"},
        {"name": "4films"},
        {"name": "f" * 60},
        {"claim": "a..b"},
        {"claim": "Runs"},
        {"image": "MeshRec:1"},
        {"image": "a b"},
        {"image": ""},
        {"image": "x:"},
        {"gpus": -1},
        {"restarts": -1},
        {"memory": "1Gi", "shm": "2Gi"},
        {"environment": {"MY-VAR": "1"}},
    ],
)
def test_wrong_values_of_a_job_are_named(wrong):
    name = list(wrong)[-1]
    with pytest.raises(ValueError, match=name):
        JobOptions(**{"recipe": "x", "image": "y", **wrong})


@pytest.mark.parametrize(
    "wrong",
    [
        {"package": "../x"},
        {"package": "/x"},
        {"package": ""},
        {"secret": "My"},
        {"memory": "8g"},
        {"workers": 0},
        {"requests_per_second": 0},
        {"name": "a.b"},
    ],
)
def test_wrong_values_of_a_server_are_named(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        ServeJob(**{"package": "x", "image": "y", **wrong})


@pytest.mark.parametrize("image", ["a", "a/b:1", "ghcr.io/t/m_n:v1.2", "localhost:5000/x@sha256:" + "0" * 64])
def test_images(image):
    assert JobOptions(recipe="x", image=image).image == image
