"""Jobs on a Ray cluster through its job server: submit, follow, and learn how it ended whatever the connection does."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp
import ray
import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from raytrain_app.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_NO_RESOURCES,
    EXIT_WRONG_INPUT,
    ClusterError,
    JobError,
    LostJobError,
)

REQUEST_S = 30.0
HEARTBEAT_S = 10.0
POLL_S = 1.0
LOST_S = 300.0
"""How long the job server may be out of reach before the job counts as lost; a head that is replaced needs minutes."""
STOP_S = 60
"""How long a job that is stopped has for its checkpoint; Ray's own default is 3 s."""
OWN_CODES = (EXIT_WRONG_INPUT, EXIT_NO_RESOURCES, EXIT_FAILED, EXIT_INTERRUPTED)
TOKEN_ADVICE = (
    "put the cluster's token (`ray get-auth-token` on its head) into ~/.ray/auth_token here and set RAY_AUTH_MODE=token"
)


class JobClient(JobSubmissionClient):
    """Ray's client with time-outs: its own waits without end for a machine that has vanished."""

    def _do_request(self, method: str, endpoint: str, **options: Any) -> requests.Response:
        response: requests.Response = super()._do_request(method, endpoint, timeout=REQUEST_S, **options)
        return response

    async def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
        url = f"{self._address}/api/jobs/{job_id}/logs/tail"
        context: Any = self._ssl_context
        async with (
            aiohttp.ClientSession(cookies=self._cookies, headers=self._headers) as session,
            session.ws_connect(url, heartbeat=HEARTBEAT_S, ssl=True if context is None else context) as socket,
        ):
            async for message in socket:
                if message.type == aiohttp.WSMsgType.TEXT:
                    yield message.data

    def ray_version(self) -> str:
        """The version of Ray on the cluster."""
        return str(self._do_request("GET", "/api/version").json()["ray_version"])


@dataclass(frozen=True)
class Ended:
    """How a job ended.

    Attributes:
        status: SUCCEEDED, FAILED or STOPPED.
        exit_code: of its driver, None if that never started or was lost.
        message: what Ray says of it.
    """

    status: JobStatus
    exit_code: int | None
    message: str

    @property
    def code(self) -> int:
        """What to end with: the job's own exit code wherever it has one."""
        if self.status == JobStatus.SUCCEEDED:
            return EXIT_DONE
        if self.status == JobStatus.STOPPED:
            return EXIT_INTERRUPTED
        return self.exit_code if self.exit_code in OWN_CODES else EXIT_FAILED

    @property
    def lost_driver(self) -> bool:
        """Whether the job's driver did not come to an end of its own, so that the same job may go better."""
        # A shell tells of a signal, as that of the kernel when memory runs out, by a code above 128.
        killed = self.exit_code is None or self.exit_code < 0 or self.exit_code > 128
        return self.status == JobStatus.FAILED and killed and self.exit_code not in OWN_CODES


def connect(address: str) -> JobClient:
    """A client for the job server at the address.

    Raises:
        ClusterError: there is none.
        JobError: it asks for a token, or has another version of Ray, or the address is of something else.
    """
    if not address.startswith(("http://", "https://")):
        raise JobError(f"--address: found {address}; expected the URL of a job server, such as http://localhost:8265")
    logging.getLogger("ray.dashboard.modules.dashboard_sdk").setLevel(logging.WARNING)  # it tells of every upload
    try:
        client = JobClient(address)
        there = client.ray_version()
    except AuthenticationError as error:
        missing = "Authentication required" in str(error)
        found = "it asks for a token, and none was sent" if missing else "it does not know the token that was sent"
        raise JobError(f"the cluster at {address} refuses: {found}; {TOKEN_ADVICE}") from None
    except (requests.RequestException, ConnectionError, RuntimeError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ClusterError(
            f"no Ray job server answers at {address}: {reason}; after `ray up`, `ray dashboard cluster.yaml` in another terminal "
            "makes it reachable as http://localhost:8265"
        ) from None
    if there.split(".")[:2] != ray.__version__.split(".")[:2]:
        raise JobError(f"the cluster at {address} has Ray {there}, and here is Ray {ray.__version__}; use the same on both sides")
    return client


def submit_package(client: JobClient, package: Path, command: Sequence[str], name: str, variables: Mapping[str, str]) -> str:
    """Uploads a package and starts the command in it. The driver takes no CPU and no GPU, so it always finds a place.

    Returns:
        The job's id.

    Raises:
        ClusterError: the job server did not take it.
    """
    from shlex import join

    job_id = f"{name}-{uuid4().hex[:6]}"
    environment = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_S), **variables}, "working_dir": str(package)}
    try:
        client.submit_job(
            entrypoint=join(command), submission_id=job_id, runtime_env=environment, metadata={"raytrain_run": name}
        )
    except (requests.RequestException, RuntimeError) as error:
        raise ClusterError(f"the cluster did not take the job: {' '.join(str(error).split())[:400]}") from None
    return job_id


