"""`psctl.init_reader()`: joins the job as a process of a group that reads its servers (`groups:`)."""

from __future__ import annotations

import atexit
import math
import os
import sys
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
from torch import nn

from psctl.client.server_connections import Dial
from psctl.errors import ConnectionFailed, PsctlError, UsageError
from psctl.job.job_permits import COORDINATION
from psctl.job.reader_messages import GroupReport
from psctl.job.training_messages import Decision
from psctl.orders import ReaderOrder
from psctl.permits import Permits
from psctl.process import bootstrap
from psctl.process.certificate_renewal import CertificateRenewer
from psctl.process.coordinator_connection import CoordinatorConnection
from psctl.process.leader_file import CoordinatorAddress
from psctl.process.process_orders import ProcessOrders, read_orders
from psctl.ps.permits import PARAMETERS, TABLES
from psctl.ps.pieces import pieces
from psctl.reader.live_rows import LiveRows, LiveStore
from psctl.reader.parameter_reader import ParameterReader, ReadValues
from psctl.reader.reader_session import ReaderSession
from psctl.sparse.model_rows import ModelRows
from psctl.sync.synchronizer import ExampleWeight
from psctl.train_state.rank_state import buffers_of
from psctl.transport.connect import dial
from psctl.transport.credentials import Credentials
from psctl.transport.peer_connection import AnyHandler, PeerConnection
from psctl.types import Member, ParameterInfo

DIAL_SECONDS = 20.0
"""Seconds to reach the coordinator or a server."""

_made: list[GroupReader] = []
"""This process's reader; a process has one."""


