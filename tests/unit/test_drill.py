"""The schedule of a drill, and what it makes of two runs; the table of the elastic benchmark."""

from __future__ import annotations

import time
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from raytrain_app.bench.elastic import Figures, lines
from raytrain_app.drill import DrillResult
from raytrain_app.faults import KINDS, LOOK_S, Fault, Injector, plan_faults
from raytrain_app.report.updates import Update
from raytrain_app.storage.audit import EpochAudit

CALM = {
    "weights_sha256": "a" * 64,
    **dict.fromkeys(("train_loss", "val_loss", "val_accuracy", "test_loss", "test_accuracy"), 0.5),
    "steps": 100,
    "samples": 5000,
    "steps_redone": 0,
    "goodput": 0.9,
    "disruptions": [],
}


@given(st.integers(0, 1000), st.dictionaries(st.sampled_from(KINDS), st.integers(0, 5)), st.integers(1, 5000))
def test_a_schedule_has_all_faults_in_order_and_spares_the_ends(seed: int, counts: dict[str, int], steps: int) -> None:
    faults = plan_faults(seed, counts, steps)
    assert faults == plan_faults(seed, counts, steps)
    assert {kind: sum(fault.kind == kind for fault in faults) for kind in counts} == counts
    assert [fault.step for fault in faults] == sorted(fault.step for fault in faults)
    assert all(steps // 10 <= fault.step <= max(1, steps - steps // 10) for fault in faults)


def found(audit: EpochAudit, same_bits: bool = True, **changes: Any) -> list[str]:
    return DrillResult({**CALM, **changes}, CALM, [], [audit], same_bits).broken


class NobodyThere(Injector):
    """Finds nobody to strike."""

    looks = 0

    def _strike(self, kind: str, entry: dict[str, Any]) -> bool:
        self.looks += 1
        return False


def test_a_fault_that_finds_nobody_waits_until_somebody_has_taken_a_step() -> None:
    """Workers that are struck down before they can take one look like a task that crashes."""
    injector = NobodyThere([Fault("kill", 1)], 0, "nowhere", 2, None)
    injector.watch(Update("step", "", {"step": 1}))
    time.sleep(3 * LOOK_S)
    assert injector.looks == 1
    injector.watch(Update("step", "", {"step": 2}))
    time.sleep(3 * LOOK_S)
    assert injector.looks == 2
    injector.join()
    assert injector.committed[0]["skipped"] == "nobody was there"


def test_a_drill_tells_each_broken_promise() -> None:
    exact = EpochAudit(epoch=1, steps=5, rows=50, applied=50)
    assert found(exact) == []
    assert found(exact, weights_sha256="b" * 64) == ["the weights differ from those of the undisturbed run"]
    assert found(exact, test_loss=0.6, steps=101) == ["test_loss differs", "steps differs"]
    assert found(exact, same_bits=False, weights_sha256="b" * 64, test_loss=0.6) == []
    twice = EpochAudit(epoch=1, steps=5, rows=50, applied=51, repeated={7: 2})
    assert found(twice, same_bits=False) == [twice.sentence()]


def test_many_faults_are_told_by_kind() -> None:
    kills = [{"kind": "kill", "step": step} for step in range(30)]
    for faults, told in (
        (kills[:2], "kill at step 0, kill at step 1"),
        ([*kills, {"kind": "node", "step": 9}], "30 kill, 1 node"),
        ([{"kind": "kill", "step": 1, "skipped": "nobody was there"}], "none; 1 more found nobody to strike"),
    ):
        assert DrillResult(CALM, CALM, faults, []).lines()[0].split(maxsplit=1) == ["faults", told]


def test_the_table_says_what_is_within_its_limit() -> None:
    told: list[str] = []
    product, stock = Figures(told.append), Figures(told.append)
    for seconds in (0.1, 0.2, 0.9):
        product.add("kill", seconds)
    product.add("node_lost", 2.5, redone=3)
    stock.add("kill", 10.0, redone=20)
    kill, node = lines(product, stock)
    assert "median  0.20 s of  3, longest  0.90 s,  0 steps redone, within 1 s" in kill
    assert kill.endswith("stock Ray Train  10.0 s, 20 redone: 50 times as long")
    assert node.endswith("3 steps redone, OVER 2 s")
    assert [text.split()[-2:] for text in told] == [[f"{s:.2f}", "s"] for s in (0.1, 0.2, 0.9, 2.5, 10.0)]