def follow(client: JobClient, job_id: str, write: Callable[[str], None], note: Callable[[str], None]) -> Ended:
    """Writes the job's output as it comes, and returns when the job has ended.

    The end of the output is not taken for the end of the job: that is what the job server says.

    Args:
        client: of the cluster.
        job_id: of the job.
        write: gets each part of the output, once.
        note: gets sentences about the job.

    Raises:
        LostJobError: the cluster was out of reach for too long, or no longer knows the job.
    """
    return asyncio.run(_Follower(client, job_id, write, note).run())


class _Follower:
    def __init__(self, client: JobClient, job_id: str, write: Callable[[str], None], note: Callable[[str], None]) -> None:
        self._client, self._job_id, self._write, self._note = client, job_id, write, note
        self._written = 0
        self._answered_s = time.monotonic()
        self._told = ""

    async def run(self) -> Ended:
        while True:
            details = await self._details()
            if details is not None:
                if details.status.is_terminal():
                    self._rest(await self._logs())
                    return Ended(details.status, details.driver_exit_code, details.message or "")
                if details.status == JobStatus.PENDING:
                    self._tell(details.message or "")
                else:
                    await self._tail()
            await asyncio.sleep(POLL_S)

    async def _details(self) -> JobDetails | None:
        """What the job server says of the job, None while it does not answer."""
        try:
            details = await asyncio.to_thread(self._client.get_job_info, self._job_id)
        except (requests.RequestException, ConnectionError, RuntimeError) as error:
            if "404" in str(error):
                raise LostJobError(
                    f"the cluster no longer knows job {self._job_id}: its head was replaced; submit it with --resume to go on"
                ) from None
            if time.monotonic() - self._answered_s > LOST_S:
                raise LostJobError(
                    f"the cluster was out of reach for {LOST_S:g} s, and how job {self._job_id} ended is not known: "
                    f"{' '.join(str(error).split())[:200]}; the run's own result.json will tell"
                ) from None
            self._tell("the cluster is out of reach; trying again")
            return None
        self._answered_s = time.monotonic()
        return details

    async def _tail(self) -> None:
        """Follows the output until it ends or the connection is lost; output that was written before is left out."""
        seen = 0
        with suppress(aiohttp.ClientError, OSError, asyncio.TimeoutError):
            async for text in self._client.tail_job_logs(self._job_id):
                seen += len(text)
                self._show(text, seen)

    async def _logs(self) -> str:
        try:
            return str(await asyncio.to_thread(self._client.get_job_logs, self._job_id))
        except (requests.RequestException, ConnectionError, RuntimeError):  # what was followed is all there is to show
            return ""

    def _rest(self, logs: str) -> None:
        self._show(logs, len(logs))

    def _show(self, text: str, seen: int) -> None:
        fresh = seen - self._written
        if fresh > 0:
            self._write(text[-fresh:])
            self._written = seen

    def _tell(self, sentence: str) -> None:
        """Says a thing once in a row."""
        if sentence and sentence != self._told:
            self._note(sentence)
            self._told = sentence
