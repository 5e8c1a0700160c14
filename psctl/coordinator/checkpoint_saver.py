"""Checkpoints on the head's disk: parts are written as they arrive, everything else on one thread.

The thread that reads a part from the network writes it, so a slow disk slows the sender only, and no memory fills up.
One thread commits, verifies, prunes and sends copies, in order. A disk error ends that checkpoint, not
the job.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from psctl.checkpoint.catalog import find_newest_verified, prune
from psctl.checkpoint.copies import file_sizes, read_parts
from psctl.checkpoint.manifest import Manifest, shared_files, whole_tensors
from psctl.checkpoint.reader import folder_name, open_checkpoint, read_state, verify
from psctl.checkpoint.upload import CheckpointTarget
from psctl.checkpoint.writer import CheckpointWriter, remove_abandoned
from psctl.coordinator.state.instructions import (
    CheckpointCommitted,
    CheckpointCopyFailed,
    CommitCheckpoint,
    RestorableFound,
)
from psctl.errors import CheckpointIncomplete, DiskFull, PsctlError
from psctl.job.checkpoint_messages import (
    CheckpointCopyBegin,
    CheckpointCopyEnd,
    CheckpointCopyPart,
    SaveBegin,
    SavePart,
)
from psctl.job.training_messages import Resume
from psctl.orders import JobOrder
from psctl.ps.tables.server.saved_names import incomplete
from psctl.transport.peer_connection import PeerConnection
from psctl.types import Member

QUEUED = 8 << 20
"""Most bytes of a copy in the send queue."""

MOST = 64
"""Most checkpoints that are written at once; one more is given up."""

PART_TIMEOUT = 10.0
"""Seconds without bytes after which a commit waits no longer for parts that have begun."""

FLUSH_TIMEOUT = 60.0
"""Seconds in which a full send queue must be sent."""


class _Open(msgspec.Struct):
    writer: CheckpointWriter
    since: float
    state: dict[str, object] = {}
    names: set[str] = msgspec.field(default_factory=set)  # of tensors that a part holds
    sending: set[str] = msgspec.field(default_factory=set)  # senders that have begun and not ended
    moved_at: float = 0.0  # when a sender last began, sent bytes or ended
    committing: bool = False
    problem: PsctlError | None = None  # why it cannot be written, once it is being committed


class CheckpointSaver:
    """All checkpoints that a job makes.

    Args:
        root: folder of all jobs' checkpoints.
        order: the job.
        answer: takes the answers, from any thread.
        sign: signs manifests with the key of the job's authority.
    """

    def __init__(
        self,
        root: Path,
        order: JobOrder,
        answer: Callable[[CheckpointCommitted | CheckpointCopyFailed | RestorableFound], None],
        sign: Callable[[bytes], bytes],
    ) -> None:
        self._root, self._order, self._answer, self._sign = root, order, answer, sign
        self._lock = threading.Lock()
        self._moved = threading.Condition(self._lock)
        self._open: dict[int, _Open] = {}
        self._closed: set[int] = set()  # steps whose parts are ignored: given up, or being committed
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        remove_abandoned(root)
        threading.Thread(target=self._run, name="psctl saver", daemon=True).start()

    # ---- on the senders' reader threads ----------------------------------------------------------------------------

    def begin(self, source: str, message: SaveBegin) -> None:
        """A sender begins its part of a checkpoint."""

        def act(save: _Open) -> None:
            if message.state is not None:
                save.state = dict(message.state)
            save.names.update(piece.name for piece in message.slices)
            save.writer.open_file(source, message.slices)
            if message.base is not None:
                save.names.update(save.writer.link_files(source, self._folder(message.base)))

        self._try(source, message.step, act, begins=True)

    def part(self, source: str, message: SavePart, payload: memoryview | None) -> None:
        """Bytes of a slice."""
        data = payload if payload is not None else memoryview(b"")
        self._try(
            source, message.step, lambda save: save.writer.write_part(source, message.index, message.offset, data)
        )

    def end(self, source: str, step: int) -> None:
        """A sender has sent all: its file goes to the disk."""
        self._try(source, step, lambda save: save.writer.finish_file(source))
        self.interrupt(source, step)

    def interrupt(self, source: str, step: int) -> None:
        """Nothing more of a sender's part will arrive."""
        with self._moved:
            save = self._open.get(step)
            if save is not None:
                save.sending.discard(source)
                self._moved.notify_all()

    def _try(self, source: str, step: int, act: Callable[[_Open], None], *, begins: bool = False) -> None:
        try:
            save = self._of(source, step, begins)
            if save is not None:
                act(save)
        except PsctlError as error:
            if self._fail(step, error):
                self._answer(_given_up(step, error))

    def _folder(self, step: int) -> Path:
        return self._root / self._order.name / folder_name(step)

    def _fail(self, step: int, problem: PsctlError) -> bool:
        """Give a checkpoint up; return False when it was given up before, or its commit will answer."""
        with self._moved:
            save = self._open.get(step)
            if save is not None and save.committing:
                save.problem = problem
                self._moved.notify_all()
        return self.discard(step)

    def _of(self, source: str, step: int, begins: bool) -> _Open | None:
        with self._lock:
            if step in self._closed:
                return None
            new = begins and step not in self._open
            if new and len(self._open) >= MOST:
                self._closed.add(step)
                self._answer(CheckpointCommitted(step, problem=f"{MOST} checkpoints are being written already"))
            elif new:
                try:
                    writer = CheckpointWriter(self._folder(step), self._order.name, step)
                    self._open[step] = _Open(writer, time.monotonic())
                except PsctlError as error:
                    self._closed.add(step)
                    self._answer(_given_up(step, error))
            save = self._open.get(step)
            if save is not None:
                save.moved_at = time.monotonic()
                if begins:
                    save.sending.add(source)
            return save

    # ---- on the main thread ----------------------------------------------------------------------------------------

    def discard(self, step: int) -> bool:
        """Give a checkpoint up and remove its files; return False when it was given up before or is being committed."""
        with self._lock:
            save = self._open.get(step)
            if save is not None and save.committing:
                return False
            self._open.pop(step, None)
            self._closed.add(step)
        if save is None:
            return False
        save.writer.discard()
        return True

    def commit(self, commit: CommitCheckpoint) -> None:
        """Commit a checkpoint of the parts that have begun; the answer is CheckpointCommitted.

        Every part that must be there has ended. Others may still be arriving: of servers that give their shards to
        others, whose bytes come on connections of their own.
        """
        with self._lock:
            save = self._open.get(commit.step)
            if save is None:
                self._closed.add(commit.step)
            else:
                save.committing = True
        self._work.put(lambda: self._answer(self._commit(commit, save)))

    def copy(self, step: int, agent: Member, peer: PeerConnection | None, base: int = -1) -> None:
        """Send a checkpoint to an agent, which answers; the answer to a failure is CheckpointCopyFailed.

        Args:
            step: of the checkpoint.
            agent, peer: the agent, and the connection to it.
            base: step of an earlier one that the agent has, whose files are not sent again; -1: there is none.
        """

        def send() -> None:
            problem = self._copy(step, peer, base)
            if problem:
                self._answer(CheckpointCopyFailed(step, agent, problem))

        self._work.put(send)

    def find_restorable(self, use: Callable[[Path | None], None]) -> None:
        """Find where the job continues after a loss: its newest verified checkpoint here, else at
        `checkpoint.to`, else the one it came from. Steps
        that were given up may be saved again. The answer is RestorableFound.

        Args:
            use: called with the folder before the answer.
        """

        def find() -> None:
            with self._lock:
                self._closed.clear()
            answer, folder = self._restorable()
            use(folder)
            self._answer(answer)

        self._work.put(find)

    def _restorable(self) -> tuple[RestorableFound, Path | None]:
        order = self._order
        newest = find_newest_verified(self._root, order.name)
        folder, name = newest.folder, None
        try:
            if folder is None and order.checkpoint.to is not None:
                folder = self._fetched(order.checkpoint.to)
            if folder is None and order.resume:
                folder, name = Path(order.resume), order.resume_id
            return RestorableFound(resumed(name, folder), list(newest.skipped)), folder
        except PsctlError as error:
            return RestorableFound(None, list(newest.skipped), error.message), None

    def _fetched(self, to: str) -> Path | None:
        """Bring the job's newest checkpoint from `checkpoint.to`: a host that leads since a takeover may have none."""
        target, job = CheckpointTarget(to), self._order.name
        steps = target.steps(job)
        if not steps:
            return None
        folder = self._root / job / folder_name(steps[-1])
        target.fetch(job, steps[-1], folder)
        return folder

    def _run(self) -> None:
        while True:
            self._work.get()()

    def _commit(self, commit: CommitCheckpoint, save: _Open | None) -> CheckpointCommitted:
        if save is None and commit.again:
            return self._find_written(commit.step)
        if save is None:
            return CheckpointCommitted(commit.step, problem="it was given up")
        self._wait_for_parts(commit.step, save)
        try:
            if save.problem is not None:
                raise save.problem
            return self._written(commit, save)
        except PsctlError as error:
            save.writer.discard()
            return _given_up(commit.step, error)

    def _wait_for_parts(self, step: int, save: _Open) -> None:
        """Wait until no part is arriving, and ignore what comes later."""
        with self._moved:
            while save.sending and save.problem is None:
                left = save.moved_at + PART_TIMEOUT - time.monotonic()
                if left <= 0:
                    break
                self._moved.wait(left)
            del self._open[step]
            self._closed.add(step)

    def _find_written(self, step: int) -> CheckpointCommitted:
        """Return the result of a commit that an earlier coordinator had begun."""
        folder = self._folder(step)
        try:
            whole = folder.is_dir() and not verify(folder)
            if not whole:
                return CheckpointCommitted(step, problem="the coordinator was lost before it was written")
            found = open_checkpoint(folder)
            return CheckpointCommitted(step, str(folder), found.bytes, written=found.written)
        except PsctlError as error:
            return CheckpointCommitted(step, problem=error.message)

    def ignore(self, steps: Collection[int]) -> None:
        """Ignore parts of the checkpoints of these steps: an earlier coordinator has written them or given them up."""
        with self._lock:
            self._closed |= set(steps)

    def _written(self, commit: CommitCheckpoint, save: _Open) -> CheckpointCommitted:
        order = self._order
        missing = [name for name in commit.parameters if f"param/{name}" not in save.names]
        if missing:
            raise CheckpointIncomplete(f"no part of it holds {missing[0]}: shards moved while it was taken")
        if hole := incomplete(save.names):
            raise CheckpointIncomplete(f"{hole}: shards moved while it was taken")
        if commit.streams:
            save.state["streams"] = commit.streams
        manifest = save.writer.commit(
            time=time.time(), world=commit.world, servers=commit.servers, strategy=commit.strategy,
            update=commit.update, seed=order.seed, epoch=commit.epoch, state=save.state, metrics=commit.metrics,
            code_hash=order.code_hash, job_file=order.job_file, sign=self._sign,
        )  # fmt: skip
        folder = save.writer.folder
        faults = verify(folder, save.writer.linked)
        if faults:
            raise CheckpointIncomplete(f"it reads back wrong: {faults[0]}")
        is_this = open_checkpoint(folder) == manifest  # else a complete one of that step was there, and was kept
        keep = order.checkpoint
        prune(self._root, order.name, keep.keep, keep.keep_best, protect=commit.step)
        return CheckpointCommitted(
            commit.step, str(folder), manifest.bytes, time.monotonic() - save.since, written=manifest.written,
            can_continue=is_this,
        )  # fmt: skip

    def _copy(self, step: int, peer: PeerConnection | None, base: int) -> str:
        """Send a checkpoint; return why that failed, "" when all of it was sent."""
        if peer is None:
            return "its host is not connected"
        folder = self._folder(step)
        try:
            manifest = open_checkpoint(folder)
            names = file_sizes(folder, manifest)
            linked = self._shared(manifest, base) if base >= 0 else {}
            peer.send(CheckpointCopyBegin(step, names, base, linked))
            sent = {name: size for name, size in names.items() if name not in linked}
            for name, offset, data in read_parts(folder, sent):
                peer.send(CheckpointCopyPart(step, name, offset), data)
                if peer.pending() > QUEUED:
                    peer.flush(FLUSH_TIMEOUT)
            peer.send(CheckpointCopyEnd(step))
        except PsctlError as error:
            return error.message
        return ""

    def _shared(self, manifest: Manifest, base: int) -> dict[str, str]:
        """Return the files that a checkpoint shares with an earlier one, and their names there; {}: it was removed."""
        try:
            return shared_files(manifest, open_checkpoint(self._folder(base)))
        except PsctlError:
            return {}


def _given_up(step: int, error: PsctlError) -> CheckpointCommitted:
    """Return the answer for a checkpoint that could not be written; after a full disk what was complete still is."""
    return CheckpointCommitted(step, problem=error.message, can_continue=isinstance(error, DiskFull))


def resumed(name: str | None, folder: Path | None) -> Resume | None:
    """Return the position at which to resume from a checkpoint's folder; None for no folder.

    Args:
        name: how users name it; None: as its manifest does.

    Raises:
        PsctlError: it cannot be read.
    """
    if folder is None:
        return None
    manifest = open_checkpoint(folder)
    state = read_state(folder, manifest)
    return Resume(name or manifest.id, manifest.step, state, whole_tensors(manifest))


def folder_of(root: Path, order: JobOrder, resume: Resume | None) -> Path | None:
    """Return the folder of the checkpoint that a job continues from: one of its own, or that of its order.

    Args:
        root: folder of all jobs' checkpoints.
        order: the job.
        resume: the checkpoint; None: there is none.
    """
    if resume is None:
        return None
    if resume.checkpoint == f"{order.name}@{resume.step}":
        return root / order.name / folder_name(resume.step)
    return Path(order.resume) if order.resume else None
