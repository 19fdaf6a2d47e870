"""Clients and servers over real sockets: exactly once through lost replies and restarts, no torn reads, nothing in vain."""

from __future__ import annotations

import dataclasses
import random
import socket
import threading
import time
from typing import Literal

import pytest
import torch

from raytrain_app.strategies.parameter_server.client import Client
from raytrain_app.strategies.parameter_server.correction import Correction
from raytrain_app.strategies.parameter_server.desk import WAIT_S
from raytrain_app.strategies.parameter_server.ledger import END, WAIT, Plan
from raytrain_app.strategies.parameter_server.snapshot import cut_anew
from raytrain_app.strategies.parameter_server.table import Table
from raytrain_app.strategies.parameter_server.wire import Op, Request
from tests.unit.parameter_server.making import ONES, Farm, farm, ones
from tests.unit.parameter_server.relays import relays_of

WAYS = [pytest.param(True, id="shared memory"), pytest.param(False, id="TCP")]


@pytest.mark.parametrize("local", WAYS)
@pytest.mark.parametrize("servers", [1, 3])
def test_pushes_are_added_up_and_come_back(servers: int, local: bool) -> None:
    with farm(servers=servers, counters=2) as made:
        client = made.client(local=local)
        lease = client.take()
        for step in range(5):
            assert client.vector.tolist() == [float(step)] * 1000
            sent = ones(client, lease)
            sent.counters = torch.tensor([1, step])
            answer = client.push(sent)
            assert not answer.refused
            lease = answer.lease
        assert client.versions == [5] * servers
        assert client.counters.tolist() == [5, 10]
        assert made.desks[0].stats.pushes == 5


@pytest.mark.parametrize("local", WAYS)
def test_what_the_caller_has_is_not_sent_again(local: bool) -> None:
    with farm(servers=2) as made:
        client = made.client(local=local)
        client.pull()
        sent = [desk.stats.out_bytes for desk in made.desks]
        client.pull()
        assert [desk.stats.out_bytes for desk in made.desks] == sent
        assert client.versions == [0, 0]


def test_a_reply_that_is_lost_does_not_double_a_push() -> None:
    with farm(servers=2) as made, relays_of(made) as (where, relays):
        client = Client(where, "w", made.client().layout)
        rng, lease = random.Random(0), client.take()
        for _ in range(200):
            if rng.random() < 0.2:
                rng.choice(relays).cuts = rng.choice(["request", "reply"])
            lease = client.push(ones(client, lease)).lease if lease >= 0 else client.take()
        done = made.desks[0].lead.ledger.done if made.desks[0].lead is not None else None
        assert done is not None
        while lease == WAIT:
            lease = client.take()
        applied = [desk.shard.applied for desk in made.desks if desk.shard is not None]
        assert applied[0] == applied[1]
        assert len(applied[0]) >= 190
        assert made.whole().tolist() == [float(len(applied[0]))] * 1000
        assert sum(desk.stats.duplicates for desk in made.desks) > 0, "no reply was lost, so nothing was tested"


@pytest.mark.parametrize("correction", ["none", "staleness", "gap", "delay"])
@pytest.mark.parametrize("local", WAYS)
def test_a_restored_server_is_sent_what_it_lacks(local: bool, correction: Literal["none", "staleness", "gap", "delay"]) -> None:
    """What is sent again counts for as much as it did at first: here it had missed nothing."""
    with farm(policy=dataclasses.replace(ONES, correction=Correction(correction)), servers=2) as made:
        client = made.client(local=local)
        lease = client.take()
        states = [desk.state() for desk in made.desks]
        leases = set()
        for step in range(60):
            while lease == WAIT:
                lease = client.take()
            leases.add(lease)
            lease = client.push(ones(client, lease)).lease
            if step % 7 == 3:
                states = [desk.state() for desk in made.desks]
            if step % 10 == 9:
                number = step // 10 % 2
                newest = client.versions[number]
                made.restart(number, states[number])
                client.pull()
                assert client.versions[number] >= newest, "versions never go back"
        assert len(leases) == 60, "no lease was done twice"
        assert made.whole().tolist() == [60.0] * 1000
        assert sum(desk.stats.replayed for desk in made.desks) > 0


def test_a_gradient_under_way_when_its_server_is_lost_has_missed_no_more_for_that() -> None:
    """What is sent again to a restored server is not new, though it makes new versions of it."""
    with farm() as made:
        busy, slow = made.client("busy"), made.client("slow")
        state, lease = made.desks[0].state(), busy.take()
        for _ in range(5):
            lease = busy.push(ones(busy, lease)).lease
        late = slow.take()
        for _ in range(2):
            lease = busy.push(ones(busy, lease)).lease
        made.restart(0, state)
        busy.pull()
        assert made.desks[0].stats.replayed == 7
        assert slow.push(ones(slow, late), wants=False).staleness == 2
        busy.pull()
        assert busy.push(ones(busy, lease)).staleness == 0
        assert made.whole().tolist() == [9.0] * 1000


