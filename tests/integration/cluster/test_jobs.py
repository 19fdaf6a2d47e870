"""Following a job: whatever the connection does, the outcome is the job's, and each line is shown once."""

from __future__ import annotations

import threading
import zipfile
from pathlib import Path

import pytest
from ray.job_submission import JobStatus

from raytrain_app.cluster import jobs
from raytrain_app.cluster.jobs import Ended, JobClient, connect, follow, submit_package
from raytrain_app.errors import ClusterError, JobError, LostJobError
from tests.integration.cluster.conftest import TOKEN, Head, Link, free_ports, wait_for

COUNT = "for i in $(seq 1 {n}); do echo line $i; sleep 0.2; done; exit {code}"
SENT = {"Authorization": f"Bearer {TOKEN}"}


class Follower(threading.Thread):
    """Follows a job in a thread, so that the test can meddle meanwhile."""

    def __init__(self, client: JobClient, job_id: str) -> None:
        super().__init__(daemon=True)
        self._client, self._job_id = client, job_id
        self.text, self.notes = "", list[str]()
        self.ended: Ended | LostJobError | None = None
        self.start()

    def run(self) -> None:
        try:
            self.ended = follow(self._client, self._job_id, self._write, self.notes.append)
        except LostJobError as error:
            self.ended = error

    def _write(self, text: str) -> None:
        self.text += text

    def end(self) -> Ended | LostJobError | None:
        self.join(60)
        return self.ended

    @property
    def lines(self) -> list[str]:
        return [line for line in self.text.splitlines() if line.startswith("line")]


def start(url: str, command: str) -> tuple[JobClient, str]:
    client = JobClient(url, headers=dict(SENT))
    return client, client.submit_job(entrypoint=command)


def test_the_exit_code_is_the_jobs_own(head: Head) -> None:
    codes = [0, 3, 130]
    followers = [Follower(*start(head.url, COUNT.format(n=2, code=code))) for code in codes]
    for code, follower in zip(codes, followers, strict=True):
        ended = follower.end()
        assert isinstance(ended, Ended)
        assert (ended.code, ended.exit_code, ended.lost_driver) == (code, code, False)
        assert follower.lines == ["line 1", "line 2"]


def test_a_cut_connection_is_taken_up_again(head: Head, link: Link) -> None:
    follower = Follower(*start(link.url, COUNT.format(n=15, code=3)))
    wait_for(lambda: len(follower.lines) > 3)
    link.cut()
    wait_for(lambda: "the cluster is out of reach; trying again" in follower.notes)
    link.mend()
    ended = follower.end()
    assert isinstance(ended, Ended)
    assert ended.code == 3
    assert follower.lines == [f"line {number}" for number in range(1, 16)]


@pytest.mark.slow
def test_a_job_that_ends_while_the_connection_is_cut(head: Head, link: Link) -> None:
    follower = Follower(*start(link.url, COUNT.format(n=8, code=4)))
    wait_for(lambda: len(follower.lines) > 1)
    link.cut()
    direct = JobClient(head.url, headers=dict(SENT))
    wait_for(lambda: direct.get_job_status(follower._job_id).is_terminal())
    assert follower.ended is None
    link.mend()
    ended = follower.end()
    assert isinstance(ended, Ended)
    assert ended.code == 4
    assert follower.lines == [f"line {number}" for number in range(1, 9)]


def test_a_silent_connection_is_given_up_in_time(head: Head, link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"HEARTBEAT_S": 1.0, "REQUEST_S": 1.0, "LOST_S": 3.0}.items():
        monkeypatch.setattr(jobs, name, seconds)
    follower = Follower(*start(link.url, COUNT.format(n=200, code=0)))
    wait_for(lambda: len(follower.lines) > 1)
    link.stall()
    ended = follower.end()
    assert isinstance(ended, LostJobError)
    assert ended.exit_code == 5
    assert "was out of reach for 3 s, and how job" in str(ended)
    JobClient(head.url, headers=dict(SENT)).stop_job(follower._job_id)


def test_a_job_that_the_cluster_does_not_know(head: Head) -> None:
    ended = Follower(JobClient(head.url, headers=dict(SENT)), "first-000000").end()
    assert isinstance(ended, LostJobError)
    assert "no longer knows job first-000000" in str(ended)


@pytest.mark.slow
def test_a_killed_driver_is_a_lost_one_and_a_stopped_job_is_interrupted(head: Head) -> None:
    killed = Follower(*start(head.url, "kill -9 $$")).end()
    assert isinstance(killed, Ended)
    assert (killed.code, killed.lost_driver) == (4, True)
    client, job_id = start(head.url, "echo line 1; sleep 100")
    follower = Follower(client, job_id)
    wait_for(lambda: follower.lines == ["line 1"])
    client.stop_job(job_id)
    stopped = follower.end()
    assert isinstance(stopped, Ended)
    assert (stopped.status, stopped.code, stopped.lost_driver) == (JobStatus.STOPPED, 130, False)


@pytest.mark.slow
def test_a_job_that_waits_says_for_what(head: Head) -> None:
    client = JobClient(head.url, headers=dict(SENT))
    job_id = client.submit_job(entrypoint="true", entrypoint_num_gpus=1)
    follower = Follower(client, job_id)
    wait_for(lambda: any("resources" in note for note in follower.notes))
    client.stop_job(job_id)


def test_commands_are_quoted_and_variables_passed(head: Head, tmp_path: Path) -> None:
    package = tmp_path / "package.zip"
    with zipfile.ZipFile(package, "w") as archive:
        archive.writestr(
            "show.py", "import os, sys; print('line', sys.argv[1:], os.environ['MINE'], os.environ['OMP_NUM_THREADS'])"
        )
    command = ["python", "show.py", "a && b", "$HOME", "it's"]
    client = JobClient(head.url, headers=dict(SENT))
    job_id = submit_package(client, package, command, "first", {"MINE": "1", "OMP_NUM_THREADS": "7"})
    follower = Follower(client, job_id)
    follower.end()
    assert follower.lines == ["line ['a && b', '$HOME', \"it's\"] 1 7"]


def test_no_server_and_other_servers(head: Head) -> None:
    (port,) = free_ports(1)
    with pytest.raises(ClusterError, match=r"no Ray job server answers at http://127.0.0.1:\d+: .*`ray dashboard cluster.yaml`"):
        connect(f"http://127.0.0.1:{port}")
    for address in (f"127.0.0.1:{port}", "auto", "ray://127.0.0.1:10001"):  # which Ray's client would look for in other places
        with pytest.raises(JobError, match=r"expected the URL of a job server, such as http://localhost:8265"):
            connect(address)
    # This process sends no token.
    with pytest.raises(JobError, match=r"refuses: it asks for a token, and none was sent; put the cluster's token"):
        connect(head.url)
