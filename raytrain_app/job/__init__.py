"""The job file: one frozen value that says everything about a run."""

from raytrain_app.job.compare import result_differences
from raytrain_app.job.load import job_from_dict, job_from_text, load_job
from raytrain_app.job.model import (
    Adam,
    AdamW,
    Checkpoint,
    Data,
    EarlyStopping,
    Failure,
    Job,
    Model,
    Optimizer,
    Scaling,
    Sgd,
    Train,
    Workers,
)
from raytrain_app.job.strategies import AllReduce, ModelParallel, ParameterServer, Strategy

__all__ = [
    "Adam",
    "AdamW",
    "AllReduce",
    "Checkpoint",
    "Data",
    "EarlyStopping",
    "Failure",
    "Job",
    "Model",
    "ModelParallel",
    "Optimizer",
    "ParameterServer",
    "Scaling",
    "Sgd",
    "Strategy",
    "Train",
    "Workers",
    "job_from_dict",
    "job_from_text",
    "load_job",
    "result_differences",
]