class GroupReader:
    """A process of a group that reads the job's servers while the workers train; `psctl.init_reader()` returns it.

        reader = psctl.init_reader()
        model = Net()
        for step in reader.steps(model):
            reader.report(accuracy=evaluate(model))

    It changes nothing on the servers, and no worker waits for it. Parameters are read from the servers where the
    optimizer steps there (`strategy: ps`, `update: server` in effect); rows of stores under every strategy.

    Args:
        order: its group and its rank within the group.
        session: with the coordinator.
        decision: the job's.
        parameters: reads parameters.
        rows: reads rows of stores.
    """

    def __init__(
        self, order: ReaderOrder, session: ReaderSession, decision: Decision, parameters: ParameterReader | None,
        rows: LiveRows,
    ) -> None:  # fmt: skip
        self._order, self._session, self._decision = order, session, decision
        self._parameters, self._rows = parameters, rows
        self._version = -1  # that was loaded last
        self._held = pieces(decision.layout, decision.shards) if parameters is not None else []
        self._known = {info.name: (index, info) for index, info in enumerate(decision.layout.parameters)}

    @property
    def group(self) -> str:
        """The name of the group."""
        return self._order.group

    @property
    def rank(self) -> int:
        """This process's rank within its group."""
        return self._order.rank

    @property
    def world(self) -> int:
        """The number of processes of the group."""
        return self._order.world

    @property
    def step(self) -> int:
        """The steps that are in the values that were loaded last."""
        return self._session.step

    @property
    def has_training_ended(self) -> bool:
        """Whether all workers have ended; the servers stay for a minute at most."""
        return self._session.has_training_ended

    def load(self, model: nn.Module) -> int:
        """Copy the newest parameters into a model, and rank 0's buffers; return how many steps are in them.

        Its embeddings of psctl.nn read their rows from the servers from now on. Frozen parameters are not on servers
        and stay as they are. Parameters and stores that the group's `keys` leave out stay as they are, too.

        Args:
            model: a model with parameters of the same names and shapes, or a part of it: on any device, of any type.

        Raises:
            UsageError: a parameter is not one of the job's, or servers hold none; the message names it.
        """
        found = self._load(model, self._wanted(model), -1, 1)
        return self.step if found is None else found

    def steps(self, model: nn.Module, every: int = 1) -> Iterator[int]:
        """Load the parameters again and again until training has ended, and yield the steps that are in them.

        Versions that come while the loop's body runs are passed over: it gets the newest. The last iteration has the
        final values, unless the one before had them already.

        Args:
            model: as `load` takes it.
            every: fewest versions between two iterations: steps; under asp, pushes.

        Raises:
            UsageError: as `load`.
        """
        if every < 1:
            raise UsageError(f"reader.steps(every={every})", "give 1 or more")
        wanted, after = self._wanted(model), -1
        if not wanted:
            raise UsageError("reader.steps: the model has no parameter that this group reads", "use reader.store(name)")
        while (step := self._load(model, wanted, after, every)) is not None:
            yield step
            after = self._version

    def store(self, name: str = "default") -> LiveStore:
        """Return a store of the job, to read rows from; it is awaited at the first read.

        Raises:
            UsageError: the group's `keys` leave it out.
        """
        if not _matches(name, self._order.stores):
            raise UsageError(
                f"store {name!r} is not among the keys of group {self.group}", f'add "store/{name}" to its keys'
            )
        return LiveStore(self._rows, name)

    def report(self, **numbers: object) -> None:
        """Report numbers for the values that were loaded last: `reader.report(accuracy=0.93)`.

        They are events of the job (`group`) and lines of its output; of one that is not finite a line says so.

        Raises:
            UsageError: a value is no number.
        """
        metrics = {name: _number(name, value) for name, value in numbers.items()}
        finite = {name: each for name, each in metrics.items() if math.isfinite(each)}
        for name in metrics.keys() - finite.keys():
            print(
                f"psctl: {name} is {metrics[name]} at step {self.step} and is not reported", file=sys.stderr, flush=True
            )
        self._session.send(GroupReport(self.step, finite))

    def finish(self) -> None:
        """Leave the job; called when the script ends."""
        if self._parameters is not None:
            self._parameters.close("the script has ended")
        self._rows.close("the script has ended")
        self._session.close()

    # ---- loading -----------------------------------------------------------------------------------------------------

    def _load(
        self, model: nn.Module, parameters: Mapping[torch.Tensor, tuple[int, ParameterInfo]], after: int, every: int
    ) -> int | None:
        """Load a version that is newer than `after` by `every`; return its steps, None where there is none."""
        self._open_rows(model)
        if not parameters:
            return None
        reader = self._parameters
        if reader is None:
            plan = f"strategy: {self._decision.strategy}, update: {self._decision.update}"
            raise UsageError(
                f"servers hold no parameters of this job ({plan})",
                "choose strategy: ps and an optimizer that fits servers (docs/groups.md), or read stores only",
            )
        indexes = {index for index, _ in parameters.values()}
        shards = [shard for shard, held in enumerate(self._held) if any(each.parameter in indexes for each in held)]
        found = reader.read(shards, self._order.spread, after, every)
        if found is None:
            return None
        self._copy(parameters, found)
        self._load_buffers(model, reader, found)
        self._version, self._session.step = found.newest, found.step
        return found.step

    def _wanted(self, model: nn.Module) -> dict[torch.Tensor, tuple[int, ParameterInfo]]:
        """Return the parameters of a model that are read, each with its place in the layout.

        Raises:
            UsageError: one is not the job's, or of another shape.
        """
        found: dict[torch.Tensor, tuple[int, ParameterInfo]] = {}
        for name, parameter in model.named_parameters():
            if not _matches(name, self._order.parameters):
                continue
            if name not in self._known:
                raise UsageError(
                    f"parameter {name} of {type(model).__name__} is none of the model that the job trains",
                    f"build the same model, or leave it out of the keys of group {self.group}",
                )
            index, info = self._known[name]
            if info.shape != tuple(parameter.shape):
                raise UsageError(
                    f"parameter {name} has shape {tuple(parameter.shape)}, and {info.shape} in the job",
                    "build the model with the settings of the training script",
                )
            if info.trainable:
                found[parameter] = index, info
        return found

    def _copy(self, parameters: Mapping[torch.Tensor, tuple[int, ParameterInfo]], found: ReadValues) -> None:
        """Copy shards into parameters."""
        by_index = {index: parameter for parameter, (index, _) in parameters.items()}
        flats: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for shard, values in found.tensors.items():
                for piece in self._held[shard]:
                    parameter = by_index.get(piece.parameter)
                    if parameter is not None and piece.size:
                        flat = flats.setdefault(piece.parameter, parameter.detach().reshape(-1))
                        flat[piece.within : piece.within + piece.size].copy_(values[piece.at : piece.at + piece.size])
            for index, flat in flats.items():
                if not by_index[index].is_contiguous():  # `flat` is a copy
                    by_index[index].copy_(flat.view(by_index[index].shape))

    def _load_buffers(self, model: nn.Module, reader: ParameterReader, found: ReadValues) -> None:
        """Copy rank 0's buffers at the same step, or its newest ones."""
        own = {name: one for name, one in model.named_buffers() if _matches(name, self._order.parameters)}
        if not own:
            return
        _, data = reader.read_rank_state(found.step)
        with torch.no_grad():
            for name, tensor in (buffers_of(data) if data else {}).items():
                if name in own and own[name].shape == tensor.shape:
                    own[name].copy_(tensor)

    def _open_rows(self, model: nn.Module) -> None:
        """Have the embeddings of a model read their rows from the servers."""
        for name, rows in ModelRows(model.named_modules(), ExampleWeight(1)).stores().items():
            if not rows.is_read_only and _matches(name, self._order.stores):
                rows.read_from(LiveStore(self._rows, name).pull)