def test_bulk_parts_that_wait_for_their_step_are_sent_again_too() -> None:
    policy = dataclasses.replace(ONES, bulk=True, parts=3)
    with farm(Plan(100, 1, 3, "bulk"), policy, servers=2) as made:
        one, other = made.client("one"), made.client("other")
        assert [one.take(), other.take()] == [0, 1]
        assert one.push(ones(one, 0)).lease == 2
        states = [desk.state() for desk in made.desks]
        for desk, state in zip(made.desks, states, strict=True):
            desk.durable = state.version  # as when a state without the waiting part has been kept
        other.push(ones(other, 1), wants=False)
        one.pull()
        made.restart(1, states[1])
        assert one.push(ones(one, 2)).lease == WAIT
        leases: set[int] = set()
        while leases != {3, 4}:
            leases |= {lease for lease in (other.take(), one.take()) if lease != WAIT}  # sends its part again, and confirms it
        assert made.whole().tolist() == [1.0] * 1000


def push_and_take(client: Client, lease: int) -> int:
    following = client.push(ones(client, lease)).lease
    return following if following >= 0 else client.take()


@pytest.mark.parametrize("restored", [0, 1], ids=["the lead", "another server"])
def test_bulk_goes_back_when_a_part_is_lost_with_a_server_and_its_worker(restored: int) -> None:
    """The other server has the whole step: nobody could compute the part at the parameters before it, but for all going back."""
    with farm(Plan(100, 1, 2, "bulk"), dataclasses.replace(ONES, bulk=True, parts=2), servers=2) as made:
        one, dies = made.client("one"), made.client("dies")
        states = [desk.state() for desk in made.desks]
        assert [one.take(), dies.take()] == [0, 1]
        one.push(ones(one, 0), wants=False)
        dies.push(ones(dies, 1), wants=False)
        one.take(), dies.take()
        dies.close()
        made.restart(restored, states[restored])
        one.pull()  # by which it sends its part again
        lead = made.desks[0].lead
        assert lead is not None
        lead.ledger.undo([1] if restored else [])
        assert one.take() == WAIT
        assert one.versions[1 - restored] == 1
        assert lead.beyond == -1
        assert one.take() == WAIT
        assert lead.beyond == 1
        made.number += 1
        for number, state in enumerate(states):
            made.install(number, state)
        lease = one.take()
        assert (lease, one.versions) == (0, [0, 0])
        for _ in range(10):
            lease = push_and_take(one, lease)
        assert made.whole().tolist() == [5.0] * 1000


def test_bulk_goes_back_when_a_worker_dies_between_two_servers() -> None:
    """The first server has its part, and with that the whole step; the other one lacks it."""
    with farm(Plan(100, 1, 2, "bulk"), dataclasses.replace(ONES, bulk=True, parts=2), servers=2) as made:
        one, dies = made.client("one"), made.client("dies")
        assert [one.take(), dies.take()] == [0, 1]
        one.push(ones(one, 0), wants=False)
        dies._exchange({0: Request(Op.PUSH)}, ones(dies, 1))
        lead = made.desks[0].lead
        assert lead is not None
        assert one.take() == WAIT
        assert lead.beyond == -1, "it may still come"
        dies.close()
        while one.versions != [1, 0] or lead.beyond < 0:
            assert one.take() == WAIT
        assert lead.beyond == 1


def test_a_push_under_way_when_all_go_back_counts_in_its_step() -> None:
    with farm(Plan(100, 1, 2, "bulk"), dataclasses.replace(ONES, bulk=True, parts=2), servers=2) as made:
        client = made.client()
        states = [desk.state() for desk in made.desks]
        lease = client.take()
        for _ in range(6):
            lease = push_and_take(client, lease)
        assert lease == 6
        made.number += 1
        for number, state in enumerate(states):
            made.install(number, state)
        assert client.push(ones(client, lease)).lease == 0, "sent with the others of its step in mind"
        lead = made.desks[0].lead
        assert lead is not None
        for lease in range(6):
            assert lead.ledger.done.low == lease // 2 * 2
            following = push_and_take(client, lease)
            assert following == (lease + 1 if lease < 5 else 7), "the lease that was under way is not done again"
        assert made.whole().tolist() == [3.0] * 1000


