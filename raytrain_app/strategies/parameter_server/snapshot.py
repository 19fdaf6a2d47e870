"""States of ranges: cut anew, put together, and turned into checkpoints and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from raytrain_app.elastic.progress import Progress
from raytrain_app.learners.base import Learner
from raytrain_app.state import TrainState
from raytrain_app.strategies.parameter_server.shard import Policy, Shard, ShardState, ranges

WHOLE_RANGE = ("update_size",)
"""Slots with one value for a range; the others have one for each of its parameters."""


def first_states(learner: Learner, policy: Policy, servers: int) -> list[ShardState]:
    """The states of a run that begins with the learner's parameters."""
    vector, counters = learner.flat()
    like = Shard.new_slots(policy, learner.layout.num_parameters, vector.dtype)
    whole = ShardState(0, len(vector), vector.numpy(), like, counters.numpy(), num_parameters=learner.layout.num_parameters)
    return cut_anew([whole], servers)


def cut_anew(states: Sequence[ShardState], servers: int) -> list[ShardState]:
    """The same state in `servers` ranges.

    Args:
        states: of all ranges, in order; they must have applied the same leases.
        servers: how many ranges to make.
    """
    assert all(state.applied == states[0].applied for state in states), "ranges with different leases cannot be joined"
    whole = _joined(states)
    epochs = set(whole.ends).intersection(*(state.ends for state in states))
    ends = {epoch: cut_anew([state.ends[epoch] for state in states], servers) for epoch in epochs}
    return [
        replace(
            whole,
            start=start,
            stop=stop,
            vector=whole.vector[start:stop].copy(),
            slots={
                name: slot.copy() if name in WHOLE_RANGE else slot[start : min(stop, whole.num_parameters)].copy()
                for name, slot in whole.slots.items()
            },
            counters=whole.counters if number == 0 else whole.counters[:0],
            ledger=whole.ledger if number == 0 else {},
            ends={epoch: cut[number] for epoch, cut in ends.items()},
        )
        for number, (start, stop) in enumerate(ranges(len(whole.vector), servers))
    ]


def _joined(states: Sequence[ShardState]) -> ShardState:
    first = states[0]
    slots = {
        name: slot if name in WHOLE_RANGE else np.concatenate([state.slots[name] for state in states])
        for name, slot in first.slots.items()
    }
    return replace(
        first,
        stop=states[-1].stop,
        vector=np.concatenate([state.vector for state in states]),
        slots=slots,
        version=max(state.version for state in states),
        updates=max(state.updates for state in states),
    )


def load_into(learner: Learner, states: Sequence[ShardState]) -> None:
    """Gives the learner the parameters and buffers of all ranges."""
    vector = torch.from_numpy(np.concatenate([state.vector for state in states]))
    learner.load_flat(vector, torch.from_numpy(states[0].counters.copy()))


def to_checkpoint(learner: Learner, states: Sequence[ShardState]) -> TrainState:
    """The states as a checkpoint; the learner has their parameters afterwards.

    The servers' slots are whole flat vectors, in the order of the learner's flat vector. What else belongs to a range is in
    the progress, since ranges may have applied different leases.
    """
    load_into(learner, states)
    state = learner.state()
    whole = _joined(states)
    slots = [name for name in whole.slots if name not in WHOLE_RANGE]
    state.optimizer = {**{name: whole.slots[name] for name in slots}, **learner.callbacks.state()}
    places = [
        {
            **{name: getattr(state, name) for name in ("start", "stop", "version", "updates", "applied")},
            "slots": {name: slot.tolist() for name, slot in state.slots.items() if name in WHOLE_RANGE},
        }
        for state in states
    ]
    state.progress = {
        **progress_of(states[0]).to_json(),
        "parameter_server": {"ranges": places, "slots": slots, "ledger": states[0].ledger},
    }
    return state


def from_checkpoint(learner: Learner, state: TrainState) -> list[ShardState]:
    """The states that `to_checkpoint` was given.

    Raises:
        StorageError: the checkpoint is of another model.
    """
    saved: Mapping[str, Any] = state.progress["parameter_server"]
    others = {name: array for name, array in state.optimizer.items() if name not in saved["slots"]}
    learner.load(replace(state, optimizer=others))
    vector, counters = learner.flat()
    parameters = learner.layout.num_parameters
    states = []
    for number, place in enumerate(saved["ranges"]):
        start, stop = place["start"], place["stop"]
        slots = {name: state.optimizer[name][start : min(stop, parameters)] for name in saved["slots"]}
        slots |= {name: np.array(value) for name, value in place["slots"].items()}
        states.append(
            ShardState(
                start,
                stop,
                vector[start:stop].numpy(),
                slots,
                counters.numpy() if number == 0 else counters.numpy()[:0],
                place["version"],
                place["updates"],
                place["applied"],
                saved["ledger"] if number == 0 else {},
                parameters,
            )
        )
    return states


def progress_of(lead: ShardState) -> Progress:
    """Where the run stood in the lead's state."""
    return Progress.from_json(lead.ledger["journal"]["progress"]) if lead.ledger else Progress()
