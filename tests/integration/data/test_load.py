"""From a job to rows in the object store, with a real Ray."""

from __future__ import annotations

import io
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from raytrain_app.data import Dataset, Reader, Split, check, epoch_order, load, reading
from raytrain_app.data.reader import arrays
from raytrain_app.errors import DataError
from raytrain_app.job import Job, job_from_dict
from raytrain_app.task import Columns, Rows, Task
from tests.unit.data.making import DIGITS, Digits, idx_bytes, images, labels, write, write_idx

pytestmark = pytest.mark.usefixtures("ray_local")


@pytest.fixture(autouse=True)
def _everything_goes_through_ray_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what is small; `test_small_sources_are_read_alike_without_it` compares both ways."""
    monkeypatch.setattr(reading, "_SMALL_BYTES", 0)


class Mnist(Task):
    columns = Columns(shape=(28, 28), dtype="uint8", num_classes=10)


class Generated(Digits):
    def generate(self, source: str) -> Mapping[str, Rows] | None:
        return {"train": (images(200), labels(200)), "test": (images(50, 1), labels(50))} if source == "made" else None


class Doubling(Digits):
    """Prepares its rows itself, and reports the process it did so in."""

    def prepare(self, batch: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        return {"x": batch["image"] // 2, "y": batch["label"]}


def make_job(source: object, batch: int = 16, **data: Any) -> Job:
    return job_from_dict(
        {
            "name": "test",
            "task": "mnist",
            "model": {"name": "linear"},
            "data": {"source": str(source), **data},
            "train": {"global_batch_size": batch},
        }
    )


def rows_of(split: Split | None) -> tuple[np.ndarray, np.ndarray]:
    assert split is not None
    return Reader(split.blocks).rows(split.ids)


def all_rows(dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Training and validation rows in the order of the source."""
    blocks = dataset.train.blocks
    return Reader(blocks).rows(np.arange(blocks.num_rows))


def test_the_embedded_sample() -> None:
    dataset = load(make_job("mnist-sample"), Mnist())
    assert dataset.validation is not None
    assert dataset.test is not None
    assert (len(dataset.train), len(dataset.validation), len(dataset.test)) == (7200, 800, 2000)
    assert dataset.notes == ()
    x, y = rows_of(dataset.train)
    assert (x.shape, x.dtype.name, y.shape, y.dtype.name) == ((7200, 28, 28), "uint8", (7200,), "int64")
    assert (x.flags.c_contiguous, x.flags.writeable, y.flags.writeable) == (True, True, True)
    # Stratified: every digit has its share in validation, to the row.
    counts = np.bincount(all_rows(dataset)[1])
    assert np.abs(np.bincount(rows_of(dataset.validation)[1]) - counts * 0.1).max() < 1


def test_train_and_validation_are_disjoint_and_repeat() -> None:
    first, second = (load(make_job("mnist-sample"), Mnist()) for _ in range(2))
    assert first.validation is not None
    assert second.validation is not None
    assert np.array_equal(first.train.ids, second.train.ids)
    assert np.array_equal(np.sort(np.concatenate([first.train.ids, first.validation.ids])), np.arange(8000))
    assert first.fingerprint == second.fingerprint


def test_idx_rows_come_in_the_order_of_the_file(tmp_path: Path) -> None:
    dataset = load(make_job(write_idx(tmp_path, rows=100, gz=".gz")), DIGITS)
    np.testing.assert_array_equal(all_rows(dataset)[0], images(100))
    np.testing.assert_array_equal(all_rows(dataset)[1], labels(100))
    np.testing.assert_array_equal(rows_of(dataset.test)[0], images(10, 1))


