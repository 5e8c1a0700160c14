"""Messages that make, read and copy checkpoints, and that agree on the step at which one is made."""

from __future__ import annotations

import msgspec

from psctl import types
from psctl.job.message import JobMessage
from psctl.types import State


class ProposeCut(JobMessage, frozen=True):
    """Agree on one common step: answer CutPosition at once."""

    ticket: int


class CutPosition(JobMessage, frozen=True):
    """Answer to ProposeCut: the step in progress. The sender does not start step+2 before CutAt arrives."""

    ticket: int
    step: types.Step


class CutAt(JobMessage, frozen=True):
    """After finishing `step`: save if `save`, then leave if `stop`. Answers all ProposeCut of this ticket."""

    ticket: int
    step: types.Step
    save: bool
    stop: bool


class SaveBegin(JobMessage, frozen=True):
    """This sender begins its part of the checkpoint of `step`: these slices, and (rank 0) its state as JSON text.

    `tables`: a server's tables, which it sends apart from its parameters. `base`: the step of the checkpoint whose part
    of this sender the slices continue; the part includes that one.
    """

    step: types.Step
    slices: types.Slices
    state: State | None = None
    tables: bool = False
    base: types.Step | None = None


class SavePart(JobMessage, frozen=True):
    """Payload: bytes of slice number `index` from byte `offset` of that slice."""

    step: types.Step
    index: types.Size
    offset: types.Size
    tables: bool = False


class SaveEnd(JobMessage, frozen=True):
    """All slices of this sender were sent. `pause`: seconds for which they stopped training."""

    step: types.Step
    tables: bool = False
    pause: float = 0.0


class CheckpointSaved(JobMessage, frozen=True):
    """The checkpoint of `step` is whole on disk (problem "") or was given up."""

    step: types.Step
    problem: str = ""


class LoadWanted(JobMessage, frozen=True):
    """Send me these slices of the checkpoint that the job resumes from; answered by LoadPart, then LoadEnd."""

    ticket: int
    slices: types.Slices


class LoadPart(JobMessage, frozen=True):
    """Payload: bytes of the wanted slice number `index`, from byte `offset` of it."""

    ticket: int
    index: types.Size
    offset: types.Size


class LoadEnd(JobMessage, frozen=True):
    """All wanted slices were sent (problem "") or could not be."""

    ticket: int
    problem: str = ""


class CheckpointCopyBegin(JobMessage, frozen=True):
    """A checkpoint will be sent to this host as a copy; `files` maps names to sizes in bytes.

    `linked`: files that are not sent, with their names in the copy of the checkpoint of step `base` on this host.
    """

    step: types.Step
    files: dict[types.Name, types.Size]
    base: types.Step = -1
    linked: dict[types.Name, types.Name] = msgspec.field(default_factory=dict)


class CheckpointCopyPart(JobMessage, frozen=True):
    """Payload: bytes of one of its files."""

    step: types.Step
    file: str
    offset: types.Size


class CheckpointCopyEnd(JobMessage, frozen=True):
    """All bytes were sent: verify, publish, answer CheckpointCopyDone."""

    step: types.Step


class CheckpointCopyDone(JobMessage, frozen=True):
    """The copy of a checkpoint on this host is verified (problem "") or is not."""

    step: types.Step
    problem: str = ""
