"""A stand-in for the metadata server of Compute Engine: what it answers can be changed while it runs."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

PREFIX = "/computeMetadata/v1/instance/"


class MetadataServer(ThreadingHTTPServer):
    """Answers for one machine. A context manager: it serves inside the block.

    Attributes:
        values: by key; what is not there is answered with 404.
        requests: how many there were.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.values = {"preempted": "FALSE", "maintenance-event": "NONE"}
        self.requests = 0

    @property
    def host(self) -> str:
        """Address with port."""
        return f"127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> MetadataServer:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: MetadataServer

    def do_GET(self) -> None:
        self.server.requests += 1
        value = self.server.values.get(self.path.removeprefix(PREFIX))
        # The real one refuses requests without this header, which a browser cannot be made to send.
        status = 403 if self.headers.get("Metadata-Flavor") != "Google" else 404 if value is None else 200
        self.send_response(status)
        self.send_header("Metadata-Flavor", "Google")
        self.end_headers()
        if status == 200:
            self.wfile.write((value or "").encode())

    def log_message(self, *args: object) -> None:
        """Says nothing."""
