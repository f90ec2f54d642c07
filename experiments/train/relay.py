"""A small program between a process of a run and JAX's coordinator that detects when another process ends.

XLA ends a process by SIGABRT when its connection to the coordinator breaks, before Python can react. Each process
therefore starts this program (without JAX, whose import takes seconds) and connects to the coordinator through it. The
relays are connected in a star around that of process 0, at the run's address. A relay leaves the star if its process
has ended or has sent nothing for `patience` seconds. Each of the others then reports this to its process, and keeps
that process's connection open until it ends. A separate program does not depend on Python's global lock.

    python relay.py NUMBER HOST PORT SERVICE PATIENCE

NUMBER is the number of the process, HOST:PORT the run's address, SERVICE the local port of JAX's coordinator in process
0. Standard output: "port N", the port for this process's client, or "error WHY"; then "gone K" when process K has
ended. Standard input: "bye" before a regular end of the process. If it closes without "bye", the process has died.
"""

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, BinaryIO

_HELLO = b"fp8jax "  # first bytes of a relay at the run's address; other connections are JAX clients
# Seconds between attempts to reach process 0, and until both sides of a broken connection are closed.
_RETRY_SECONDS, _CLOSE_SECONDS = 0.2, 5.0


class Relay:
    """The relay of one process. `gone` is set when another process has ended."""

    def __init__(self, number: int, address: tuple[str, int], service: int, patience: float) -> None:
        self._number, self._address, self._patience = number, address, patience
        self._coordinator = address if number else ("localhost", service)
        self._ended, self._lock = threading.Event(), threading.Lock()
        self._peers: dict[int, socket.socket] = {}  # connected relays, by process
        self._kept_open: list[socket.socket] = []
        self._last_heartbeat: float | None = None

    def start(self) -> int:
        """Opens the ports. Returns the port for this process's client."""
        if self._number:
            _thread(self._join)
        else:
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            port = self._address[1]
            _thread(_accept, socket.create_server(("", port), family=family, dualstack_ipv6=both), self._welcome)
        server = socket.create_server(("localhost", 0))
        _thread(_accept, server, lambda client: self._forward(client, is_own_client=True))
        return int(server.getsockname()[1])

    def leave(self) -> None:
        """Reports a regular end of this process."""
        self._report(b"bye\n")

    def is_silent(self) -> bool:
        """Returns whether this process's client has sent no heartbeat for `patience` seconds."""
        return self._last_heartbeat is not None and time.monotonic() - self._last_heartbeat > self._patience

    def _welcome(self, connection: socket.socket) -> None:
        hello = connection.recv(len(_HELLO), socket.MSG_PEEK)
        if not hello or not _HELLO.startswith(hello):
            self._forward(connection)
            return
        lines = connection.makefile("rb")
        self._listen(int(lines.readline().split()[1]), connection, lines)

    def _join(self) -> None:
        connection = _reach(self._address)
        connection.sendall(_HELLO + b"%d\n" % self._number)
        self._listen(0, connection, connection.makefile("rb"))

    def _listen(self, number: int, connection: socket.socket, lines: BinaryIO) -> None:
        """Reads messages of another relay, until a process is gone or the relay ends."""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # detects hosts that vanish
        for name, value in (
            ("TCP_KEEPIDLE", max(1, int(self._patience / 4))),
            ("TCP_KEEPINTVL", max(1, int(self._patience / 4))),
            ("TCP_USER_TIMEOUT", int(1000 * self._patience)),
        ):
            if hasattr(socket, name):  # Linux
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        with self._lock:
            self._peers[number] = connection
        ended: int | None = number
        with contextlib.suppress(OSError):
            for line in lines:
                ended = None if line == b"bye\n" else int(line.split()[1])
                if ended is not None:
                    break
        if ended is None or self._ended.is_set():
            return
        self._ended.set()
        _print(f"gone {ended}")
        if not self._number:
            self._report(b"gone %d\n" % ended)

    def _report(self, line: bytes) -> None:
        with self._lock:
            for connection in self._peers.values():
                with contextlib.suppress(OSError):
                    connection.sendall(line)

    def _forward(self, client: socket.socket, is_own_client: bool = False) -> None:
        """Forwards bytes between a JAX client and the coordinator, in both directions, until one ends."""
        coordinator = _reach(self._coordinator)
        _thread(self._upwards, client, coordinator, is_own_client)
        with contextlib.suppress(OSError):
            while chunk := coordinator.recv(1 << 16):
                client.sendall(chunk)
        if is_own_client and self._ended.wait(_CLOSE_SECONDS):
            self._kept_open += [client, coordinator]  # a client that loses its coordinator ends the process
        else:
            client.close()
            coordinator.close()

    def _upwards(self, client: socket.socket, coordinator: socket.socket, is_own_client: bool) -> None:
        with contextlib.suppress(OSError):
            while chunk := client.recv(1 << 16):
                if is_own_client:
                    self._last_heartbeat = time.monotonic()
                coordinator.sendall(chunk)
            coordinator.shutdown(socket.SHUT_RDWR)


def _accept(server: socket.socket, handle: Callable[[socket.socket], None]) -> None:
    while True:
        _thread(handle, server.accept()[0])


def _reach(address: tuple[str, int]) -> socket.socket:
    while True:
        with contextlib.suppress(OSError):
            connection = socket.create_connection(address)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        time.sleep(_RETRY_SECONDS)


def _thread(target: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=target, args=args, daemon=True).start()


def _print(text: str) -> None:
    with contextlib.suppress(OSError):  # its process has ended
        print(text, flush=True)


def main(number: str, host: str, port: str, service: str, patience: str) -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the process itself handles them
        signal.signal(signum, signal.SIG_IGN)
    parent, has_left = os.getppid(), False
    relay = Relay(int(number), (host, int(port)), int(service), float(patience))
    try:
        _print(f"port {relay.start()}")
    except OSError as error:
        _print(f"error {error.strerror or error}")
        return
    while os.getppid() == parent and (has_left or not relay.is_silent()):
        if select.select([0], [], [], 1)[0]:
            if not os.read(0, 64):
                break
            has_left = True
            relay.leave()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
