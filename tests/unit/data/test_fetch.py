"""Downloads, against servers of this machine that are slow, cut off, lie, or are not there."""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from raytrain_app.data import fetch, known
from raytrain_app.data.fetch import Patience, fetch_set, fetch_url
from raytrain_app.errors import DataError

CONTENT = {name: hashlib.sha256(name.encode()).digest() * 40_000 for name in ("a.gz", "b.gz")}
PATIENCE = Patience(connect_s=0.5, window_s=0.3, window_bytes=100_000, total_s=20)
HTML = b"<!DOCTYPE html><html>503</html>"

Answer = Callable[[BaseHTTPRequestHandler, bytes], None]


class Mirror:
    """A server whose answers are chosen by the test; remembers what it was asked."""

    def __init__(self, answer: Answer) -> None:
        self.asked: list[str] = []
        mirror = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                mirror.asked.append(f"{self.path} {self.headers.get('Range', '')}".strip())
                answer(self, CONTENT[self.path.split("?")[0].rpartition("/")[2]])

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def send(handler: BaseHTTPRequestHandler, body: bytes, length: int | None = None, status: int = 200, **headers: str) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body) if length is None else length))
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)


def good(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    start = int((handler.headers.get("Range") or "bytes=0-")[6:-1])
    if start:
        send(handler, body[start:], status=206, Content_Range=f"bytes {start}-{len(body) - 1}/{len(body)}")
    else:
        send(handler, body)


def cut_off(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    """Half of what is asked for at a time, and then the connection ends."""
    start = int((handler.headers.get("Range") or "bytes=0-")[6:-1])
    rest = body[start:]
    status = {"status": 206, "Content_Range": f"bytes {start}-{len(body) - 1}/{len(body)}"} if start else {"status": 200}
    send(handler, rest[: max(len(rest) // 2, min(len(rest), 400_000))], len(rest), **status)


def cut_off_without_resume(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    send(handler, body[: len(body) // 2], len(body))


def slow(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    handler.send_response(200)
    handler.end_headers()
    for at in range(0, len(body), 1000):
        try:
            handler.wfile.write(body[at : at + 1000])
        except OSError:
            return
        time.sleep(0.05)


def silent(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    time.sleep(2)


def html(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    send(handler, HTML)


def wrong_bytes(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    send(handler, bytes(len(body)))


def endless(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    handler.send_response(200)
    handler.end_headers()
    while True:
        try:
            handler.wfile.write(bytes(1 << 20))
        except OSError:
            return


def forbidden(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    handler.send_error(403, "Forbidden")


@pytest.fixture(autouse=True)
def known_set(monkeypatch: pytest.MonkeyPatch) -> None:
    files = tuple(known.KnownFile(name, len(data), hashlib.sha256(data).hexdigest(), "") for name, data in CONTENT.items())
    monkeypatch.setitem(known.KNOWN, "tiny", known.KnownSet("Tiny", (), files, ()))


@pytest.fixture
def mirrors() -> Iterator[Callable[..., list[Mirror]]]:
    open_: list[Mirror] = []

    def start(*answers: Answer) -> list[Mirror]:
        open_.extend(Mirror(answer) for answer in answers)
        return open_

    yield start
    for mirror in open_:
        mirror.close()


def nowhere() -> str:
    """The address of a port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/"


def assert_fetched(folder: Path) -> None:
    """The files are whole, and nothing else is there but the lock."""
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"} == CONTENT


def assert_clean(folder: Path) -> None:
    assert [path.name for path in folder.iterdir()] == [".lock"]


def test_fetches_and_fetches_nothing_twice(tmp_path: Path, mirrors: Callable[..., list[Mirror]]) -> None:
    (mirror,) = mirrors(good)
    seen: list[tuple[str, int]] = []
    fetch_set("tiny", tmp_path, [mirror.url], PATIENCE, lambda name, done: seen.append((name, done)))
    assert_fetched(tmp_path)
    assert seen[-1] == ("b.gz", len(CONTENT["b.gz"]))
    fetch_set("tiny", tmp_path, [mirror.url], PATIENCE)
    assert mirror.asked == ["/a.gz", "/b.gz"]


@pytest.mark.parametrize("first", [html, wrong_bytes, endless, forbidden, silent, slow, cut_off_without_resume])
def test_the_next_mirror_is_tried(tmp_path: Path, mirrors: Callable[..., list[Mirror]], first: Answer) -> None:
    bad, fine = mirrors(first, good)
    fetch_set("tiny", tmp_path, [bad.url, fine.url], PATIENCE)
    assert_fetched(tmp_path)


def test_a_cut_connection_is_taken_up_where_it_ended(tmp_path: Path, mirrors: Callable[..., list[Mirror]]) -> None:
    (mirror,) = mirrors(cut_off)
    fetch_set("tiny", tmp_path, [mirror.url], PATIENCE)
    assert_fetched(tmp_path)
    half = len(CONTENT["a.gz"]) // 2
    assert mirror.asked[:2] == ["/a.gz", f"/a.gz bytes={half}-"]


def test_a_left_over_part_that_is_wrong_is_begun_again(tmp_path: Path, mirrors: Callable[..., list[Mirror]]) -> None:
    (mirror,) = mirrors(good)
    (tmp_path / ".a.gz.part").write_bytes(bytes(1000))
    fetch_set("tiny", tmp_path, [mirror.url], PATIENCE)
    assert_fetched(tmp_path)
    assert mirror.asked[:2] == ["/a.gz bytes=1000-", "/a.gz"]


def test_a_left_over_part_of_an_ended_process_is_taken_up(tmp_path: Path, mirrors: Callable[..., list[Mirror]]) -> None:
    (mirror,) = mirrors(good)
    (tmp_path / ".a.gz.part").write_bytes(CONTENT["a.gz"][:1000])
    fetch_set("tiny", tmp_path, [mirror.url], PATIENCE)
    assert_fetched(tmp_path)
    assert mirror.asked[0] == "/a.gz bytes=1000-"


@pytest.mark.parametrize("there", [CONTENT["a.gz"][:1000], bytes(len(CONTENT["a.gz"]))], ids=["cut", "changed"])
def test_a_wrong_file_under_the_final_name_is_fetched_again(
    tmp_path: Path, mirrors: Callable[..., list[Mirror]], there: bytes
) -> None:
    (mirror,) = mirrors(good)
    (tmp_path / "a.gz").write_bytes(there)
    fetch_set("tiny", tmp_path, [mirror.url], PATIENCE)
    assert_fetched(tmp_path)


def test_every_mirror_is_named_with_its_reason_and_nothing_is_left(tmp_path: Path, mirrors: Callable[..., list[Mirror]]) -> None:
    answers = (forbidden, html, wrong_bytes, endless, silent, slow, cut_off_without_resume)
    urls = [mirror.url for mirror in mirrors(*answers)] + [nowhere(), "http://no-such-host.invalid/"]
    with pytest.raises(DataError) as error:
        fetch_set("tiny", tmp_path, urls, PATIENCE)
    size, digest = f"{len(CONTENT['a.gz']):,}", hashlib.sha256(CONTENT["a.gz"]).hexdigest()
    zeros = hashlib.sha256(bytes(len(CONTENT["a.gz"]))).hexdigest()
    half = f"{len(CONTENT['a.gz']) // 2:,}"
    lines = str(error.value).splitlines()
    assert lines[0] == "Tiny's file a.gz cannot be downloaded; tried"
    reasons = [
        "it answered 403 Forbidden",
        f"it answered with a web page of {len(HTML)} bytes; expected {size} bytes",
        f"found {size} bytes with sha256 {zeros}; expected {size} bytes with sha256 {digest}",
        f"it sent more than the {size} bytes that the file has",
        "nothing came within 0.5 s",
        "it is too slow: ",
        f"the connection ended after {half} of {size} bytes",
        "no connection (",
        "no connection",
    ]
    for line, url, reason in zip(lines[1:-1], urls, reasons, strict=True):
        assert line.startswith(f"  {url}a.gz: {reason}")
    assert lines[-1] == (
        f"Put the files of Tiny into {tmp_path} yourself, set data.source to a folder that has them, or use data.source: "
        "mnist-sample, which needs no download"
    )
    assert_clean(tmp_path)


def test_a_black_hole_costs_no_more_than_the_time_to_connect(tmp_path: Path, mirrors: Callable[..., list[Mirror]]) -> None:
    (fine,) = mirrors(good)
    with socket.socket() as full:  # A listener whose queue is full answers no one.
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for client in waiting:
            client.setblocking(False)
            client.connect_ex(address)
        began = time.monotonic()
        fetch_set("tiny", tmp_path, [f"http://127.0.0.1:{address[1]}/", fine.url], PATIENCE)
        assert time.monotonic() - began < 10 * PATIENCE.connect_s
        for client in waiting:
            client.close()
    assert_fetched(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=f"the download folder {tmp_path}/file/x cannot be written: .*; make it writable"):
        fetch_set("tiny", tmp_path / "file" / "x")


def test_a_users_own_url_is_kept_until_it_changes(tmp_path: Path, mirrors: Callable[..., list[Mirror]]) -> None:
    tag = "one"

    def answer(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        if handler.headers.get("If-None-Match") == tag:
            handler.send_response(304)
            handler.end_headers()
        else:
            send(handler, tag.encode(), ETag=tag)

    (mirror,) = mirrors(answer)
    url = f"{mirror.url}x/a.gz?key=1"
    path = fetch_url(url, offline=False, patience=PATIENCE, folder=tmp_path)
    assert (path.name, path.read_text()) == ("a.gz", "one")
    path.write_text("kept")
    assert fetch_url(url, offline=False, patience=PATIENCE, folder=tmp_path).read_text() == "kept"
    tag = "two"
    assert fetch_url(url, offline=False, patience=PATIENCE, folder=tmp_path).read_text() == "two"
    mirror.close()
    assert fetch_url(url, offline=True, folder=tmp_path).read_text() == "two"
    with pytest.raises(DataError, match=r"cannot be downloaded: no connection .*; data.offline: true uses the copy in the cache"):
        fetch_url(url, offline=False, patience=PATIENCE, folder=tmp_path)
    mirrors().clear()


def test_a_users_own_url_that_fails_leaves_nothing(tmp_path: Path, mirrors: Callable[..., list[Mirror]]) -> None:
    (mirror,) = mirrors(cut_off_without_resume)
    with pytest.raises(
        DataError, match=r"a\.gz cannot be downloaded: the connection ended after 640,000 of 1,280,000 bytes; check"
    ):
        fetch_url(f"{mirror.url}a.gz", offline=False, patience=PATIENCE, folder=tmp_path)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [".lock"]
    with pytest.raises(DataError, match=r"is not in the cache .*, and data.offline: true forbids to download it"):
        fetch_url(f"{mirror.url}a.gz", offline=True, folder=tmp_path)


def test_the_cache_is_where_the_platform_has_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert fetch.cache_folder().name == "data"
    assert "raytrain" in fetch.cache_folder().parts
