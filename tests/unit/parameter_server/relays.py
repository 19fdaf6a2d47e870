"""What lies between clients and servers and may fail."""

from __future__ import annotations

import dataclasses
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from raytrain_app.strategies.parameter_server.client import Source
from raytrain_app.strategies.parameter_server.table import Table
from raytrain_app.strategies.parameter_server.wire import Address
from tests.unit.parameter_server.making import Farm


@contextmanager
def relays_of(made: Farm) -> Iterator[tuple[Source, list[Relay]]]:
    """Relays to the servers of a farm, and where clients find them."""
    relays = [Relay(serving.address) for serving in made.servings]

    def where(known: Table | None) -> Table | None:
        table = made.where(None)
        assert table is not None
        places = tuple(
            dataclasses.replace(place, address=dataclasses.replace(place.address, port=relay.port, unix=""))
            for place, relay in zip(table.places, relays, strict=True)
        )
        new = Table(table.number, places)
        return new if new != known else None

    yield where, relays
    for relay in relays:
        relay.listening.close()


class Relay:
    """Passes bytes on between a client and a server; cuts the connection instead of passing on what `cuts` names."""

    def __init__(self, address: Address) -> None:
        self.target = address.host, address.port
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.port = self.listening.getsockname()[1]
        self.cuts = ""
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self.listening.accept()
            except OSError:
                return
            server = socket.create_connection(self.target)
            for source, sink, what in ((client, server, "request"), (server, client, "reply")):
                threading.Thread(target=self._pass_on, args=(source, sink, what), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, what: str) -> None:
        try:
            while data := source.recv(1 << 16):
                if self.cuts == what:
                    self.cuts = ""
                    break
                sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
