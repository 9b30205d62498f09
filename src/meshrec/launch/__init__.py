"""Scripts and manifests that start runs on the engines of a cluster: Slurm and Kubernetes."""

from meshrec.launch.kubernetes import JobOptions, ServeJob, job_set, pytorch_job, serving
from meshrec.launch.slurm import SlurmJob, script, submit

__all__ = ["JobOptions", "ServeJob", "SlurmJob", "job_set", "pytorch_job", "script", "serving", "submit"]
