"""Which errors of a model in parts are those of its peers, and which are the task's own."""

from __future__ import annotations

import pytest

from raytrain_app.elastic.exchange import PeerLost
from raytrain_app.elastic.group import peers_needed

GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:3"


def test_errors_of_collectives_are_lost_peers_also_when_they_are_wrapped() -> None:
    wrapped = RuntimeError("[Stage 0] failed to run forward")
    wrapped.__cause__ = RuntimeError(GLOO)
    for error in (RuntimeError(GLOO), wrapped):
        with pytest.raises(PeerLost, match="Connection closed"), peers_needed():
            raise error


def test_errors_of_the_task_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), peers_needed():
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    with pytest.raises(ValueError, match="the task"), peers_needed():
        raise ValueError("the task")
