"""Several processes that find an empty cache at the same time."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import ray

from raytrain_app.data import known
from raytrain_app.data.fetch import fetch_set

CONTENT = {name: hashlib.sha256(name.encode()).digest() * 10_000 for name in ("a.gz", "b.gz")}
FILES = tuple(known.KnownFile(name, len(data), hashlib.sha256(data).hexdigest(), "") for name, data in CONTENT.items())


class Worker:
    def __init__(self) -> None:
        known.KNOWN["tiny"] = known.KnownSet("Tiny", (), FILES, ())

    def ready(self) -> bool:
        return True

    def fetch(self, folder: str, mirror: str) -> list[bytes]:
        fetch_set("tiny", Path(folder), [mirror])
        return [(Path(folder) / name).read_bytes() for name in CONTENT]


@pytest.mark.usefixtures("ray_local")
def test_four_workers_on_an_empty_cache_fetch_once(tmp_path: Path) -> None:
    asked: Counter[str] = Counter()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked[self.path] += 1
            body = CONTENT[self.path[1:]]
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            for at in range(0, len(body), 40_000):
                self.wfile.write(body[at : at + 40_000])
                time.sleep(0.02)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    remote: Any = ray.remote(num_cpus=1)(Worker)
    workers = [remote.remote() for _ in range(4)]
    ray.get([worker.ready.remote() for worker in workers])
    mirror = f"http://127.0.0.1:{server.server_port}/"
    results = ray.get([worker.fetch.remote(str(tmp_path / "cache"), mirror) for worker in workers])
    server.shutdown()
    server.server_close()
    assert results == [list(CONTENT.values())] * 4
    assert asked == {"/a.gz": 1, "/b.gz": 1}
    for worker in workers:
        ray.kill(worker)
