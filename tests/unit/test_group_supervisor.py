"""Groups that are whole or nothing: when one is ended, and when its workers may begin."""

from __future__ import annotations

import pytest

from raytrain_app.elastic.roster import WorkerInfo
from raytrain_app.group_supervisor import SETTLE_S, judge
from raytrain_app.strategies.tf_distribute import GroupRoster

LONG_S, SHORT_S = SETTLE_S + 1, SETTLE_S / 2


@pytest.mark.parametrize(
    ("size", "complete", "wanted", "since_s", "verdict"),
    [
        (2, True, 2, 0.0, "keep"),
        (2, True, 3, SHORT_S, "keep"),  # a node may only pass by
        (2, True, 3, LONG_S, "end"),
        (2, False, 3, LONG_S, "keep"),  # it has not even begun
        (2, True, 1, 0.0, "end"),  # asked for, or its node drains
        (2, False, 1, 0.0, "abort"),  # it waits for a node that is gone
    ],
)
def test_a_group_is_ended_for_another_only_when_it_pays(
    size: int, complete: bool, wanted: int, since_s: float, verdict: str
) -> None:
    assert judge(size, complete, wanted, since_s) == verdict


def test_no_generation_is_formed_of_part_of_a_group() -> None:
    roster = GroupRoster(2)
    for pool in (0, 1):
        roster.wait(_worker(pool, 0), -1, 0.0)
        assert not roster.can_form()
        roster.wait(_worker(pool, 1), -1, 0.0)
        assert roster.can_form()
        assert {view.world_size for view in roster.form(-1).values()} == {2}
        roster.remove(f"{pool}.0")  # lost, and the other one comes back
        roster.wait(_worker(pool, 1), 5, 1.0)
        assert not roster.can_form()
        roster.remove(f"{pool}.1")


def _worker(pool: int, rank: int) -> WorkerInfo:
    return WorkerInfo(f"{pool}.{rank}", pool, "node", 1, "localhost", 1, None)
