"""Enough of Google Compute Engine for a real `ray up`, the autoscaler and `ray down`: instances, IAM, projects and metadata."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

from raytrain_app.cluster.rules.fields import instance_findings
from tests.integration.gcp.machines import Machine, Network

PROJECT = "box-project"
DONE = {"name": "operation-1", "status": "DONE", "done": True}
ACCOUNT = f"1-compute@{PROJECT}.iam.gserviceaccount.com"
Answer = tuple[int, Any]


class Emulator:
    """The services of one project, and its machines.

    Args:
        network: that the machines are put on; the services listen on its gateway.
        folder: for the machines' private files.
        environment: further variables that the machines' programs find set.

    Attributes:
        instances: the machines that there are, by name, as the API describes them.
        refusal: code and message of the error that every wish for a machine ends with while it is set.
        outage: while it is set, nobody is told which machines there are.
    """

    def __init__(self, network: Network, folder: Path, environment: dict[str, str]) -> None:
        self.instances: dict[str, dict[str, Any]] = {}
        self.refusal: dict[str, str] = {}
        self.outage = False
        self._machines: dict[str, Machine] = {}
        self._network, self._folder = network, folder
        self._metadata: dict[str, Any] = {"items": []}
        self._policy: dict[str, Any] = {"bindings": []}
        self._accounts: dict[str, dict[str, Any]] = {}
        self._lock = threading.RLock()
        self._api = _serve(network.gateway, self._answer)
        self._metadata_server = _serve(network.gateway, self._answer_metadata)
        self.host, metadata_host = (
            f"{network.gateway}:{server.server_address[1]}" for server in (self._api, self._metadata_server)
        )
        # Google's Python clients read the first, its C++ ones the second.
        self._environment = {"GCE_EMULATOR": self.host, "GCE_METADATA_HOST": metadata_host, "GCE_METADATA_ROOT": metadata_host}
        self._environment |= environment

    def named(self, kind: str) -> list[str]:
        """Names of the running instances of a node type, the oldest first."""
        with self._lock:
            return [
                name
                for name, instance in self.instances.items()
                if instance["status"] == "RUNNING" and instance["labels"].get("ray-user-node-type") == kind
            ]

    def at(self, address: str) -> str:
        """Name of the machine at the address."""
        return next(name for name, machine in self._machines.items() if machine.address == address)

    def reclaim(self, name: str) -> None:
        """Takes a spot machine back: the notice, the shutdown, the end. Returns at once."""
        with self._lock:
            self.instances[name]["preempted"] = True
        threading.Thread(target=self._end, args=(name, True), daemon=True).start()

    def lose(self, name: str) -> None:
        """The machine is gone without a word."""
        self._end(name, False)

    def close(self) -> None:
        for server in (self._api, self._metadata_server):
            server.shutdown()
            server.server_close()
        for machine in self._machines.values():
            machine.vanish()

    def _end(self, name: str, orderly: bool) -> None:
        machine = self._machines[name]
        if orderly:
            machine.shut_down()
        machine.vanish()
        with self._lock:
            self.instances.pop(name, None)

    # ---- the API ----

    def _answer(self, method: str, path: str, query: dict[str, list[str]], body: dict[str, Any], client: str) -> Answer:
        with self._lock:
            if found := re.search(r"/zones/[^/]+/instances(?:/([^/]+))?(/setLabels)?$", path):
                return self._instances(method, found[1], bool(found[2]), query, body)
            for pattern, answer in self._routes(body).items():
                if re.search(pattern, path):
                    return answer()
        return 404, {"error": {"code": 404, "message": path}}

    def _instances(
        self, method: str, name: str | None, relabel: bool, query: dict[str, list[str]], body: dict[str, Any]
    ) -> Answer:
        if name is None and method == "GET" and self.outage:
            return 503, {"error": {"code": 503, "message": "The service is currently unavailable."}}
        if name is None and method == "GET":
            expression = query.get("filter", [""])[0]
            return 200, {"items": [instance for instance in self.instances.values() if _matches(instance, expression)]}
        if name is None and self.refusal:  # the request is taken, and its operation fails
            return 200, {"name": "operation-refused", "status": "RUNNING"}
        if name is None:
            wrong = [f"{finding.path}: {finding.text}" for finding in instance_findings(body, "resource") if finding.fatal]
            if wrong:
                return 400, {"error": {"code": 400, "message": "; ".join(wrong)}}
            self._create(body)
            return 200, DONE
        if name not in self.instances:
            return 404, {"error": {"code": 404, "message": f"The resource '{name}' was not found"}}
        if relabel:
            self.instances[name]["labels"] = body["labels"]
            return 200, DONE
        if method == "DELETE":
            self.instances[name]["status"] = "STOPPING"
            threading.Thread(target=self._end, args=(name, False), daemon=True).start()
            return 200, DONE
        return 200, self.instances[name]

    def _create(self, body: dict[str, Any]) -> None:
        name, address = body["name"], self._network.next_address()
        instance = dict(body, status="PROVISIONING", labelFingerprint="0")
        instance["networkInterfaces"] = [{"networkIP": address, "accessConfigs": [{"natIP": address}]}]
        self.instances[name] = instance
        folder = self._folder / name
        folder.mkdir()

        def boot() -> None:
            self._machines[name] = Machine(self._network, address, folder, self._keys(), self._environment)
            instance["status"] = "RUNNING"

        threading.Thread(target=boot, daemon=True).start()

    def _keys(self) -> str:
        """The project's ssh-keys, each `user:key`, as authorized_keys has them."""
        values = [item["value"] for item in self._metadata["items"] if item["key"] == "ssh-keys"]
        return "".join(f"{line.partition(':')[2]}\n" for value in values for line in value.splitlines())

    def _routes(self, body: dict[str, Any]) -> dict[str, Callable[[], Answer]]:
        def account(email: str) -> Answer:
            found = self._accounts.get(email)
            return (200, found) if found else (404, {"error": {"code": 404, "message": "no such account"}})

        def create_account() -> Answer:
            if "accountId" not in body:
                return account(f"ray-autoscaler-sa-v1@{PROJECT}.iam.gserviceaccount.com")
            email = f"{body['accountId']}@{PROJECT}.iam.gserviceaccount.com"
            self._accounts[email] = {"email": email, "projectId": PROJECT}
            return account(email)

        def policy() -> Answer:
            self._policy = body.get("policy", self._policy)
            return 200, self._policy

        def metadata() -> Answer:
            self._metadata["items"] = body.get("items", [])
            return 200, DONE

        subnet = {"name": "default", "selfLink": f"projects/{PROJECT}/regions/box/subnetworks/default"}
        return {
            r"/operations/operation-refused$": lambda: (200, {**DONE, "error": {"errors": [self.refusal]}}),
            r"/operations/": lambda: (200, DONE),
            r"setCommonInstanceMetadata$": metadata,
            r"/subnetworks$": lambda: (200, {"items": [subnet]}),
            r"IamPolicy$": policy,
            r"/serviceAccounts": create_account,
            r"/compute/v1/projects/[^/]+$": lambda: (200, {"name": PROJECT, "commonInstanceMetadata": self._metadata}),
            r"/v1/projects/[^/]+$": lambda: (200, {"projectId": PROJECT, "lifecycleState": "ACTIVE"}),
        }

    # ---- the metadata server ----

    def _answer_metadata(self, method: str, path: str, query: dict[str, list[str]], body: dict[str, Any], client: str) -> Answer:
        """Answers for the machine that asks, as the real one does."""
        asks = next((i for i in list(self.instances.values()) if i["networkInterfaces"][0]["networkIP"] == client), {})
        key = path.partition("/computeMetadata/v1/")[2].rstrip("/").replace(ACCOUNT, "default")
        values: dict[str, Any] = {
            "instance/service-accounts/default": {"email": ACCOUNT, "scopes": ["https://www.googleapis.com/auth/cloud-platform"]},
            "instance/preempted": "TRUE" if asks.get("preempted") else "FALSE",
            "instance/maintenance-event": "NONE",
            "instance/service-accounts/default/email": ACCOUNT,
            "instance/service-accounts/default/token": {"access_token": "box", "expires_in": 3600, "token_type": "Bearer"},
        }
        return (200, values[key]) if key in values else (404, {})


def _matches(instance: dict[str, Any], expression: str) -> bool:
    """Of the filter language, what Ray's provider uses."""
    labels = dict(re.findall(r"labels\.([\w-]+) = ([\w.-]+)", expression))
    statuses = re.findall(r"status = (\w+)", expression)
    return all(instance["labels"].get(key) == value for key, value in labels.items()) and instance["status"] in statuses


def _serve(address: str, answer: Callable[[str, str, dict[str, list[str]], dict[str, Any], str], Answer]) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def _respond(self) -> None:
            url, length = urlparse(self.path), int(self.headers.get("Content-Length", 0))
            body = json.loads(self.rfile.read(length)) if length else {}
            status, result = answer(self.command, url.path, parse_qs(url.query), body, self.client_address[0])
            payload = (result if isinstance(result, str) else json.dumps(result)).encode()
            with suppress(OSError):  # the machine that asked may be gone
                self.send_response(status)
                self.send_header("Content-Type", "text/plain" if isinstance(result, str) else "application/json")
                self.send_header("Metadata-Flavor", "Google")
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

        do_GET = do_POST = do_DELETE = _respond  # noqa: N815  names that http.server looks for

        def log_message(self, *args: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer((address, 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