def test_a_pull_is_one_version_under_load() -> None:
    size, until_s = 200_000, time.monotonic() + 3.0
    with farm(size=size, servers=2) as made:
        torn: list[str] = []
        pulls = [0]

        def push(name: str, local: bool) -> None:
            client = made.client(name, local=local)
            lease = client.take()
            while time.monotonic() < until_s:
                lease = client.push(ones(client, lease)).lease
            client.close()

        def pull(name: str, local: bool) -> None:
            client = made.client(name, local=local)
            while time.monotonic() < until_s:
                client.pull()
                first = client.vector.clone()
                time.sleep(0.001)
                for version, desk in zip(client.versions, made.desks, strict=True):
                    assert desk.shard is not None
                    part = first[desk.shard.start : desk.shard.stop]
                    if float(part.min()) != float(part.max()) or float(part[0]) != version:
                        torn.append(f"{name}: {part.unique().tolist()} at version {version}")
                if not torch.equal(client.vector, first):
                    torn.append(f"{name}: changed while it was read")
                pulls[0] += 1

        threads = [threading.Thread(target=push, args=(f"push{n}", n % 2 == 0)) for n in range(3)]
        threads += [threading.Thread(target=pull, args=(f"pull{n}", n % 2 == 0)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not torn
        assert pulls[0] > 20
        assert made.desks[0].shard is not None
        assert made.desks[0].shard.version > 20
        assert len(made.desks[0].shard.versions.segments) <= 8, "buffers are used again"


def test_a_dead_workers_lease_goes_to_the_next_at_once() -> None:
    with farm() as made:
        one, other = made.client("one"), made.client("other")
        assert one.take() == 0
        one.close()
        deadline_s = time.monotonic() + 5.0
        while (lease := other.take()) != 0:
            assert time.monotonic() < deadline_s
            other.push(ones(other, lease), wants=False)
        assert lease == 0


def test_a_worker_that_asks_in_vain_is_not_held_for_ever_and_blocks_nobody() -> None:
    with farm(Plan(1, 1)) as made:
        one, other = made.client("one"), made.client("other")
        assert one.take() == 0
        waits = threading.Thread(target=other.take)
        started_s = time.monotonic()
        waits.start()
        one.pull()
        assert time.monotonic() - started_s < WAIT_S / 2
        one.push(ones(one, 0))
        waits.join(5 * WAIT_S)
        assert not waits.is_alive()
        assert made.desks[0].lead is not None
        with made.desks[0].lock:
            made.desks[0].lead.ledger.ended = True
        assert other.take() == END


@pytest.mark.parametrize("local", WAYS)
def test_a_slow_server_has_one_gradient_of_each_worker_to_do(local: bool) -> None:
    with farm(size=100_000) as made:
        clients = [made.client(f"w{number}", local=local) for number in range(8)]
        leases = [client.take() for client in clients]
        pushed = [0] * 8

        def push(number: int) -> None:
            lease = leases[number]
            for _ in range(3):
                lease = clients[number].push(ones(clients[number], lease)).lease
                pushed[number] += 1

        threads = [threading.Thread(target=push, args=(number,)) for number in range(8)]
        with made.desks[0].lock:  # as if it were at something long
            for thread in threads:
                thread.start()
            time.sleep(0.3)
            assert pushed == [0] * 8, "nobody goes on before its gradient is taken"
        for thread in threads:
            thread.join()
        assert made.whole().tolist() == [24.0] * 100_000


def test_a_refused_gradient_is_given_back_and_done_by_another() -> None:
    policy = dataclasses.replace(ONES, staleness=1)
    with farm(policy=policy, servers=2) as made:
        slow, fast = made.client("slow"), made.client("fast")
        held, lease = slow.take(), fast.take()
        for _ in range(3):
            lease = fast.push(ones(fast, lease)).lease
        answer = slow.push(ones(slow, held))
        assert answer.refused
        assert made.whole().tolist() == [3.0] * 1000
        assert made.desks[0].lead is not None
        assert made.desks[0].lead.ledger.counts.refused == 1
        assert answer.lease in (held, lease + 1)
        done = slow.push(ones(slow, answer.lease))
        assert not done.refused


def test_ranges_are_cut_anew_between_two_steps() -> None:
    with farm() as first:
        made, client, leases = first, first.client(), set()
        lease = client.take()
        for servers in (2, 3, 1, 2):
            for _ in range(5):
                leases.add(lease)
                lease = client.push(ones(client, lease)).lease
            states = cut_anew([desk.hand_on() for desk in made.desks], servers)
            for serving in made.servings:
                serving.close()
            made = Farm(made.plan, made.policy, made.size, servers, number=made.number + 1)
            for number, state in enumerate(states):
                made.install(number, state)
            client._source = made.where
            answer = client.push(ones(client, lease))
            assert answer.refused, "parameters that came from the old servers have no version on the new ones"
            lease = answer.lease
        assert made.whole().tolist() == [float(len(leases))] * 1000
        assert len(leases) >= 18
        made.close()


def test_strangers_are_not_let_in() -> None:
    with farm() as made:
        table = made.where(None)
        assert table is not None
        good = table.places[0].address
        wrong = Table(table.number, (dataclasses.replace(table.places[0], address=dataclasses.replace(good, token="0" * 32)),))
        tries: list[Table | None] = []

        def where(known: Table | None) -> Table | None:
            tries.append(known)
            if len(tries) > 3:
                raise InterruptedError
            return wrong if known is None else None

        with pytest.raises(InterruptedError):
            Client(where, "w", made.client().layout).take()
        connection = socket.create_connection((good.host, good.port))
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 200)
        assert connection.recv(100) == b""
        assert made.client().take() == 0
