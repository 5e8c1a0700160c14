"""Throughput of a connection between two processes over loopback TCP, sealed and open, beside a plain socket.

    python bench/transport.py [--congestion auto|reno|cubic|bbr] [--rounds 5] [--size 524288]

Bytes go from this process into preallocated buffers of another one, in payloads of `--size`; every figure is the
median of the rounds, by turns; processor seconds are of both processes. The round trip is of a message of a few bytes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from psctl.errors import ConnectionFailed
from psctl.transport import tcp_stream
from psctl.transport.connect import Acceptor, dial
from psctl.transport.credentials import Credentials
from psctl.transport.peer_connection import PeerConnection
from psctl.transport.protocol.authority import issue, make_authority
from psctl.transport.protocol.preauth import new_secret
from psctl.types import Address, Member

SERVER, WORKER = Member("server", 0), Member("worker", 0)
TOTAL = 1 << 30


class Part(msgspec.Struct, frozen=True, tag=True):
    """A payload."""

    offset: int


class Echo(msgspec.Struct, frozen=True, tag=True):
    """To be sent back."""

    last: bool


KINDS = Part | Echo


class Sink:
    """The receiving end: payloads land in one buffer; an Echo is answered."""

    def __init__(self) -> None:
        self.landing = memoryview(bytearray(64 << 20))
        self.over = threading.Event()

    def on_connected(self, peer: PeerConnection) -> None:
        pass

    def receive_buffer_for(self, peer: PeerConnection, message: Any, size: int) -> memoryview | None:
        return self.landing[message.offset : message.offset + size]

    def on_message(self, peer: PeerConnection, message: Any, payload: memoryview | None) -> None:
        if isinstance(message, Echo):
            peer.send(message)

    def on_connection_lost(self, peer: PeerConnection, error: ConnectionFailed) -> None:
        self.over.set()


class Source:
    """The sending end: counts what comes back."""

    def __init__(self) -> None:
        self.back = threading.Semaphore(0)

    def on_connected(self, peer: PeerConnection) -> None:
        pass

    def receive_buffer_for(self, peer: PeerConnection, message: Any, size: int) -> memoryview | None:
        return None

    def on_message(self, peer: PeerConnection, message: Any, payload: memoryview | None) -> None:
        self.back.release()

    def on_connection_lost(self, peer: PeerConnection, error: ConnectionFailed) -> None:
        self.back.release()


def serve_peer(pipe: Connection, credentials: Credentials, congestion: str, sealed: bool) -> None:
    sink = Sink()
    acceptor = Acceptor("127.0.0.1", None, credentials, KINDS, sink, congestion=congestion, sealed=sealed)
    pipe.send(acceptor.address)
    sink.over.wait()
    acceptor.close()


def serve_plain(pipe: Connection, congestion: str) -> None:
    listener = tcp_stream.listen("127.0.0.1", None, congestion)
    pipe.send(listener.address)
    stream = listener.accept()
    landing = memoryview(bytearray(64 << 20))
    left = TOTAL
    while left and (count := stream.receive_into(landing[: min(left, 1 << 20)])):
        left -= count
    stream.send(memoryview(b"."))
    stream.close()
    listener.close()


def run(target: Any, *args: Any) -> tuple[Any, Address]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=target, args=(theirs, *args), daemon=True)
    process.start()
    address: Address = ours.recv()
    return process, address


def plain(congestion: str, size: int) -> float:
    """Return bytes/s."""
    process, address = run(serve_plain, congestion)
    stream = tcp_stream.connect(address, 5, congestion)
    data = memoryview(bytearray(size))
    begin = time.perf_counter()
    for _ in range(TOTAL // size):
        stream.send(data)
    stream.receive_into(memoryview(bytearray(1)))
    seconds = time.perf_counter() - begin
    stream.close()
    process.join()
    return TOTAL / seconds


def processor_seconds(process: int) -> float:
    """Return the processor seconds of this process and another one."""
    with open(f"/proc/{process}/stat") as file:
        numbers = file.read().rpartition(")")[2].split()
    return time.process_time() + (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")


def peers(
    credentials: dict[Member, Credentials], congestion: str, size: int, sealed: bool
) -> tuple[float, float, float, float]:
    """Return bytes/s, processor seconds a GB, messages of 4 KiB a second, seconds of a round trip."""
    process, address = run(serve_peer, credentials[SERVER], congestion, sealed)
    source = Source()
    peer = dial(address, credentials[WORKER], SERVER, KINDS, source, congestion=congestion, sealed=sealed)
    data = memoryview(bytearray(64 << 20))

    def pour(size: int, total: int) -> float:
        begin = time.perf_counter()
        for sent in range(0, total, size):
            offset = sent % len(data)
            peer.send(Part(offset), data[offset : offset + size])
        peer.send(Echo(last=True))
        source.back.acquire()
        return time.perf_counter() - begin

    pour(size, 64 << 20)
    before = processor_seconds(process.pid)
    rate = TOTAL / pour(size, TOTAL)
    used = (processor_seconds(process.pid) - before) / TOTAL * 1e9
    small = 20_000 / pour(4096, 20_000 * 4096)
    trips = []
    for _ in range(500):
        begin = time.perf_counter()
        peer.send(Echo(last=False))
        source.back.acquire()
        trips.append(time.perf_counter() - begin)
    peer.close("measured")
    peer.join()
    process.join()
    return rate, used, small, statistics.median(trips)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--congestion", default="reno")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", type=int, default=512 << 10)
    options = parser.parse_args()
    now = time.time()
    authority, preauth_secret = make_authority("bench-1", now), new_secret()
    credentials = {}
    for member in (SERVER, WORKER):
        pair = issue(authority, "bench-1", member, now)
        credentials[member] = Credentials(
            "bench-1", member, authority.certificate_pem, pair.certificate_pem, pair.key_pem, preauth_secret
        )
    rows = []
    for _ in range(options.rounds):
        both = [peers(credentials, options.congestion, options.size, sealed) for sealed in (True, False)]
        rows.append((plain(options.congestion, options.size), *both[0], *both[1]))
    names = ("bytes_per_second", "processor_seconds_per_gb", "4k_messages_per_second", "round_trip_seconds")
    columns = ["plain_bytes_per_second", *(f"{mode}_{name}" for mode in ("sealed", "open") for name in names)]
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    found = {"congestion": options.congestion, "size": options.size, **dict(zip(columns, medians, strict=True))}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