def init_reader() -> GroupReader:
    """Join the job that started this process as one of its group of readers, and return the reader.

    Raises:
        UsageError: psctl did not start this process as one of `groups:`; or it was called before.
        ConnectionFailed: the job's coordinator cannot be reached; not the script's fault.
    """
    if _made:
        raise UsageError("psctl.init_reader() was called already: a process has one reader", "pass that one on")
    orders = read_orders()
    if orders is None or orders.reader is None:
        raise UsageError(
            "psctl.init_reader() outside of a group that reads",
            "start the script by `groups:` of a job file; a worker calls psctl.init()",
        )
    reader = _join(orders, orders.reader)
    _made.append(reader)
    atexit.register(reader.finish)
    return reader


def _join(orders: ProcessOrders, order: ReaderOrder) -> GroupReader:
    credentials = Credentials(
        job=orders.job, member=orders.member, authority=orders.authority,
        certificate=orders.certificate, key=orders.key, preauth_secret=orders.preauth_secret,
    )  # fmt: skip
    session = ReaderSession(_leave)
    handler = CertificateRenewer(credentials, session, lambda _: None)
    address = CoordinatorAddress(orders.coordinator, Path(orders.leader_dir) if orders.leader_dir else None)

    def connect(handler: AnyHandler) -> PeerConnection:
        expected = Member("coordinator", 0)
        return dial(address.get(), credentials, expected, COORDINATION, handler, DIAL_SECONDS, orders.congestion)

    def dialler(permits: Permits) -> Dial:
        return lambda member, at, handler: dial(
            at, credentials, member, permits, handler, DIAL_SECONDS, orders.congestion, sealed=orders.sealed
        )

    decision = session.join(CoordinatorConnection(handler, partial(connect), address=address))
    parameters = None
    if decision.assignment.chains and decision.update == "server":
        parameters = ParameterReader(session, decision.shards, dialler(PARAMETERS), lambda at, error: None)
        parameters.assign(decision.assignment)
        session.follow_servers(parameters.assign)
    return GroupReader(order, session, decision, parameters, LiveRows(session, dialler(TABLES), orders.folder))


def _leave(why: PsctlError) -> NoReturn:
    """End this process at once, from any thread, when its job is over; report a lost connection to the agent."""
    print(f"psctl: this reader ends: {why.message}", file=sys.stderr, flush=True)
    if isinstance(why, ConnectionFailed):
        bootstrap.write_failure(why, None, os.getcwd())
    os._exit(1)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _number(name: str, value: object) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value.detach())
    if isinstance(value, int | float) or hasattr(value, "__float__"):
        return float(value)
    raise UsageError(f"reader.report({name}=...): {type(value).__name__}, expected a number", "pass a number")
