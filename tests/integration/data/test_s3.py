"""Data in a bucket: an S3 service of this machine."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from moto.server import ThreadedMotoServer
from pyarrow import fs

from raytrain_app.data import check, load
from raytrain_app.errors import DataError
from tests.integration.data.test_load import all_rows, make_job
from tests.unit.data.making import DIGITS, images, labels, write_idx

pytestmark = pytest.mark.usefixtures("ray_local")


@pytest.fixture(scope="module")
def options() -> Iterator[str]:
    """What to put after a URI for it to mean this machine's service, which has the bucket `digits`."""
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    options = f"?endpoint_override={host}:{port}&scheme=http&region=us-east-1"
    fs.FileSystem.from_uri(f"s3://key:secret@digits{options}&allow_bucket_creation=true")[0].create_dir("digits")
    yield options
    server.stop()


@pytest.fixture
def bucket(options: str, tmp_path: Path) -> fs.FileSystem:
    """The bucket, with MNIST's four files in the folder `mnist`."""
    bucket, _ = fs.FileSystem.from_uri(f"s3://key:secret@digits{options}")
    for path in write_idx(tmp_path, rows=200, gz=".gz").iterdir():
        with bucket.open_output_stream(f"digits/mnist/{path.name}", compression=None) as out:
            out.write(path.read_bytes())
    return bucket


@pytest.mark.parametrize("path", ["mnist", "mnist/*", "m*/train*", "mnist/"])
def test_reads_folders_and_globs(bucket: fs.FileSystem, options: str, path: str) -> None:
    dataset = load(make_job(f"s3://key:secret@digits/{path}{options}"), DIGITS)
    np.testing.assert_array_equal(all_rows(dataset)[0], images(200))
    np.testing.assert_array_equal(all_rows(dataset)[1], labels(200))
    assert (dataset.test is None) == path.endswith("train*")


def test_problems_name_the_uri_without_secrets(bucket: fs.FileSystem, options: str) -> None:
    with bucket.open_output_stream("digits/mnist/train-images-idx3-ubyte.gz", compression=None) as out:
        out.write(b"<html>403</html>")
    with pytest.raises(DataError) as error:
        load(make_job(f"s3://key:secret@digits/mnist{options}"), DIGITS)
    assert str(error.value).startswith("s3://digits/mnist/train-images-idx3-ubyte.gz is a web page and not data: it has 16 bytes")
    assert "secret" not in str(error.value)


def test_notes_name_the_uri_without_secrets(bucket: fs.FileSystem, options: str) -> None:
    (note,) = load(make_job(f"s3://key:secret@digits/mnist/train*{options}"), DIGITS).notes
    assert note == "s3://digits/mnist/train* has no test rows, so there will be no test metrics; data.test_source can name some"


def test_nothing_there(bucket: fs.FileSystem, options: str) -> None:
    (problem,) = check(make_job(f"s3://key:secret@digits/nothing{options}"), DIGITS)
    assert problem.startswith(
        "data.source: there is nothing at s3://digits/nothing (listed s3://digits/nothing); expected a file"
    )
