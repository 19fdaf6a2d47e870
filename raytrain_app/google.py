"""What this machine knows of Google Cloud: its metadata server, and the account that its programs act as."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PRODUCT_NAME = Path("/sys/class/dmi/id/product_name")
REQUEST_S = 2.0


def metadata_host() -> str | None:
    """Address of the metadata server, None where this machine is not one of Compute Engine.

    As Google's own clients do it: GCE_METADATA_HOST names another server, and the firmware tells whose machine it is.
    """
    if host := os.environ.get("GCE_METADATA_HOST"):
        return host
    try:
        ours = PRODUCT_NAME.read_text().startswith("Google")
    except OSError:
        ours = False
    return "metadata.google.internal" if ours else None


def read_metadata(host: str, key: str) -> str:
    """The value of a key of the machine that asks, as in `instance/preempted`.

    Raises:
        OSError: the metadata server does not answer, or has no such key.
    """
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy would answer for its own machine
    request = urllib.request.Request(f"http://{host}/computeMetadata/v1/{key}", headers={"Metadata-Flavor": "Google"})
    with direct.open(request, timeout=REQUEST_S) as response:
        return str(response.read().decode().strip())


def account() -> str | None:
    """Who requests to Google Cloud are made as, None if nobody: Application Default Credentials, in their order.

    https://cloud.google.com/docs/authentication/application-default-credentials
    """
    if named := os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
        content = _json(Path(named))
        return None if content is None else f"{_name(content)} of {named}"
    folder = Path(os.environ.get("CLOUDSDK_CONFIG") or Path.home() / ".config" / "gcloud")
    content = _json(folder / "application_default_credentials.json")
    if content is not None:
        return f"{_name(content)} of `gcloud auth application-default login`"
    host = metadata_host()
    if host is None:
        return None
    try:
        return f"the machine's service account {read_metadata(host, 'instance/service-accounts/default/email')}"
    except urllib.error.HTTPError:
        return None  # the machine has none
    except OSError:
        return "the machine's service account"  # whose name could not be had in time


def lacks_credentials(uri: str) -> str | None:
    """Why a gs:// URI cannot be used here, None if it can be tried: without credentials clients look for them for minutes."""
    if not uri.startswith("gs://") or uri.startswith("gs://anonymous@") or account() is not None:
        return None
    return (
        "there are no Google credentials here; run `gcloud auth application-default login`, name a service account's key file in "
        "GOOGLE_APPLICATION_CREDENTIALS, or use a machine that has a service account; gs://anonymous@bucket/ is for public data"
    )


def _name(content: Mapping[str, Any]) -> str:
    return str(content.get("client_email") or content.get("account") or content.get("type") or "an unnamed account")


def _json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