def test_the_fingerprint_tells_other_data(tmp_path: Path) -> None:
    fingerprints = []
    for name, rows, y in (("a", 100, labels(100)), ("b", 110, labels(110)), ("c", 100, labels(100)[::-1])):
        write(tmp_path / name / "train-images-idx3-ubyte", idx_bytes(images(rows)))
        write(tmp_path / name / "train-labels-idx1-ubyte", idx_bytes(y))
        fingerprints.append(load(make_job(tmp_path / name), DIGITS).fingerprint)
    assert len(set(fingerprints)) == 3


def test_many_blocks_in_the_right_order(tmp_path: Path) -> None:
    rows = 150_000
    write_idx(tmp_path, rows=rows, test_rows=0)
    dataset = load(make_job(tmp_path, order="windowed", window_mib=1), DIGITS)
    starts = np.array(dataset.train.blocks.starts)
    assert len(starts) > 20
    full = (1 << 20) // 8 // (16 + 8)
    assert set(np.diff(starts)[:-1]) == {full}
    np.testing.assert_array_equal(all_rows(dataset)[0], images(rows))
    order = epoch_order(dataset.train, 0, 0, "windowed")
    assert np.array_equal(np.sort(order), dataset.train.ids)


def test_small_sources_are_read_alike_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    y = labels(50_000)
    y[[13, 49_000]] = 10, 255
    write_idx(tmp_path, rows=len(y))
    write(tmp_path / "train-labels-idx1-ubyte", idx_bytes(y))
    job = make_job(tmp_path, order="windowed", window_mib=1, on_bad_row="drop")
    with_it = load(job, DIGITS)
    monkeypatch.undo()
    without = load(job, DIGITS)
    assert (without.fingerprint, without.notes, without.dropped) == (with_it.fingerprint, with_it.notes, 2)
    assert without.train.blocks.starts == with_it.train.blocks.starts
    assert len(without.train.blocks.starts) > 5
    for one, other in zip(all_rows(without), all_rows(with_it), strict=True):
        np.testing.assert_array_equal(one, other)


def test_rows_a_task_makes_itself() -> None:
    dataset = load(make_job("made"), Generated())
    np.testing.assert_array_equal(all_rows(dataset)[0], images(200))
    np.testing.assert_array_equal(rows_of(dataset.test)[1], labels(50))


def test_prepare_runs_in_ray_data(tmp_path: Path) -> None:
    dataset = load(make_job(write_idx(tmp_path, rows=100)), Doubling())
    np.testing.assert_array_equal(all_rows(dataset)[0], images(100) // 2)


def test_bad_rows_end_the_run_or_are_dropped_and_counted(tmp_path: Path) -> None:
    y = labels(100)
    y[[13, 40, 41]] = 10, 255, 99
    write_idx(tmp_path, rows=100)
    write(tmp_path / "train-labels-idx1-ubyte", idx_bytes(y))
    image_file = tmp_path / "train-images-idx3-ubyte"
    with pytest.raises(DataError) as error:
        load(make_job(tmp_path), DIGITS)
    assert str(error.value) == (
        f"{image_file}, row 13: label 10 is not in 0..9\n{image_file}, row 40: label 255 is not in 0..9\n"
        f"{image_file}, row 41: label 99 is not in 0..9\nCorrect these rows, or set data.on_bad_row: drop to go on without them"
    )
    dataset = load(make_job(tmp_path, on_bad_row="drop"), DIGITS)
    assert dataset.dropped == 3
    assert dataset.notes == (f"3 bad rows were dropped, the first of them: {image_file}, row 13: label 10 is not in 0..9",)
    np.testing.assert_array_equal(all_rows(dataset)[1], np.delete(labels(100), [13, 40, 41]))


def test_damage_found_while_reading_ends_the_run(tmp_path: Path) -> None:
    write_idx(tmp_path, rows=100, gz=".gz")
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=f"{path} is cut off: its .* bytes end before the gzip data does; get it again"):
        load(make_job(tmp_path, on_bad_row="drop"), DIGITS)


