"""Relays of a run's processes, without JAX: the coordinator is a server that replies in capitals."""

import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from experiments.train import relay


def answer(one):
    with one:
        while said := one.recv(100):
            one.sendall(said.upper())


@pytest.fixture
def star():
    """Starts a run's relays with a patience.

    Returns the process of each, and a client that has got a reply through it.
    """
    server, processes = socket.create_server(("127.0.0.1", 0)), []
    relay._thread(relay._accept, server, answer)

    def start(*patience):
        with socket.create_server(("localhost", 0)) as free:
            port = free.getsockname()[1]
        for number, seconds in enumerate(patience):
            command = [sys.executable, "-I", "-S", relay.__file__, number, "localhost", port, server.getsockname()[1]]
            process = subprocess.Popen([*map(str, command), str(seconds)], stdin=-1, stdout=-1, text=True, bufsize=1)
            processes.append(process)
            word, local_port = process.stdout.readline().split()
            assert word == "port"
            client = socket.create_connection(("localhost", int(local_port)), timeout=60)
            assert reply(client, b"from %d" % number) == b"FROM %d" % number
            yield process, client
        time.sleep(0.5)  # until all have joined

    def kill():
        for process in processes:
            process.kill()

    # Reading from a silent relay then ends, and the test fails.
    watchdog = threading.Timer(60, kill)
    watchdog.start()
    yield lambda *patience: zip(*start(*patience), strict=True)
    watchdog.cancel()
    kill()


def reply(client, text):
    client.sendall(text)
    return client.recv(100)


def ends(process):
    """Returns the remaining output of a relay whose process ends without "bye"."""
    process.stdin.close()
    return process.stdout.read()


@pytest.mark.parametrize("which", [0, 2])
def test_all_others_are_told_which_process_has_ended_and_keep_their_connections(star, which):
    relays, clients = star(60, 60, 60)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        relays[1].send_signal(signum)
    assert reply(clients[1], b"still here") == b"STILL HERE"
    assert ends(relays[which]) == ""
    for number in {0, 1, 2} - {which}:
        assert relays[number].stdout.readline() == f"gone {which}\n"
        clients[number].settimeout(0.3)
        with pytest.raises(TimeoutError):
            clients[number].recv(1)


def test_who_says_that_it_ends_is_not_gone(star):
    relays, _ = star(60, 60, 60)
    relays[1].stdin.write("bye\n")
    assert ends(relays[1]) == ""
    assert ends(relays[2]) == ""
    assert relays[0].stdout.readline() == "gone 2\n"
    relays, _ = star(60, 60)
    relays[0].stdin.write("bye\n")
    assert [ends(one) for one in relays] == ["", ""]


def test_a_process_that_was_heard_and_is_silent_is_gone(star):
    relays, _ = star(60, 1)
    assert relays[0].stdout.readline() == "gone 1\n"
    assert relays[1].wait(10) == 0
    assert not relay.Relay(1, ("localhost", 1), 1, 0).is_silent(), "no heartbeat was expected yet"


def test_a_port_that_is_taken_is_an_error():
    with socket.create_server(("", 0)) as bound_socket:
        command = [sys.executable, relay.__file__, "0", "localhost", str(bound_socket.getsockname()[1]), "1", "1"]
        completed = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert completed.stdout.startswith("error Address already in use")
