"""On PYTHONPATH with GCE_EMULATOR=host:port set: Google's API clients talk to the emulator, and need no credentials.

Ray's provider has no setting for the address of Compute Engine. This is all that differs from a stock Ray.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

EMULATOR = os.environ.get("GCE_EMULATOR")


class Redirect(importlib.abc.MetaPathFinder):
    """Lets `googleapiclient.discovery` load as always, and then wraps its `build`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "googleapiclient.discovery":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_wrap(module: ModuleType) -> None:
            load(module)
            build = module.build

            def build_redirected(service: str, version: str, **options: Any) -> Any:
                from google.auth.credentials import AnonymousCredentials

                options["credentials"] = AnonymousCredentials()  # type: ignore[no-untyped-call]
                path = "compute/v1/" if service == "compute" else ""
                options["client_options"] = {"api_endpoint": f"http://{EMULATOR}/{path}"}
                return build(service, version, **options)

            module.build = build_redirected  # type: ignore[attr-defined]

        spec.loader.exec_module = load_and_wrap  # type: ignore[method-assign]
        return spec


if EMULATOR:
    sys.meta_path.insert(0, Redirect())
