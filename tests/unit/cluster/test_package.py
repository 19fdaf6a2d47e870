"""What is sent with a job, what is not, and when nothing is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

import pytest

from raytrain_app.cluster import package
from raytrain_app.cluster.package import JOB_FILE, describe, plan_package, write_package
from raytrain_app.errors import JobError
from raytrain_app.job import Job, job_from_dict, load_job
from raytrain_app.task import load_task

TASK = "from helper_of_mine import SHAPE\nfrom raytrain_app.tasks.synthetic import TASK\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project as people have them, with a task whose helper an ignore file names."""
    for path, text in {
        "job.yaml": "",
        "my_task.py": TASK,
        "helper_of_mine.py": "SHAPE = (2,)\n",
        "notes/log.txt": "x",
        ".gitignore": "data/\nhelper*\n*.tmp\n!keep.tmp\n",
        "data/train.csv": "1,2\n",
        "data/test.csv": "1,2\n",
        "a.tmp": "",
        "keep.tmp": "",
        "deep/.gitignore": "secret\n",
        "deep/secret": "",
        "deep/open": "",
        ".rayignore": "notes/\n",
        ".git/objects/1": "x",
        "env/pyvenv.cfg": "",
        "env/lib/big.py": "",
        "runs/first/job.yaml": "",
        "__pycache__/my_task.pyc": "",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("my_task", "helper_of_mine"):
        sys.modules.pop(name, None)


def make_job(**data: object) -> Job:
    return job_from_dict(
        {"name": "first", "task": "my_task:TASK", "model": {"name": "mlp"}, "data": data, "storage": "gs://bucket/runs"}
    )


def names(chosen: package.Package) -> list[str]:
    return [path.as_posix() for path in chosen.files]


def test_ignore_files_hold_at_every_level(project: Path) -> None:
    chosen = plan_package(make_job(), project)
    assert names(chosen) == [".gitignore", ".rayignore", "deep/.gitignore", "deep/open", "job.yaml", "keep.tmp", "my_task.py"]
    assert chosen.forced == {}


def test_what_the_job_needs_is_sent_anyway_and_named(project: Path) -> None:
    load_task("my_task:TASK")
    chosen = plan_package(make_job(source="data/train.csv", test_source="./data/test.csv"), project)
    forced = {path.as_posix(): source for path, source in chosen.forced.items()}
    assert forced == dict.fromkeys(("data/test.csv", "data/train.csv", "helper_of_mine.py"), ".gitignore")
    assert set(forced) < set(names(chosen))
    assert "helper_of_mine.py is sent although .gitignore leaves it out, since the job needs it" in describe(chosen)


def test_a_folder_or_pattern_of_data_is_sent_whole(project: Path) -> None:
    for source in ("data", "data/*.csv"):
        assert {"data/test.csv", "data/train.csv"} < set(names(plan_package(make_job(source=source), project)))


def test_the_package_holds_the_resolved_job(project: Path, tmp_path: Path) -> None:
    job = make_job(source="data/train.csv")
    target = tmp_path / "out.zip"
    write_package(plan_package(job, project), job, target)
    with ZipFile(target) as archive:
        assert archive.testzip() is None
        assert archive.read("data/train.csv") == b"1,2\n"
        (tmp_path / "resolved.yaml").write_bytes(archive.read(JOB_FILE))
    assert load_job(str(tmp_path / "resolved.yaml")) == job


def test_what_is_too_large_is_refused_with_the_largest_named(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (project / "weights.bin").open("wb") as file:
        file.truncate(150 * 2**20)
    with pytest.raises(
        JobError, match=r"too large to be sent: 150 MiB in 8 files, and .* at most 100 MiB.*weights.bin \(150 MiB\)"
    ):
        plan_package(make_job(), project)
    (project / ".rayignore").write_text("*.bin\n")
    assert plan_package(make_job(), project).num_bytes < 2**20


def test_git_and_environments_do_not_count(project: Path) -> None:
    for path in (".git/objects/pack", "env/lib/big.py", "runs/first/weights"):
        with (project / path).open("wb") as file:
            file.truncate(150 * 2**20)
    assert plan_package(make_job(), project).num_bytes < 2**20


def test_what_the_cluster_cannot_see_is_said(project: Path) -> None:
    with pytest.raises(JobError, match=r"storage: found runs, which on the cluster is a folder that is deleted with the job"):
        plan_package(make_job().model_copy(update={"storage": "runs"}), project)
    with pytest.raises(JobError, match=r"data.source: .*elsewhere.csv is outside of the current folder, and only that is sent"):
        plan_package(make_job(source="../elsewhere.csv"), project)
    chosen = plan_package(make_job(source="/data/mnist.npz"), project)
    assert chosen.notes == (
        "data.source: /data/mnist.npz is not sent, since it is outside of the current folder; it must be there on all nodes",
    )
    assert plan_package(make_job(source="gs://bucket/mnist.npz"), project).notes == ()
    assert plan_package(make_job(source="mnist"), project).notes == ()


def test_links_neither_loop_nor_break(project: Path) -> None:
    (project / "loop").symlink_to(project)
    (project / "gone").symlink_to(project / "nowhere")
    (project / "copy").symlink_to(project / "job.yaml")
    assert "copy" in names(plan_package(make_job(), project))