@pytest.mark.parametrize(
    ("rows", "batch", "text"),
    [
        (
            15,
            16,
            "there are 13 training rows (and 2 held out for validation), fewer than train.global_batch_size: 16; expected at",
        ),
        (10, 4, "data.validation_fraction: 0.01 of 10 rows is less than one row; expected one or more; make it larger, or 0"),
    ],
)
def test_too_few_rows_are_refused(tmp_path: Path, rows: int, batch: int, text: str) -> None:
    write_idx(tmp_path, rows=rows)
    fraction = 0.1 if rows > 10 else 0.01
    with pytest.raises(DataError) as error:
        load(make_job(tmp_path, batch, validation_fraction=fraction), DIGITS)
    assert text in str(error.value)


def test_three_rows_for_four_workers_are_refused(tmp_path: Path) -> None:
    write_idx(tmp_path, rows=3, test_rows=0)
    raw = make_job(tmp_path, 4, classes=3).model_dump(mode="json")
    job = job_from_dict({**raw, "scaling": {"workers": 4}})
    with pytest.raises(DataError, match=r"there are 3 training rows .*, fewer than train.global_batch_size: 4"):
        load(job, DIGITS)


def test_a_class_without_rows_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "train-images-idx3-ubyte", idx_bytes(images(100)))
    write(tmp_path / "train-labels-idx1-ubyte", idx_bytes((np.arange(100) % 8).astype(np.uint8)))
    with pytest.raises(DataError) as error:
        load(make_job(tmp_path), DIGITS)
    assert str(error.value) == (
        f"data.source: {tmp_path} has no training rows of class 8, 9; expected rows of all classes 0..9; add such rows, or "
        "set data.classes to the number of classes that there are"
    )
    dataset = load(make_job(tmp_path, classes=8), DIGITS)
    assert dataset.notes == (f"{tmp_path} has no test rows, so there will be no test metrics; data.test_source can name some",)


def test_a_validation_split_of_the_source_is_used(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x_train=images(100), y_train=labels(100), x_val=images(30, 2), y_val=labels(30))
    dataset = load(make_job(tmp_path / "a.npz"), DIGITS)
    assert len(dataset.train) == 100
    np.testing.assert_array_equal(rows_of(dataset.validation)[0], images(30, 2))
    assert dataset.notes[0] == f"{tmp_path}/a.npz has its own 30 validation rows, so data.validation_fraction is not used"


def test_check_finds_without_reading_what_names_and_headers_tell(tmp_path: Path) -> None:
    assert check(make_job(write_idx(tmp_path)), DIGITS) == []
    assert check(make_job("made"), Generated()) == []
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx_bytes(images(20))[:50])
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(b"")
    problems = check(make_job(tmp_path), DIGITS)
    assert len(problems) == 2
    assert problems[1].startswith(
        f"{tmp_path}/train-images-idx3-ubyte is cut off: found 50 bytes; its header says 20 x 4 x 4 values"
    )
    assert len(check(make_job(tmp_path / "nowhere"), DIGITS)) == 1


def test_ray_data_says_nothing_on_the_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load(make_job(write_idx(tmp_path, rows=100)), DIGITS)
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_blocks_are_mapped_and_not_copied() -> None:
    blocks = load(make_job("mnist-sample"), Mnist()).train.blocks
    (first, _), (second, _) = (arrays(ray.get(blocks.refs[0]), blocks.shape) for _ in range(2))
    assert first.ctypes.data == second.ctypes.data
    assert not first.flags.owndata
    assert not first.flags.writeable

    @ray.remote(num_cpus=0)
    def grown_mib(refs: list[Any]) -> float:
        import psutil

        process = psutil.Process()
        before = process.memory_full_info().uss
        x, _ = arrays(ray.get(refs[0]), (28, 28))
        x.sum()
        return (process.memory_full_info().uss - before) / 2**20

    # Unique memory of the process: a copy would add the 6 MB of the block.
    assert ray.get(grown_mib.remote([blocks.refs[0]])) < 4


