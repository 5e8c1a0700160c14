"""Gradients that need not travel whole: sparse ones, and those of a fully connected layer as two thin factors.

The gradient of an M x N layer over a batch of K is a sum of K outer products: K (M + N) numbers instead of M N, when
every worker rebuilds and sums them itself (sufficient factor broadcasting; Xing and others 2015). Poseidon (Zhang and
others 2017) compares, per layer, what the busiest node sends and receives, in numbers:

                        server             worker              both on one node
    parameter server    2 P1 M N / P2      2 M N               2 M N (P1 + P2 - 2) / P2
    factors             -                  2 K (P1-1)(M + N)   -
    factors to servers  P1 M N + P1 K(M+N) K (M + N) + M N     (P1-1)(M N + K M + K N)

A sparse gradient of density d with v bytes a value and i an index costs a worker 2 d (i + v) / v of N through a
parameter server whose ports are not the limit; a dense ring 2 (p-1)/p of N.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Layer(msgspec.Struct, frozen=True):
    """A layer's gradient: `rows` x `columns` numbers. Only a fully connected one has factors."""

    rows: int
    columns: int
    connected: bool = True


def server_numbers(layer: Layer, workers: int, servers: int) -> float:
    """Return the numbers in and out of a node that is both worker and server."""
    return 2 * layer.rows * layer.columns * (workers + servers - 2) / servers


def factor_numbers(layer: Layer, batch: int, workers: int) -> int:
    """Return the numbers in and out of a worker when factors are sent to all others."""
    return 2 * batch * (workers - 1) * (layer.rows + layer.columns)


def factors_to_servers(layer: Layer, batch: int, workers: int) -> int:
    """Return the numbers in and out of a node that is both, when factors go up and the whole matrix comes back."""
    return (workers - 1) * (layer.rows * layer.columns + batch * (layer.rows + layer.columns))


def fastest_exchange(
    layer: Layer, batch: int, workers: int, servers: int, seconds_a_number: float = 1.0, seconds_an_add: float = 0.0
) -> Literal["factors", "servers"]:
    """Return the faster exchange of a layer's gradient.

    Args:
        layer: its shape.
        batch: examples a worker.
        workers: P1.
        servers: P2, on the same machines.
        seconds_a_number: time of one number on the wire.
        seconds_an_add: time of one multiplication and addition. Factors leave (P1-1) K M N of them to every worker;
            without this (Poseidon's rule) they are chosen too often.
    """
    if not layer.connected:
        return "servers"
    whole = server_numbers(layer, workers, servers) * seconds_a_number
    rebuilt = (workers - 1) * batch * layer.rows * layer.columns * seconds_an_add
    return "factors" if factor_numbers(layer, batch, workers) * seconds_a_number + rebuilt <= whole else "servers"


def sparse_share(density: float, value: int = 4, index: int = 8, indices_known: bool = False) -> float:
    """Return what a worker sends and gets of a sparse gradient through servers, as a part of the dense bytes.

    `indices_known`: the servers remember the keys, so that values alone travel.
    """
    return 2 * density * ((0 if indices_known else index) + value) / value


def sparse_wins(density: float, ranks: int, value: int = 4, index: int = 8) -> bool:
    """Return whether servers that carry only what is there move fewer bytes than a dense ring:
    d (i + v) / v < (p-1)/p."""
    return sparse_share(density, value, index) < 2 * (ranks - 1) / ranks
