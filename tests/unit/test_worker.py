"""Where a worker computes."""

from __future__ import annotations

import platform
import subprocess
import sys
from typing import Any

import pytest
import torch

from raytrain_app.errors import ClusterError
from raytrain_app.job import Job, job_from_dict
from raytrain_app.strategies.worker import _kind, choose_device


def make_job(framework: str = "torch", **scaling: Any) -> Job:
    raw = {"name": "unit", "task": "mnist", "model": {"name": "linear"}, "framework": framework, "scaling": scaling}
    return job_from_dict(raw)


def test_the_host_for_those_that_need_no_gpu() -> None:
    host = torch.device("cpu")
    assert choose_device(make_job()) == host
    assert choose_device(make_job(device="cpu", resources_per_worker={"GPU": 1})) == host
    assert choose_device(make_job("tensorflow", resources_per_worker={"GPU": 1})) == host


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_declared_and_not_there() -> None:
    with pytest.raises(ClusterError, match=r"declares a GPU, and PyTorch sees none there: torch .* is built for .* nvidia-smi"):
        choose_device(make_job(resources_per_worker={"GPU": 1}))


def test_a_worker_does_without_torchs_compiler() -> None:
    """It takes a second to load, for each worker."""
    program = (
        "import sys, torch; from raytrain_app.job import job_from_dict; from raytrain_app.task import load_task;"
        "from raytrain_app.strategies.worker import build_learner, prepare_process;"
        "job = job_from_dict({'name': 'x', 'task': 'raytrain_app.tasks.synthetic:TASK', 'model': {'name': 'mlp'}});"
        "prepare_process(job); task = load_task(job.task); learner = build_learner(job, task, torch.device('cpu'));"
        "learner.apply(torch.ones(learner.layout.num_parameters), torch.zeros(0, dtype=torch.int64), 0.1);"
        "learner.load(learner.state());"
        "assert torch.are_deterministic_algorithms_enabled();"
        "print([name for name in ('torch._dynamo', 'torch._inductor') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left as they are")
def test_a_worker_keeps_the_memory_of_a_step_for_the_next() -> None:
    """In a thread, as Ray Train has it: blocks of 2 MiB that are freed and taken again cost no page faults."""
    program = """
import resource, threading
import numpy as np
from raytrain_app.job import job_from_dict
from raytrain_app.strategies.worker import prepare_process

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def train():
    prepare_process(job_from_dict({'name': 'x', 'task': 'mnist', 'model': {'name': 'mlp'}}))
    for step in range(20):
        if step == 10:
            before = faults()
        blocks = [np.ones(1 << 18) for _ in range(20)]
        del blocks
    print(faults() - before)

thread = threading.Thread(target=train)
thread.start()
thread.join()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert int(done.stdout) < 1000, done.stderr


def test_what_a_worker_tells_of_itself_is_plain() -> None:
    """The membership need not load a framework to hear it."""
    assert {type(value) for value in _kind(make_job(), torch.device("cpu")).values()} == {str}
