"""A channel in memory: it delivers in a random order, given by a seed, and can lose a peer."""

from __future__ import annotations

import random
import threading
from collections import deque

import torch

from psctl.collectives.channel import ReceivingChannel


class Hub:
    """All channels of one world.

    Args:
        seed: of the order in which transfers complete; None: they complete at once.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.lock = threading.Lock()
        self.waiting: dict[Posted, threading.Condition] = {}
        """Transfers that threads wait for; each thread is woken by itself, for there are many."""
        self.rng = random.Random(seed)
        self.delays = seed is not None
        self.sent: dict[tuple[int, int, int], deque[Posted]] = {}
        self.asked: dict[tuple[int, int, int], deque[Posted]] = {}
        self.ready: list[tuple[Posted, Posted]] = []
        self.dead: str = ""
        self.trace: list[tuple[int, int, int, int]] = []  # source, destination, tag, bytes, in the order of posting

    def meet(self, key: tuple[int, int, int]) -> None:
        """Match sends with receives; the caller holds the lock."""
        sent, asked = self.sent.setdefault(key, deque()), self.asked.setdefault(key, deque())
        while sent and asked:
            self.ready.append((sent.popleft(), asked.popleft()))
        self.deliver()

    def deliver(self) -> None:
        """Deliver all pieces, or with a seed a random part of them; the rest when a thread waits."""
        while self.ready and not (self.delays and self.rng.random() < 0.4):
            source, target = self.ready.pop(self.rng.randrange(len(self.ready)) if self.delays else 0)
            target.piece.copy_(
                source.piece
            )  # read as late as possible, so that a piece that is overwritten too early is detected
            for each in (source, target):
                each.done = True
                if each in self.waiting:
                    self.waiting[each].notify()
        self.share()

    def share(self) -> None:
        """Have a thread that waits deliver what is left."""
        if self.ready:
            for condition in self.waiting.values():
                condition.notify()
                break

    def end(self, why: str) -> None:
        with self.lock:
            self.dead = self.dead or why
            for condition in self.waiting.values():
                condition.notify()


class Posted:
    def __init__(self, hub: Hub, piece: torch.Tensor) -> None:
        self.hub, self.piece, self.done = hub, piece, False

    def wait(self) -> None:
        with self.hub.lock:
            while not self.done:
                if self.hub.dead:
                    raise RuntimeError(self.hub.dead)
                if self.hub.ready:
                    self.hub.deliver()
                else:
                    self.hub.waiting[self] = threading.Condition(self.hub.lock)
                    assert self.hub.waiting[self].wait(20), "nobody sends"
                    del self.hub.waiting[self]
            self.hub.share()


class MemoryChannel(ReceivingChannel):
    """One rank's end.

    Args:
        hub: the world's.
        me: this node.
        ahead: as `Channel.posts_ahead`.
        fails_at: the number of posts after which one fails here; the other ranks fail when this rank aborts.
    """

    def __init__(self, hub: Hub, me: int, ahead: bool = True, fails_at: int = -1) -> None:
        self.hub, self.me, self.posts_ahead, self.fails_at = hub, me, ahead, fails_at
        self.aborted = False

    def post(self, sends, receives):
        with self.hub.lock:
            if self.fails_at == 0 or self.hub.dead:
                raise RuntimeError(self.hub.dead or "connection reset")
            self.fails_at -= 1
            found = []
            for each in sends:
                found.append(Posted(self.hub, each.piece))
                key = (self.me, each.peer, each.tag)
                self.hub.trace.append((*key, each.piece.numel() * each.piece.element_size()))
                self.hub.sent.setdefault(key, deque()).append(found[-1])
                self.hub.meet(key)
            for each in receives:
                found.append(Posted(self.hub, each.piece))
                key = (each.peer, self.me, each.tag)
                self.hub.asked.setdefault(key, deque()).append(found[-1])
                self.hub.meet(key)
            return found

    def abort(self, reason: str) -> None:
        self.aborted = True
        self.hub.end("aborted")