def test_reader_reads_any_rows_in_any_order_from_any_process(tmp_path: Path) -> None:
    write_idx(tmp_path, rows=20_000, test_rows=0)
    dataset = load(make_job(tmp_path, order="windowed", window_mib=1), DIGITS)
    ids = np.random.default_rng(0).permutation(20_000)[:500]

    @ray.remote(num_cpus=0)
    def read(split: Split, some: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return Reader(split.blocks).rows(some)

    for x, y in (Reader(dataset.train.blocks, max_blocks=1).rows(ids), ray.get(read.remote(dataset.train, ids))):
        np.testing.assert_array_equal(x, images(20_000)[ids])
        np.testing.assert_array_equal(y, labels(20_000)[ids])


def test_reader_keeps_few_blocks_mapped(tmp_path: Path) -> None:
    write_idx(tmp_path, rows=60_000, test_rows=0)
    dataset = load(make_job(tmp_path, order="windowed", window_mib=1), DIGITS)
    assert len(dataset.train.blocks.refs) > 9
    reader = Reader(dataset.train.blocks)
    for step in range(0, 54_000, 5000):
        reader.rows(epoch_order(dataset.train, 0, 0, "windowed")[step : step + 5000])
        assert len(reader.mapped) <= dataset.train.blocks.window


@pytest.mark.parametrize("rows", [0, 1, 128, 20_000])
def test_prefetched_rows_are_the_same(tmp_path: Path, rows: int) -> None:
    write_idx(tmp_path, rows=100_000, test_rows=0)
    dataset = load(make_job(tmp_path), DIGITS)
    reader, ids = Reader(dataset.train.blocks), np.random.default_rng(1).permutation(100_000)[:rows]
    reader.prefetch(ids)
    np.testing.assert_array_equal(reader.rows(ids)[0], images(100_000)[ids])
    reader.prefetch(ids)
    other = np.arange(7)
    np.testing.assert_array_equal(reader.rows(other)[0], images(100_000)[other])


@pytest.mark.parametrize("ids", [[-1], [0, 8000]])
def test_row_numbers_that_are_not_there_raise(ids: list[int]) -> None:
    dataset = load(make_job("mnist-sample"), Mnist())
    with pytest.raises(IndexError, match=r"are not all in 0\.\.7999"):
        Reader(dataset.train.blocks).rows(np.array(ids))


def test_all_formats_give_the_same_rows(tmp_path: Path) -> None:
    from PIL import Image

    from raytrain_app.data.convert import convert

    x, y = images(40), labels(40)
    order = np.argsort(y, kind="stable")  # image folders are read class by class
    x, y = x[order], y[order]
    write(tmp_path / "idx" / "train-images-idx3-ubyte", idx_bytes(x))
    write(tmp_path / "idx" / "train-labels-idx1-ubyte", idx_bytes(y))
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y)
    lines = [",".join(map(str, [label, *image.ravel()])) for image, label in zip(x, y, strict=True)]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    for row, (image, label) in enumerate(zip(x, y, strict=True)):
        stream = io.BytesIO()
        Image.fromarray(image).save(stream, "PNG")
        write(tmp_path / "images" / str(label) / f"{row:03}.png", stream.getvalue())
    convert(make_job(tmp_path / "idx").data, DIGITS, tmp_path / "a.parquet")
    sources = [tmp_path / name for name in ("idx", "a.npz", "a.csv", "images", "a.parquet")]
    assert len({load(make_job(source), DIGITS).fingerprint for source in sources}) == 1


def test_loading_needs_no_free_cpu(tmp_path: Path) -> None:
    write_idx(tmp_path, rows=100)

    class Everything:
        def ready(self) -> bool:
            return True

    remote: Any = ray.remote(num_cpus=4)(Everything)
    holder = remote.remote()
    assert ray.get(holder.ready.remote())
    began = time.monotonic()
    assert len(load(make_job(tmp_path), DIGITS).train) == 90
    assert time.monotonic() - began < 30
    ray.kill(holder)
