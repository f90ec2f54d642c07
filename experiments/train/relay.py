"""A small program between a process of a run and JAX's coordinator that detects when another process ends.

XLA ends a process by SIGABRT when its connection to the coordinator breaks, before Python learns of it. Each process
therefore starts this program (without JAX, which would need seconds) and connects to the coordinator through it. These
relays are joined in a star around that of process 0, at the run's address. One whose process has ended, or has sent
nothing for `patience` seconds, leaves the star; each of the others then tells its process so, and keeps that process's
connection open while it ends by itself. A thread would wait for Python's lock; this waits for nobody.

    python relay.py NUMBER HOST PORT SERVICE PATIENCE

NUMBER is that of the process, HOST:PORT the run's address, SERVICE the local port of JAX's coordinator in process 0.
Standard output: "port N", where this process's client finds the coordinator, or "error WHY"; then "gone K" when process
K has ended, if ever. Standard input: "bye" before a process ends as all do; its end without that is the process's.
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

_HELLO = b"fp8jax "  # what a relay says first at the run's address; all else is JAX's client of another process
# Seconds between two attempts to reach process 0, and until a connection that broke by itself is closed on both sides.
_RETRY_SECONDS, _LATE = 0.2, 5.0


class Relay:
    """The relay of one process. `gone` is set when another process has ended."""

    def __init__(self, number: int, address: tuple[str, int], service: int, patience: float) -> None:
        self._number, self._address, self._patience = number, address, patience
        self._coordinator = address if number else ("localhost", service)
        self._gone, self._lock = threading.Event(), threading.Lock()
        self._others: dict[int, socket.socket] = {}  # the relays that this one is joined to
        self._held: list[socket.socket] = []
        self._heard: float | None = None

    def start(self) -> int:
        """Opens the ports; returns the one for this process's client."""
        if self._number:
            _thread(self._join)
        else:
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            port = self._address[1]
            _thread(_accept, socket.create_server(("", port), family=family, dualstack_ipv6=both), self._welcome)
        own = socket.create_server(("localhost", 0))
        _thread(_accept, own, lambda client: self._forward(client, own=True))
        return int(own.getsockname()[1])

    def leave(self) -> None:
        """Says that this process ends as all do."""
        self._report(b"bye\n")

    def silent(self) -> bool:
        """Whether this process's client, which sends a heartbeat more often, has sent nothing for `patience`."""
        return self._heard is not None and time.monotonic() - self._heard > self._patience

    def _welcome(self, one: socket.socket) -> None:
        hello = one.recv(len(_HELLO), socket.MSG_PEEK)
        if not hello or not _HELLO.startswith(hello):
            self._forward(one)
            return
        lines = one.makefile("rb")
        self._listen(int(lines.readline().split()[1]), one, lines)

    def _join(self) -> None:
        one = _reach(self._address)
        one.sendall(_HELLO + b"%d\n" % self._number)
        self._listen(0, one, one.makefile("rb"))

    def _listen(self, number: int, one: socket.socket, lines: BinaryIO) -> None:
        """Hears what the relay of another process says, until one is gone or it ends."""
        one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # also where a host is gone without a word
        for name, value in (
            ("TCP_KEEPIDLE", max(1, int(self._patience / 4))),
            ("TCP_KEEPINTVL", max(1, int(self._patience / 4))),
            ("TCP_USER_TIMEOUT", int(1000 * self._patience)),
        ):
            if hasattr(socket, name):  # Linux
                one.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        with self._lock:
            self._others[number] = one
        ended: int | None = number
        with contextlib.suppress(OSError):
            for line in lines:
                ended = None if line == b"bye\n" else int(line.split()[1])
                if ended is not None:
                    break
        if ended is None or self._gone.is_set():
            return
        self._gone.set()
        _say(f"gone {ended}")
        if not self._number:
            self._report(b"gone %d\n" % ended)

    def _report(self, line: bytes) -> None:
        with self._lock:
            for one in self._others.values():
                with contextlib.suppress(OSError):
                    one.sendall(line)

    def _forward(self, client: socket.socket, own: bool = False) -> None:
        """Bytes between a client of JAX and its coordinator, both ways, until one ends."""
        coordinator = _reach(self._coordinator)
        _thread(self._upwards, client, coordinator, own)
        with contextlib.suppress(OSError):
            while chunk := coordinator.recv(1 << 16):
                client.sendall(chunk)
        if own and self._gone.wait(_LATE):
            self._held += [client, coordinator]  # a client that sees its coordinator gone ends the process
        else:
            client.close()
            coordinator.close()

    def _upwards(self, client: socket.socket, coordinator: socket.socket, own: bool) -> None:
        with contextlib.suppress(OSError):
            while chunk := client.recv(1 << 16):
                if own:
                    self._heard = time.monotonic()
                coordinator.sendall(chunk)
            coordinator.shutdown(socket.SHUT_RDWR)


def _accept(server: socket.socket, handle: Callable[[socket.socket], None]) -> None:
    while True:
        _thread(handle, server.accept()[0])


def _reach(address: tuple[str, int]) -> socket.socket:
    while True:
        with contextlib.suppress(OSError):
            one = socket.create_connection(address)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return one
        time.sleep(_RETRY_SECONDS)


def _thread(target: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=target, args=args, daemon=True).start()


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # its process has ended
        print(text, flush=True)


def main(number: str, host: str, port: str, service: str, patience: str) -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # which are the process's own affair
        signal.signal(signum, signal.SIG_IGN)
    parent, left = os.getppid(), False
    relay = Relay(int(number), (host, int(port)), int(service), float(patience))
    try:
        _say(f"port {relay.start()}")
    except OSError as error:
        _say(f"error {error.strerror or error}")
        return
    while os.getppid() == parent and (left or not relay.silent()):
        if select.select([0], [], [], 1)[0]:
            if not os.read(0, 64):
                break
            left = True
            relay.leave()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
