"""A simulated worker: the shipped ClientMind, and the order of calls that runtime's client, served and session make.

Thin on purpose. What is not covered: threads inside one worker (each call runs to its end), torch's hooks (shards are
pushed last ones first, as backward would), the script itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from psctl.errors import ConnectionFailed
from psctl.job import messages as say
from psctl.store.client import ClientMind, Out
from psctl.store.messages import Begin, Norms, Pull, Push, PushPart, Step
from psctl.store.pieces import pieces
from psctl.store.shard import Terms
from psctl.words import Address, Member

from .kernel import Process, Sleep, Task, Until
from .model import Script, scale_at, taken, weight
from .network import End, Network
from .oracle import Oracle
from .scenario import Scenario

REDIAL = 0.05
"""Seconds between two attempts to reach a server."""


class Worker:
    """One worker process; the handler of its connection to the coordinator."""

    def __init__(self, process: Process, network: Network, scenario: Scenario, script: Script, oracle: Oracle,
                 coordinator: Address, early: dict[int, float]) -> None:  # fmt: skip
        self.process, self._network, self._scenario, self._script = process, network, scenario, script
        self._oracle, self._rank = oracle, process.member.rank
        self._welcome: say.Welcome | None = None
        self._decision: say.Decision | None = None
        self._go = self._closing = False
        self._coordinator: End | None = None
        self._compute = early[self._rank]
        self.mind: ClientMind | None = None
        self.links: list[Link] = []
        self.step = 0
        network.dial(process, coordinator, Member("coordinator", 0), self, self._unreachable)
        process.spawn(self._main())

    # ---- the coordinator's handler -----------------------------------------------------------------------------

    def joined(self, peer: End) -> None:
        self._coordinator = peer

    def place(self, peer: End, message: Any, size: int) -> memoryview | None:
        return None

    def received(self, peer: End, message: Any, payload: memoryview | None) -> None:
        match message:
            case say.Welcome():
                self._welcome = message
            case say.Decision():
                self._decision = message
            case say.Go():
                self._go = True
            case say.Leave():
                self.process.end(1)
            case _:
                pass

    def lost(self, peer: End, error: ConnectionFailed) -> None:
        if not self._closing:
            self.process.end(1)

    def _unreachable(self, why: str) -> None:
        self.process.end(1)

    def _tell(self, message: Any) -> None:
        assert self._coordinator is not None
        self._coordinator.send(message)

    # ---- the script ----------------------------------------------------------------------------------------------

    def _main(self) -> Task:
        yield Until("the coordinator", lambda: self._coordinator is not None)
        self._tell(say.Join(1))
        yield Until("Welcome", lambda: self._welcome is not None)
        self._tell(say.Prepare(self._script.layout, ()))
        yield Until("the decision", lambda: self._decision is not None)
        assert self._decision is not None
        yield from self._start(self._decision)
        self._tell(say.Ready())
        yield Until("go", lambda: self._go)
        for clock in range(self.step, self._scenario.spec.steps):
            yield from self._clock(clock)
            self.step = clock + 1
            self._tell(say.Beat(self.step, "compute"))
        yield from self._wait(self.step)  # as who reads the state_dict at the end
        self._oracle.finished(self._rank, self.step)
        self._tell(say.Finished(self.step))
        for link in self.links:
            link.close()
        assert self._coordinator is not None
        self._closing = True
        self._coordinator.close("the script ended")
        yield Sleep(4 * self._scenario.pace)
        self.process.end(0)

    def _start(self, decision: say.Decision) -> Task:
        base = decision.resume.step if decision.resume else 0
        world = self._welcome.world if self._welcome else 0
        self.step = base
        terms = Terms(decision.layout, world, decision.update, base, decision.staleness)
        self.mind = ClientMind(terms, decision.shards, decision.assignment.owners, self._rank)
        self._held = pieces(decision.layout, decision.shards)
        self._oracle.shards = decision.shards
        self._local = self._script.initial.clone()
        self._optimizer, self._parameters = self._script.optimizer(self._local)
        self.links = [Link(self, at.rank, at.address) for at in decision.assignment.servers]
        yield Until("servers", lambda: all(link.up for link in self.links), self._away)
        if self._rank == 0:
            self._send(self.mind.begin({self._scenario.spec.dtype: self._script.initial}))
        self._pull(base)
        yield from self._wait(base)

    def _clock(self, clock: int) -> Task:
        mind, spec = self._mind, self._scenario.spec
        yield Sleep(self._compute * (0.5 + self._network.world.random.random()))
        yield from self._wait(clock)
        self._oracle.begins(self._rank, clock)
        epoch, mine, together = taken(spec, clock, self._rank)
        values = self._local if self._scenario.update == "worker" else mind.landing[spec.dtype]
        gradient = self._script.gradient(values, clock, self._rank, mine, epoch)
        self._spoil(gradient, clock)
        yield Until(f"room for clock {clock}", lambda: not mind.unacknowledged(clock - 2), self._away)
        mind.sending(clock)[spec.dtype].copy_(gradient)
        self._oracle.computed(self._rank, clock, gradient, weight(spec, len(mine), together))
        if self._scenario.early:
            self._pull(clock + 1)
        for shard in reversed(range(len(mind.shards))):
            self._send(mind.push(clock, shard, self._present(clock, shard), weight(spec, len(mine), together)))
            if self._network.world.random.random() < 0.3:
                yield Sleep(self._compute * 0.1)
        if self._scenario.update == "server":
            if self._scenario.norms:
                yield from self._norms(clock)
            order = Step(clock, self._script.numbers(clock), scale_at(spec, clock), False)
            self._send([Out(server, order) for server in sorted(set(mind.owners))])
        if not self._scenario.early:
            self._pull(clock + 1)
        self._oracle.consumed(self._rank, clock)
        if self._scenario.update == "worker":
            yield from self._apply(clock)

    def _apply(self, clock: int) -> Task:
        """Step here, as the user's optimizer does with the joint gradient."""
        yield from self._wait(clock + 1)
        mean = self._mind.landing[self._scenario.spec.dtype].clone()
        scale = scale_at(self._scenario.spec, clock)
        if scale is not None:
            mean.mul_(scale)
        there = self._mind.presence(clock)
        for group, numbers in zip(self._optimizer.param_groups, self._script.numbers(clock), strict=True):
            group.update(numbers)
        for index, (start, size) in enumerate(zip(self._script.starts, self._script.sizes, strict=True)):
            self._parameters[index].grad = mean[start : start + size] if there[index] else None
        self._optimizer.step()

    def _norms(self, clock: int) -> Task:
        mind = self._mind
        self.asked_norms = clock
        self._send([Out(owner, Norms(clock)) for owner in sorted(set(mind.owners))])
        yield Until(f"norms of clock {clock}", lambda: not mind.without_norms(clock), self._away)
        assert mind.norms(clock) is not None

    asked_norms = -1

    def _wait(self, clock: int) -> Task:
        mind = self._mind
        missing = mind.missing(clock)
        mind.opened(missing, True)
        yield Until(f"values of clock {clock}", lambda: not mind.missing(clock, missing), self._away)
        mind.opened(missing, False)
        mind.show()
        self._oracle.read(self._rank, clock, mind, range(len(mind.shards)))

    def _pull(self, clock: int) -> None:
        self._mind.show()
        self._send(self._mind.pull(clock))

    def _present(self, clock: int, shard: int) -> list[bool]:
        place = {index: at for at, index in enumerate(self._trainable)}
        return [self._script.has(clock, self._rank, place[piece.parameter]) for piece in self._held[shard]]

    def _spoil(self, gradient: torch.Tensor, clock: int) -> None:
        """Where there is no gradient the buffer holds what was left there: it may never count."""
        for index, (start, size) in enumerate(zip(self._script.starts, self._script.sizes, strict=True)):
            if not self._script.has(clock, self._rank, index):
                gradient[start : start + size] = 777.0 + clock

    # ---- servers -------------------------------------------------------------------------------------------------

    @property
    def _mind(self) -> ClientMind:
        assert self.mind is not None
        return self.mind

    @property
    def _trainable(self) -> list[int]:
        return [index for index, info in enumerate(self._script.layout.parameters) if info.trainable]

    def _send(self, outs: Sequence[Out]) -> None:
        for out in outs:
            self.links[out.server].send(out.message, out.payload)

    def _away(self) -> str:
        away = [f"server/{link.server}" for link in self.links if not link.up]
        return f" (no connection to {', '.join(away)})" if away else ""


