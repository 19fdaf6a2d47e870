"""Checkpoints: what is saved comes back, what is damaged or unfinished does not, and the right ones stay."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrain_app.errors import StorageError, TrainingError
from raytrain_app.state import TrainState, weights_sha256
from raytrain_app.storage.checkpoints import CheckpointStore
from raytrain_app.storage.folder import Folder
from raytrain_app.storage.local import LocalFolder

FORK = multiprocessing.get_context("fork")


def make_state(seed: int) -> TrainState:
    rng = np.random.default_rng(seed)
    return TrainState(
        weights={
            "a.weight": rng.normal(size=(3, 4)).astype(np.float32),
            "a.bias": np.asarray(rng.normal(), np.float32),
            "z": np.zeros((0, 2)),
        },
        buffers={"bn.mean": rng.normal(size=4), "bn.count": np.asarray(seed), "mask": np.array([-np.inf, 0.0])},
        optimizer={"exp_avg.a.weight": rng.normal(size=(3, 4)).astype(np.float32), "step": np.asarray(seed, np.float32)},
        progress={"step": seed, "loss_sum": rng.normal(), "metrics": {"loss": 0.1}, "best": None, "random": [1, 2, 2**60]},
    )


def assert_equal(found: TrainState, expected: TrainState) -> None:
    for group in ("weights", "buffers", "optimizer"):
        arrays, wanted = getattr(found, group), getattr(expected, group)
        assert arrays.keys() == wanted.keys()
        for name, array in arrays.items():
            assert array.dtype == wanted[name].dtype
            assert array.flags.writeable
            np.testing.assert_array_equal(array, wanted[name])
    assert found.progress == expected.progress


def make_store(path: Path, keep: int = 2, monitor: str = "val_loss", mode: str = "min") -> CheckpointStore:
    return CheckpointStore(Folder.open(str(path)), keep, monitor, mode)


def load_step(store: CheckpointStore, which: str = "latest") -> int:
    found = store.load(which)
    assert found is not None
    assert_equal(found[0], make_state(found[1]))
    return found[1]


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    assert store.load() is None
    uri = store.save(7, make_state(7), {"val_loss": 0.5})
    assert uri == str(tmp_path / "step-00000007")
    assert load_step(store) == load_step(store, "best") == load_step(store, "step-00000007") == 7
    assert (tmp_path / "latest").read_text() == (tmp_path / "best").read_text() == "step-00000007\n"


def test_arrays_of_any_layout_come_back_by_value(tmp_path: Path) -> None:
    base = np.arange(12, dtype=np.float32).reshape(3, 4)
    store = make_store(tmp_path)
    store.save(1, TrainState({"t": base.T, "big": base.astype(">f4"), "cut": base[:, ::2]}), {})
    found = store.load()
    assert found is not None
    for name, expected in {"t": base.T, "big": base, "cut": base[:, ::2]}.items():
        np.testing.assert_array_equal(found[0].weights[name], expected)


def test_the_manifest_says_what_is_there(tmp_path: Path) -> None:
    make_store(tmp_path).save(3, make_state(3), {"loss": 0.25, "val_loss": float("nan")})
    manifest = json.loads((tmp_path / "step-00000003" / "manifest.json").read_text())
    assert manifest["metrics"] == {"loss": 0.25, "val_loss": None}
    assert manifest["weights_sha256"] == weights_sha256(make_state(3).weights)
    for name, file in manifest["files"].items():
        assert (tmp_path / "step-00000003" / name).stat().st_size == file["bytes"]


def test_there_are_three_files_and_no_pickle(tmp_path: Path) -> None:
    make_store(tmp_path).save(1, make_state(1), {})
    assert sorted(path.name for path in (tmp_path / "step-00000001").iterdir()) == [
        "manifest.json",
        "optimizer.safetensors",
        "weights.safetensors",
    ]


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    store = make_store(tmp_path, keep=2)
    for step, loss in enumerate([0.9, 0.1, 0.5, 0.4, 0.6], start=1):
        store.save(step, make_state(step), {"val_loss": loss})
    assert store.steps() == [2, 4, 5]
    assert (load_step(store), load_step(store, "best")) == (5, 2)


def test_keep_one_holds_two_when_the_best_is_not_the_newest(tmp_path: Path) -> None:
    store = make_store(tmp_path, keep=1, monitor="val_accuracy", mode="max")
    kept = []
    for step, accuracy in enumerate([0.5, 0.9, 0.8, 0.9, 0.95], start=1):
        store.save(step, make_state(step), {"val_accuracy": accuracy})
        kept.append(store.steps())
    assert kept == [[1], [2], [2, 3], [2, 4], [5]]  # of equally good ones, the earlier is the best


def test_without_the_metric_or_with_nan_it_never_becomes_the_best(tmp_path: Path) -> None:
    store = make_store(tmp_path, keep=3)
    store.save(1, make_state(1), {"val_loss": float("nan")})
    store.save(2, make_state(2), {"loss": 0.0})
    assert not (tmp_path / "best").exists()
    assert store.load("best") is None
    store.save(3, make_state(3), {"val_loss": 5.0})
    store.save(4, make_state(4), {"val_loss": float("-inf")})
    assert (load_step(store), load_step(store, "best")) == (4, 3)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path, bad: float) -> None:
    store = make_store(tmp_path)
    store.save(1, make_state(1), {"val_loss": 1.0})
    state = make_state(2)
    state.weights["a.weight"][1, 1] = bad
    with pytest.raises(TrainingError, match=r"weights 'a\.weight' are not finite at step 2"):
        store.save(2, state, {"val_loss": 0.5})
    assert (load_step(store), load_step(store, "best"), store.steps()) == (1, 1, [1])


def test_an_unfinished_folder_is_no_checkpoint_and_is_replaced(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.save(1, make_state(1), {})
    (tmp_path / "step-00000002").mkdir()
    (tmp_path / "step-00000002" / "weights.safetensors").write_bytes(b"half of it")
    assert store.steps() == [1]
    found = store.load()
    assert found is not None
    assert found[1] == 1
    assert found[2] == [f"checkpoint {tmp_path}/step-00000002 cannot be used: it was never finished (no manifest.json)"]
    store.save(2, make_state(2), {})
    assert load_step(store) == 2


def test_leftovers_go_when_later_checkpoints_are_there(tmp_path: Path) -> None:
    store = make_store(tmp_path, keep=1)
    for name in ("step-00000001", "step-00000005"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "weights.safetensors").write_bytes(b"half of it")
    store.save(3, make_state(3), {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000003", "step-00000005"]


def test_the_same_step_again_takes_the_new_metrics(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.save(1, make_state(1), {})
    weights = tmp_path / "step-00000001" / "weights.safetensors"
    written_ns = weights.stat().st_mtime_ns
    state = make_state(1)
    state.progress["epoch"] = 1
    store.save(1, state, {"val_loss": 0.5})
    found = store.load("best")
    assert found is not None
    assert found[0].progress["epoch"] == 1
    assert weights.stat().st_mtime_ns == written_ns  # equal files stay, so that there is no time without a checkpoint


def test_the_same_step_again_with_other_weights(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.save(1, make_state(9), {})
    store.save(1, make_state(1), {})
    assert load_step(store) == 1


def test_after_going_back_damaged_later_ones_do_not_count(tmp_path: Path) -> None:
    store = make_store(tmp_path, keep=2)
    store.save(10, make_state(10), {})
    store.save(20, make_state(20), {})
    (tmp_path / "step-00000020" / "weights.safetensors").write_bytes(b"")
    store.save(15, make_state(15), {})
    assert store.steps() == [10, 15, 20]
    assert load_step(store) == 15


def test_unknown_names_are_answered_with_those_there_are(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.save(4, make_state(4), {})
    with pytest.raises(StorageError, match=r"there is no checkpoint 'step-00000005' in .*; there are: step-00000004"):
        store.load("step-00000005")


def test_when_all_are_damaged_it_says_so_instead_of_starting_over(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.save(1, make_state(1), {"val_loss": 1.0})
    (tmp_path / "step-00000001" / "optimizer.safetensors").unlink()
    for which in ("latest", "best", "step-00000001"):
        with pytest.raises(StorageError, match=r"optimizer\.safetensors is missing, expected .* bytes\. No other"):
            store.load(which)


@settings(deadline=None, max_examples=40)
@given(
    file=st.sampled_from(["weights.safetensors", "optimizer.safetensors", "manifest.json"]),
    harm=st.sampled_from(["flip", "cut", "empty", "grow", "delete"]),
    place=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
)
def test_any_damage_to_the_newest_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, file: str, harm: str, place: float, bit: int
) -> None:
    path = tmp_path_factory.mktemp("run")
    store = make_store(path)
    for step in (1, 2):
        store.save(step, make_state(step), {"val_loss": 1 / step})
    target = path / "step-00000002" / file
    data = bytearray(target.read_bytes())
    if harm == "flip":
        data[int(place * len(data))] ^= 1 << bit
    elif harm == "cut":
        del data[int(place * len(data)) :]
    elif harm == "empty":
        data.clear()
    else:
        data += b"\0"
    target.unlink() if harm == "delete" else target.write_bytes(data)
    for which in ("latest", "best"):
        found = store.load(which)
        assert found is not None
        assert found[1] == 1
        assert_equal(found[0], make_state(1))
        assert which == "best" or file in found[2][0]


class _DyingFolder(LocalFolder):
    """Kills its process before it changes the disk for the `left`-th time; folders lose their manifest last."""

    def __init__(self, path: str, left: int) -> None:
        super().__init__(path)
        self.left = left

    def write(self, path: str, data: bytes) -> None:
        self._count_down()
        super().write(path, data)

    def delete(self, path: str) -> None:
        for file in sorted(Path(self.uri, path).glob("*"), reverse=True):
            self._count_down()
            file.unlink()
        self._count_down()
        super().delete(path)

    def _count_down(self) -> None:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1


def _save_and_die(path: Path, left: int, keep: int, step: int, seed: int) -> None:
    CheckpointStore(_DyingFolder(str(path), left), keep, "val_loss", "min").save(step, make_state(seed), {"val_loss": 1 / step})


@pytest.mark.parametrize(
    ("keep", "step", "seed"),
    [(1, 3, 3), (1, 2, 2), (2, 2, 5)],
    ids=["new step", "same step, same weights", "same step, other weights"],
)
def test_killed_at_any_moment_what_counts_is_whole(tmp_path: Path, keep: int, step: int, seed: int) -> None:
    for left in range(30):
        path = tmp_path / str(left)
        store = make_store(path, keep)
        for earlier in (1, 2):
            store.save(earlier, make_state(earlier), {"val_loss": 1 / earlier})
        process = FORK.Process(target=_save_and_die, args=(path, left, keep, step, seed))
        process.start()
        process.join()
        for which in ("latest", "best", *(f"step-{number:08d}" for number in store.steps())):
            found = store.load(which)
            assert found is not None
            assert found[1] in (2, step) or keep == 2
            assert_equal(found[0], make_state(found[0].progress["step"]))
        store.save(3, make_state(3), {"val_loss": 1 / 3})
        assert (load_step(store), load_step(store, "best")) == (3, 3)
        assert len(store.steps()) <= keep
        if process.exitcode == 0:
            assert left >= 3
            return
        assert process.exitcode == -signal.SIGKILL
    pytest.fail("a checkpoint takes fewer than 30 changes")
