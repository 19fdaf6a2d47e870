"""What can be wrong with a job beyond its file: the model, the data and the storage, found before anything starts."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import ValidationError

from raytrain_app.errors import StorageError
from raytrain_app.job import Job
from raytrain_app.task import Task

SENT_FOLDERS = "/runtime_resources/working_dir_files/"
"""In the path of every folder that Ray unpacks for a job."""
INSTALL_TENSORFLOW = "pip install 'raytrain-app[tensorflow]'"


def find_problems(job: Job, task: Task) -> list[str]:
    """Every problem with the job's model and data that shows without Ray, as sentences that name the key."""
    from raytrain_app import data

    model = list(model_problems(job, task))
    if not model and job.replica_workers > 1:
        from raytrain_app.learners.footprint import cutting_problems

        model = cutting_problems(job, task)
    return [*framework_problems(job), *tracker_problems(job), *model, *data.check(job, task)]


def framework_problems(job: Job) -> Iterator[str]:
    """Packages that the job's framework needs and that are not installed here; nothing is imported to find out."""
    if job.framework != "tensorflow":
        return
    needed = ["tensorflow", "keras", "tensorboard", *(["tf_keras"] if job.train.reduction == "fast" else [])]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        yield f"framework: tensorflow needs {' and '.join(missing)}, not installed here; {INSTALL_TENSORFLOW}"


def tracker_problems(job: Job) -> Iterator[str]:
    """Trackers whose packages are not installed here."""
    for name in job.trackers:
        if importlib.util.find_spec(name) is None:
            yield f"trackers: {name} needs the package {name}, which is not installed here; pip install 'raytrain-app[{name}]'"


def storage_problems(job: Job) -> Iterator[str]:
    """Why the run could not write to its storage, told by trying; leaves nothing behind."""
    from raytrain_app.storage.folder import Folder

    try:
        Folder.open(job.storage).child(job.name).check_writable()
    except StorageError as error:
        yield str(error)


def require_lasting(folder: Path | None, job: Job) -> str:
    """Refuses a run directory inside the folder that Ray unpacked for a submitted job, unless the run stays on this node.

    Args:
        folder: the run directory; None is one that is not on this machine's disks.
        job: of the run. Ray is connected.

    Returns:
        What the user should know, empty if nothing.

    Raises:
        StorageError: workers on other nodes would not see the folder.
    """
    from raytrain_app.cluster.nodes import here, living_nodes, room

    if folder is None or SENT_FOLDERS not in folder.as_posix():
        return ""
    found = f"storage: found {job.storage}, which is inside the folder that Ray made for this job"
    fix = "use a bucket such as gs://my-bucket/runs, or the absolute path of a folder that all nodes share: --set storage=..."
    places = {node.node_id: room(node.resources, job.scaling.resources_per_worker) for node in living_nodes()}
    if places.pop(here()) < job.scaling.workers.min or any(places.values()):
        raise StorageError(f"{found}: workers on other nodes do not see it, and Ray deletes it some time after the job; {fix}")
    return f"{found} and deletes some time after it; to keep the run {fix}"


def model_problems(job: Job, task: Task) -> Iterator[str]:
    """What is wrong with `model:`: a name that the task does not have, or options that the model does not take."""
    name = job.model.name
    options = task.models.get(name)
    if options is None:
        yield f"model.name: found {name}; expected {', '.join(task.models)}{_nearest(name, task.models)}"
        return
    hook = "keras_model" if job.framework == "tensorflow" else "torch_model"
    if getattr(type(task), hook) is getattr(Task, hook):
        yield f"framework: {job.framework}, but task {job.task} has no models for it; it must define {hook}"
    try:
        options(**job.model.options)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            key = ".".join(map(str, detail["loc"]))
            if detail["type"] == "extra_forbidden":
                known = ", ".join(options.model_fields) or "none"
                yield f"model.{key}: unknown option; {name} takes {known}{_nearest(key, options.model_fields)}"
            else:
                said = detail["msg"][:1].lower() + detail["msg"][1:]
                yield f"model.{key}: found {detail['input']!r}; {said}"


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""
