"""Notices as the metadata server gives them."""

from __future__ import annotations

import pytest

from raytrain_app.cluster.spot import read_notice
from tests.metadata import MetadataServer


@pytest.mark.parametrize(
    ("key", "value", "remaining_s"),
    [
        ("preempted", "TRUE", 30.0),
        ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE", 60.0),
        ("maintenance-event", "MIGRATE_ON_HOST_MAINTENANCE", None),
        ("preempted", "FALSE", None),
    ],
)
def test_notices(key: str, value: str, remaining_s: float | None) -> None:
    with MetadataServer() as server:
        server.values[key] = value
        notice = read_notice(server.host)
        assert (notice and notice.remaining_s) == remaining_s


def test_no_answer_is_an_error_that_a_watcher_bears() -> None:
    with MetadataServer() as server:
        host = server.host
        server.values.clear()
        with pytest.raises(OSError, match="404"):
            read_notice(host)
    with pytest.raises(OSError, match="refused"):
        read_notice(host)


def test_a_proxy_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with MetadataServer() as server:
        assert read_notice(server.host) is None
