"""Workers that start while the data is still being read wait for it, and end if nothing comes of it."""

from __future__ import annotations

import asyncio
from typing import Any

from raytrain_app.elastic.membership import Membership
from raytrain_app.errors import DataError


def test_workers_get_the_data_set_when_the_run_opens() -> None:
    async def scenario() -> tuple[bool, list[Any], list[Any]]:
        membership = Membership(1, 0, 30.0)
        early = asyncio.create_task(membership.dataset())
        await asyncio.sleep(0.01)
        waited = not early.done()
        await membership.open(["reference"], 0)
        return waited, await early, await membership.dataset()

    assert asyncio.run(scenario()) == (True, ["reference"], ["reference"])


def test_workers_learn_that_the_run_was_over_before_it_began() -> None:
    async def scenario() -> list[Any]:
        membership = Membership(1, 0, 30.0)
        early = asyncio.create_task(membership.dataset())
        await asyncio.sleep(0.01)
        await membership.fail(DataError("bad rows"))
        return await early

    assert asyncio.run(scenario()) == []


def test_a_resumed_run_takes_records_from_where_its_files_end() -> None:
    async def scenario() -> tuple[int, int]:
        membership = Membership(1, 0, 30.0)
        await membership.open(["reference"], 7)
        passed_over = await membership.record([(9, {"kind": "step", "time": 0.0})])
        return passed_over, await membership.record([(8, {"kind": "step", "time": 0.0})])

    assert asyncio.run(scenario()) == (7, 8)
