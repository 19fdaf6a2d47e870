"""Object stores, against a real S3 protocol: the same promises as on a disk, and failures that end in time."""

from __future__ import annotations

import pickle
import time

import numpy as np
import pytest

from raytrain_app.errors import StorageError
from raytrain_app.job import Job, job_from_dict
from raytrain_app.state import TrainState
from raytrain_app.storage.checkpoints import CheckpointStore
from raytrain_app.storage.folder import Folder
from raytrain_app.storage.remote import RemoteFolder
from raytrain_app.storage.rundir import RunDirectory
from raytrain_app.storage.spool import Spool
from raytrain_app.storage.tensorboard import TensorBoardWriter
from tests.integration.storage.conftest import FaultyS3


def make_job(storage: str) -> Job:
    return job_from_dict({"name": "first", "task": "mnist", "model": {"name": "cnn"}, "storage": storage})


def test_files_and_folders(bucket_uri: str) -> None:
    folder = Folder.open(bucket_uri)
    assert not folder.exists()
    assert folder.files() == {}
    folder.check_writable()
    assert folder.files() == {}
    folder.write("a/b.txt", b"12")
    folder.child("a").write("c/d", b"3" * 6_000_000)
    assert folder.files() == {"a/b.txt": 2, "a/c/d": 6_000_000}
    assert (folder.list(), folder.child("a").list()) == (["a"], ["b.txt", "c"])
    assert folder.exists("a")
    assert folder.read("a/c/d") == b"3" * 6_000_000
    assert not folder.create("a/b.txt", b"no")
    assert folder.create("a/new", b"yes")
    folder.delete("a/b.txt")
    folder.delete("a/nothing")
    assert sorted(folder.files()) == ["a/c/d", "a/new"]
    folder.delete("a")
    assert folder.files() == {}
    assert not folder.exists("a")
    again = pickle.loads(pickle.dumps(folder.child("x")))
    assert again.uri == folder.child("x").uri


def test_a_whole_run(bucket_uri: str) -> None:
    job = make_job(bucket_uri)
    directory = RunDirectory.reserve(job)
    with directory.writing("abc"):
        directory.append_metrics([{"step": 1, "loss": 0.5}])
        directory.append_events([{"kind": "start"}])
        writer = TensorBoardWriter(directory)
        writer.add([{"kind": "step", "step": 1, "loss": 0.5}])
        writer.close()
        store = CheckpointStore(directory.checkpoints, 1, "val_loss", "min")
        for step, loss in enumerate([0.3, 0.1, 0.2], start=1):
            store.save(step, TrainState({"w": np.full(4, step, np.float32)}, progress={"step": step}), {"val_loss": loss})
        assert store.steps() == [2, 3]
        best = directory.best_checkpoint()
        directory.write_result({"status": "stopped"})
    assert best == RunDirectory.open(directory.uri).checkpoints.child("step-00000002").uri
    found = store.load("best")
    assert found is not None
    assert found[0].weights["w"].tolist() == [2.0] * 4
    with pytest.raises(StorageError, match="exists already"):
        RunDirectory.reserve(job)
    again = RunDirectory.reopen(job)
    with again.writing("abc"):
        assert again.read_result() is None
        again.append_metrics([{"step": 2}])
    assert RunDirectory.open(directory.uri).read_metrics() == [{"step": 1, "loss": 0.5}, {"step": 2}]
    assert any(path.startswith("tensorboard/events.out.tfevents") for path in again.folder.files())


def test_a_cut_upload_of_the_newest_is_passed_over(bucket_uri: str) -> None:
    folder = Folder.open(bucket_uri)
    store = CheckpointStore(folder, 3, "val_loss", "min")
    for step in (1, 2, 3):
        store.save(step, TrainState({"w": np.full(4, step, np.float32)}), {})
    folder.write("step-00000003/weights.safetensors", folder.read("step-00000003/weights.safetensors")[:-1])
    folder.delete("step-00000002/manifest.json")
    found = store.load()
    assert found is not None
    assert found[1] == 1
    assert ["expected 80 bytes" in found[2][0], "never finished" in found[2][1]] == [True, True]


@pytest.mark.parametrize("fault", ["busy", "cut"])
def test_short_failures_are_ridden_out(bucket_uri: str, s3: FaultyS3, fault: str) -> None:
    s3.faults = [fault] * 3  # more than the S3 client itself bears
    folder = Folder.open(bucket_uri)
    folder.write("x", b"12")
    assert s3.uploads > 3
    assert folder.read("x") == b"12"


def test_a_refusal_is_not_tried_again(bucket_uri: str, s3: FaultyS3) -> None:
    s3.faults = ["denied"] * 100
    with pytest.raises(StorageError, match=r"cannot write s3://bucket/.*/x.* as user .*ACCESS_DENIED.*; give this user"):
        Folder.open(bucket_uri).write("x", b"12")
    assert s3.uploads < 3


@pytest.mark.parametrize("fault", ["hang", "busy"])
def test_a_deadline_ends_what_does_not_end(bucket_uri: str, s3: FaultyS3, fault: str) -> None:
    s3.faults = [fault] * 100
    started_s = time.monotonic()
    with pytest.raises(StorageError, match="cannot write s3://bucket/"):
        RemoteFolder(bucket_uri, deadline_s=1.5).write("x", b"12")
    assert time.monotonic() - started_s < 3


def test_unknown_bucket_and_options(bucket_uri: str) -> None:
    with pytest.raises(StorageError, match=r"NO_SUCH_BUCKET.*; check the name of the bucket and the path"):
        Folder.open(bucket_uri.replace("//bucket", "//nobucket")).check_writable()
    with pytest.raises(StorageError, match="Unexpected query parameter in S3 URI: 'nonsense'"):
        Folder.open(bucket_uri + "&nonsense=1").exists()


def test_growing_files_reach_the_bucket_while_they_grow(bucket_uri: str, s3: FaultyS3) -> None:
    folder = Folder.open(bucket_uri)
    spool = Spool(folder, every_s=0.05)
    path = spool.path("metrics.jsonl")
    with path.open("ab") as file:
        for line in (b"0\n", b"1\n", b"2\n"):
            file.write(line)
            file.flush()
            _wait_until_in(folder, line)
    spool.close()
    assert not path.exists()
    assert Spool(folder).path("metrics.jsonl").read_bytes() == b"0\n1\n2\n"


def test_when_the_last_upload_fails_it_says_where_the_file_is(bucket_uri: str, s3: FaultyS3) -> None:
    spool = Spool(RemoteFolder(bucket_uri, deadline_s=1))
    path = spool.path("metrics.jsonl")
    path.write_bytes(b"1\n")
    s3.faults = ["denied"] * 100
    with pytest.raises(StorageError, match=f"The run's files are kept in {path.parent}"):
        spool.close()
    assert path.read_bytes() == b"1\n"


def _wait_until_in(folder: Folder, line: bytes) -> None:
    end_s = time.monotonic() + 10
    while not (folder.exists("metrics.jsonl") and folder.read("metrics.jsonl").endswith(line)):
        assert time.monotonic() < end_s, "it was not uploaded"
        time.sleep(0.02)
