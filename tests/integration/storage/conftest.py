"""An S3 service on this machine that can fail in the ways real ones do."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from pyarrow import fs
from werkzeug.serving import make_server

Answer = Iterable[bytes]
DENIED = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_EC2_METADATA_DISABLED": "true"}


class FaultyS3:
    """`faults` are used up, one by each upload: "busy" answers 503, "denied" 403, "cut" closes the connection, "hang" waits."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.uploads = 0
        self.released = threading.Event()
        self._service = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._respond, threaded=True)
        self._server.daemon_threads = True  # type: ignore[attr-defined]
        self.port: int = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _respond(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Answer:
        fault = None
        if environ["REQUEST_METHOD"] in ("PUT", "POST"):
            self.uploads += 1
            fault = self.faults.pop(0) if self.faults else None
        if fault is None:
            answer: Answer = self._service(environ, start_response)
            return answer
        if fault == "hang":
            self.released.wait()
        if fault in ("cut", "hang"):
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        start_response("403 Forbidden" if fault == "denied" else "503 Slow Down", [("Content-Type", "application/xml")])
        return [DENIED if fault == "denied" else b""]

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(scope="session")
def s3_service() -> Iterator[FaultyS3]:
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    service = FaultyS3()
    options = f"endpoint_override=127.0.0.1:{service.port}&scheme=http&region=us-east-1&allow_bucket_creation=true"
    fs.FileSystem.from_uri(f"s3://key:secret@bucket?{options}")[0].create_dir("bucket")
    yield service
    service.close()


@pytest.fixture
def s3(s3_service: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    s3_service.uploads = 0
    yield s3_service
    s3_service.faults = []
    s3_service.released.set()
    s3_service.released = threading.Event()


@pytest.fixture
def bucket_uri(s3: FaultyS3, request: pytest.FixtureRequest) -> str:
    """A folder of its own for each test."""
    place = request.node.name.replace("[", "-").replace("]", "")
    return f"s3://bucket/{place}?endpoint_override=127.0.0.1:{s3.port}&scheme=http&region=us-east-1"