class Link:
    """A worker's connection to one server, made again when it breaks, with what was not acknowledged sent again."""

    def __init__(self, worker: Worker, server: int, address: Address) -> None:
        self.worker, self.server, self._address = worker, server, address
        self._end: End | None = None
        self._unsettled: list[tuple[Any, memoryview | None]] = []
        self._closed = False
        self._dial()

    @property
    def up(self) -> bool:
        return self._end is not None

    def send(self, message: Any, payload: memoryview | None) -> None:
        if isinstance(message, Begin | Push | PushPart | Step | Norms):
            self._unsettled.append((message, payload))
        if self._end is not None:
            self._end.send(message, payload)

    def close(self) -> None:
        self._closed = True
        if self._end is not None:
            self._end.close("the script ended")

    def _dial(self) -> None:
        worker = self.worker
        worker._network.dial(worker.process, self._address, Member("server", self.server), self, self._again)

    def _again(self, why: str) -> None:
        worker = self.worker
        worker.process.world.after(REDIAL, lambda: self._dial() if worker.process.alive and not self._closed else None)

    # ---- the handler ---------------------------------------------------------------------------------------------

    def joined(self, peer: End) -> None:
        self._end = peer
        mind = self.worker.mind
        if mind is None:
            return
        self._settle(mind)
        for message, payload in self._unsettled:
            peer.send(message, payload)
        asked: dict[int, list[int]] = {}
        for shard, (landing, owner) in enumerate(zip(mind._landings, mind.owners, strict=True)):
            if owner == self.server and landing.asked - mind.terms.staleness > landing.version:
                asked.setdefault(landing.asked, []).append(shard)
        for clock, shards in asked.items():
            peer.send(Pull(clock, shards))

    def _settle(self, mind: ClientMind) -> None:
        """Forget what is known to have come to its end."""
        ours = [shard for shard, owner in enumerate(mind.owners) if owner == self.server]
        done = min((mind._landings[shard].version for shard in ours), default=0)
        kept = []
        for message, payload in self._unsettled:
            match message:
                case Push() | PushPart():
                    keep = (message.clock, message.shard) in mind._outstanding
                case Begin():
                    keep = False  # start values are not sent again: their loss ends the job today
                case Norms():
                    keep = message.clock == self.worker.asked_norms and bool(mind.without_norms(message.clock))
                case _:
                    keep = not ours or message.clock >= done
            if keep:
                kept.append((message, payload))
        self._unsettled = kept

    def place(self, peer: End, message: Any, size: int) -> memoryview | None:
        return self.worker._mind.place(self.server, message, size)

    def received(self, peer: End, message: Any, payload: memoryview | None) -> None:
        size = 0 if payload is None else len(payload)
        if self.worker._mind.received(self.server, message, size):
            self._settle(self.worker._mind)

    def lost(self, peer: End, error: ConnectionFailed) -> None:
        if self._end is peer:
            self._end = None
            if not self._closed:
                self._again("lost")


Make = Callable[[Process], object]
