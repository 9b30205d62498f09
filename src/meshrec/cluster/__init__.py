"""Write launch files for Slurm and Kubernetes, and check hosts before training."""

from typing import TYPE_CHECKING

from meshrec.cluster.kubernetes import JobOptions, ServeJob, job_set, pytorch_job, serving
from meshrec.cluster.slurm import SlurmJob, script, submit
from meshrec.lazy import import_on_use

if TYPE_CHECKING:
    from meshrec.cluster.doctor import Examination, ExaminationOptions, examine
    from meshrec.cluster.findings import Finding

__all__ = [
    "Examination",
    "ExaminationOptions",
    "Finding",
    "JobOptions",
    "ServeJob",
    "SlurmJob",
    "examine",
    "job_set",
    "pytorch_job",
    "script",
    "serving",
    "submit",
]

# Lazy, because the checks import torch, and a login node used only to write scripts may not have it.
import_on_use(__name__)
