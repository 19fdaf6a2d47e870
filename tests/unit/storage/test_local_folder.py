"""Folders on disks: whole files or none, relative paths that survive the trip to a worker, and errors that help."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from raytrain_app.errors import StorageError
from raytrain_app.storage import records
from raytrain_app.storage.folder import Folder


def test_files_and_folders(tmp_path: Path) -> None:
    folder = Folder.open(str(tmp_path / "runs"))
    assert not folder.exists()
    assert folder.files() == {}
    assert folder.list() == []
    folder.write("a/b.txt", b"12")
    folder.child("a", "c").write("d", b"")
    assert folder.files() == {"a/b.txt": 2, "a/c/d": 0}
    assert (folder.list(), folder.child("a").list()) == (["a"], ["b.txt", "c"])
    assert folder.read("a/b.txt") == b"12"
    assert folder.exists("a")
    assert folder.exists("a/b.txt")
    folder.delete("a/b.txt")
    folder.delete("a/nothing")
    assert folder.files() == {"a/c/d": 0}
    folder.delete("a")
    assert not folder.exists("a")


def test_what_a_killed_writer_left_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / ".unfinished-1234").write_bytes(b"half")
    folder = Folder.open(str(tmp_path))
    assert folder.files() == {}
    assert folder.list() == []


def test_readers_see_the_old_content_or_the_new(tmp_path: Path) -> None:
    folder = Folder.open(str(tmp_path))
    contents = [bytes([value]) * 200_000 for value in range(8)]
    folder.write("x", contents[0])
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for content in contents:
                folder.write("x", content)

    writer = threading.Thread(target=write)
    writer.start()
    seen = {folder.read("x") for _ in range(300)}
    stop.set()
    writer.join()
    assert seen <= set(contents)


def test_of_many_that_create_one_succeeds(tmp_path: Path) -> None:
    folder = Folder.open(str(tmp_path / "new"))
    results: list[bool] = []
    threads = [
        threading.Thread(target=lambda number=number: results.append(folder.create("x", b"%d" % number))) for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [False] * 7 + [True]


def test_a_relative_path_means_the_same_folder_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Folder.open("runs")
    monkeypatch.chdir("/")
    again = pickle.loads(pickle.dumps(folder))
    assert again == folder
    assert again.uri == str(tmp_path / "runs")


def test_home_and_file_uris(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Folder.open("~/runs").uri == str(tmp_path / "runs")
    assert Folder.open(f"file://{tmp_path}/runs").uri == str(tmp_path / "runs")


def test_checking_leaves_nothing_behind(tmp_path: Path) -> None:
    Folder.open(str(tmp_path / "a" / "b")).check_writable()
    assert list(tmp_path.iterdir()) == []


OPERATIONS: dict[str, Callable[[Folder], object]] = {
    "write": lambda folder: folder.write("x", b""),
    "create": lambda folder: folder.create("x", b""),
    "check_writable": lambda folder: folder.check_writable(),
    "read": lambda folder: folder.read("x"),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_errors_say_who_what_where_and_what_to_do(tmp_path: Path, operation: str) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError) as caught:
        OPERATIONS[operation](Folder.open(str(tmp_path / "file" / "runs")))
    message = str(caught.value)
    assert f"{tmp_path}/file/runs" in message
    assert f"from host {os.uname().nodename} as user " in message
    assert "Not a directory" in message
    assert "; check that `storage` names a folder or bucket" in message


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(StorageError, match="No space left on device; free some space there, or set another `storage`"):
        records.append(tmp_path / "metrics.jsonl", [{"kind": "step"}])


def test_unknown_schemes_are_refused() -> None:
    with pytest.raises(StorageError, match="storage ftp://host/x: expected a folder, gs://bucket/path or s3://bucket/path"):
        Folder.open("ftp://host/x")


def test_secrets_are_not_shown() -> None:
    folder = Folder.open("s3://key:secret@bucket/runs")
    assert "secret" not in repr(folder)
    assert folder.at("x") == "s3://***@bucket/runs/x"


def test_text_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xff")
    with pytest.raises(StorageError, match="x is damaged: byte 0 is not UTF-8"):
        Folder.open(str(tmp_path)).read_text("x")
