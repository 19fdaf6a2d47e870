"""Wishes for room: they show as demand, and take none of the room there is."""

from __future__ import annotations

import time
from contextlib import closing

import ray
from ray.util.placement_group import placement_group_table

from raytrain_app.cluster.nodes import here
from raytrain_app.cluster.wanted import MOST, WantedRoom


def pending() -> int:
    return sum(group["state"] == "PENDING" for group in placement_group_table().values())


def test_wishes_wait_for_other_nodes(ray_local: None) -> None:
    before, free = pending(), ray.available_resources().get("CPU")
    with closing(WantedRoom({"CPU": 0.5, "GPU": 0.0})) as wanted:
        wanted.ask(3, [here()])
        time.sleep(1.0)  # in which one would be fulfilled if it could be here
        wanted.ask(2, [here()])
        assert pending() == before + 2
        assert ray.available_resources().get("CPU") == free
        wanted.ask(MOST + 5, [here()])
        assert pending() == before + MOST
    assert pending() == before


def test_a_fulfilled_wish_gives_its_room_back(ray_local: None) -> None:
    free = ray.available_resources().get("CPU")
    with closing(WantedRoom({"CPU": 0.5})) as wanted:
        wanted.ask(1, [])
        time.sleep(1.0)
        wanted.ask(1, [here()])
        assert pending() == 1
        time.sleep(0.5)
        assert ray.available_resources().get("CPU") == free
