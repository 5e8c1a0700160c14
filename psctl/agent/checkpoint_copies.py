"""Second copies of checkpoints that come to this host: written, proved, pruned like those of the head."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from psctl.checkpoint.catalog import prune
from psctl.checkpoint.copies import CheckpointReceiver
from psctl.checkpoint.reader import folder_name
from psctl.checkpoint.writer import remove_abandoned
from psctl.errors import PsctlError
from psctl.job.checkpoint_messages import CheckpointCopyBegin, CheckpointCopyDone, CheckpointCopyEnd, CheckpointCopyPart
from psctl.orders import JobOrder


class CheckpointCopies:
    """Receives copies on the link's reader thread. One at a time: the coordinator sends them in order.

    Args:
        root: folder of all jobs' checkpoints on this host.
        order: the job; says how many are kept.
    """

    def __init__(self, root: Path, order: JobOrder) -> None:
        self._root, self._order = root, order
        remove_abandoned(root)
        self._receivers: dict[int, CheckpointReceiver] = {}

    def take(
        self, message: CheckpointCopyBegin | CheckpointCopyPart | CheckpointCopyEnd, payload: memoryview | None
    ) -> Iterator[CheckpointCopyDone]:
        """Take in one message of a copy; yield the answer when it came to its end, good or bad."""
        try:
            if self._act(message, payload):
                yield CheckpointCopyDone(message.step)
        except PsctlError as error:
            receiver = self._receivers.pop(message.step, None)
            if receiver is not None:
                receiver.discard()
            yield CheckpointCopyDone(message.step, error.message)

    def _act(
        self, message: CheckpointCopyBegin | CheckpointCopyPart | CheckpointCopyEnd, payload: memoryview | None
    ) -> bool:
        step = message.step
        if isinstance(message, CheckpointCopyBegin):
            self.discard()  # of a connection that broke
            folder = self._root / self._order.name / folder_name(step)
            self._receivers[step] = CheckpointReceiver(folder, message.files)
        elif step in self._receivers and isinstance(message, CheckpointCopyPart):
            self._receivers[step].write_part(message.file, message.offset, payload if payload is not None else b"")
        elif step in self._receivers:
            self._receivers.pop(step).finish()
            keep = self._order.checkpoint
            prune(self._root, self._order.name, keep.keep, keep.keep_best, protect=step)
            return True
        return False  # parts of a copy that has failed come in late; its failure was told

    def discard(self) -> None:
        """The agent leaves: what is not whole goes."""
        for receiver in self._receivers.values():
            receiver.discard()
        self._receivers.clear()
