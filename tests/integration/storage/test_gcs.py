"""Google Cloud Storage, against a real service's protocol: what holds for S3 holds here, and failures say who, what and where."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from raytrain_app import google
from raytrain_app.data.files import find_files
from raytrain_app.errors import DataError, StorageError
from raytrain_app.google import account, metadata_host
from raytrain_app.storage.checkpoints import CheckpointStore
from raytrain_app.storage.folder import Folder
from raytrain_app.storage.remote import RemoteFolder
from tests.integration.storage.gcs import SLOW_S, FaultyGcs
from tests.integration.storage.test_s3 import (  # noqa: F401  the same promises, kept by another service
    test_a_cut_upload_of_the_newest_is_passed_over,
    test_a_whole_run,
    test_files_and_folders,
)
from tests.metadata import MetadataServer


@pytest.fixture(scope="session")
def gcs_service() -> Iterator[FaultyGcs]:
    service = FaultyGcs()
    yield service
    service.close()


@pytest.fixture
def gcs(gcs_service: FaultyGcs) -> Iterator[FaultyGcs]:
    gcs_service.uploads = 0
    gcs_service.authorizations.clear()
    yield gcs_service
    gcs_service.faults = []
    gcs_service.released.set()
    gcs_service.released.clear()


@pytest.fixture
def bucket_uri(gcs: FaultyGcs, request: pytest.FixtureRequest) -> str:
    return gcs.uri(request.node.name.replace("[", "-").replace("]", ""))


@pytest.fixture
def no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that nobody has logged in on; its home folder."""
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "CLOUDSDK_CONFIG", "GCE_METADATA_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(google, "PRODUCT_NAME", tmp_path / "product_name")
    return tmp_path


def test_steps_in_a_bucket_are_found_again(bucket_uri: str) -> None:
    folder = Folder.open(bucket_uri)
    folder.write("checkpoints/step-00000002/weights", b"1")
    assert folder.child("checkpoints").list() == ["step-00000002"]
    assert CheckpointStore(folder.child("checkpoints"), 3, "val_loss", "min").load() is None


@pytest.mark.parametrize("fault", ["busy", "many", "cut"])
def test_short_failures_are_ridden_out(gcs: FaultyGcs, bucket_uri: str, fault: str) -> None:
    gcs.faults = [fault] * 2
    folder = Folder.open(bucket_uri)
    folder.write("x", b"12")
    assert gcs.faults == []
    assert folder.read("x") == b"12"


def test_a_slow_upload_arrives(gcs: FaultyGcs, bucket_uri: str) -> None:
    gcs.faults = ["slow", "slow"]
    started_s = time.monotonic()
    Folder.open(bucket_uri).write("x", b"1" * 1_000_000)
    assert time.monotonic() - started_s > SLOW_S
    assert Folder.open(bucket_uri).files() == {"x": 1_000_000}


def test_a_refusal_is_not_tried_again(gcs: FaultyGcs, bucket_uri: str) -> None:
    gcs.faults = ["denied"] * 100
    with pytest.raises(
        StorageError, match=r"cannot write gs://.*/x\?.* from host .*: .*the bucket is denied.*; give this user, or"
    ):
        Folder.open(bucket_uri).write("x", b"12")
    assert gcs.uploads < 3


@pytest.mark.parametrize("fault", ["hang", "busy"])
def test_a_deadline_ends_what_does_not_end(gcs: FaultyGcs, bucket_uri: str, fault: str) -> None:
    gcs.faults = [fault] * 100
    started_s = time.monotonic()
    with pytest.raises(StorageError, match="cannot write gs://"):
        RemoteFolder(bucket_uri, deadline_s=2).write("x", b"12")
    assert time.monotonic() - started_s < 4


def test_data_is_read_from_a_bucket(gcs: FaultyGcs) -> None:
    # Without the proxy: pyarrow opens files for random access without letting other threads of this process run.
    uri = gcs.uri("data").replace(gcs.host, gcs.service_host)
    Folder.open(uri).write("train/x.csv", b"1,2\n")
    (file,) = find_files(uri)
    assert (file.inside, file.size, file.head(10)) == ("train/x.csv", 4, b"1,2\n")


def test_an_unknown_bucket(gcs: FaultyGcs) -> None:
    with pytest.raises(StorageError, match=r"NOT_FOUND.*; check the name of the bucket and the path"):
        Folder.open(gcs.uri("x", "anonymous@nobucket")).check_writable()


def test_without_credentials_it_says_so_at_once(gcs: FaultyGcs, no_credentials: Path) -> None:
    started_s = time.monotonic()
    with pytest.raises(
        StorageError, match=r"cannot use gs://bucket/x.*no Google credentials here; run `gcloud auth application-"
    ):
        Folder.open(gcs.uri("x", "bucket")).check_writable()
    with pytest.raises(DataError, match=r"gs://bucket/x cannot be listed: there are no Google credentials here"):
        find_files(gcs.uri("x", "bucket"))
    assert time.monotonic() - started_s < 1


def test_a_key_file_signs_the_requests_and_is_named_when_refused(
    gcs: FaultyGcs, no_credentials: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = rsa.generate_private_key(65537, 2048).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    file = no_credentials / "key.json"
    content = {"type": "service_account", "client_email": "trainer@demo.iam.gserviceaccount.com", "private_key_id": "1"}
    content |= {"private_key": key.decode(), "token_uri": "http://127.0.0.1:1/token"}
    file.write_text(json.dumps(content))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    folder = Folder.open(gcs.uri("signed", "bucket"))
    folder.write("x", b"1")
    assert all(header.startswith("Bearer ") for header in gcs.authorizations)
    gcs.faults = ["denied"] * 10
    with pytest.raises(StorageError, match=r"from host .* as trainer@demo.iam.gserviceaccount.com of .*key.json"):
        folder.write("x", b"1")


def test_who_a_machine_is(no_credentials: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (metadata_host(), account()) == (None, None)
    google.PRODUCT_NAME.write_text("Standard PC\n")
    assert metadata_host() is None
    google.PRODUCT_NAME.write_text("Google Compute Engine\n")
    assert metadata_host() == "metadata.google.internal"
    with MetadataServer() as server:
        monkeypatch.setenv("GCE_METADATA_HOST", server.host)
        assert metadata_host() == server.host
        assert account() is None
        server.values["service-accounts/default/email"] = "1-compute@developer.gserviceaccount.com"
        assert account() == "the machine's service account 1-compute@developer.gserviceaccount.com"
    login = no_credentials / ".config" / "gcloud" / "application_default_credentials.json"
    login.parent.mkdir(parents=True)
    login.write_text('{"type": "authorized_user"}')
    assert account() == "authorized_user of `gcloud auth application-default login`"
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(no_credentials / "none.json"))
    assert account() is None
