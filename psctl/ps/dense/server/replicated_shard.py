"""A shard of parameters as the state machine that its chain of servers replicates."""

from __future__ import annotations

from psctl.ps.dense.server.push_staging import PushStaging
from psctl.ps.dense.shard_state import ShardState


class ReplicatedShard:
    """A shard of parameters: its state, and what it has taken in."""

    def __init__(self, state: ShardState, intake: PushStaging) -> None:
        self._state, self._intake = state, intake

    @property
    def version(self) -> int | None:
        """How many entries are applied; None before the start values are here."""
        return self._state.version

    @property
    def copy_limit(self) -> int:
        """Bytes that a copy, or what is handed over, may take at most."""
        terms = self._state.terms
        ranks = len(self._intake.membership.everyone)
        return max(self._state.copy_limit, (ranks * terms.buffers + 1) * self._state.nbytes)

    def entry_buffer(self, head: bytes, size: int) -> memoryview:
        """Return where an entry's payload goes."""
        return self._state.entry_buffer(head, size)

    def apply(self, head: bytes, payload: memoryview, *, kept: bool) -> None:
        """Apply an entry."""
        self._state.apply(head, payload, kept=kept)

    def release(self, payload: memoryview) -> None:
        """Take back a payload."""
        self._state.release(payload)

    def snapshot(self) -> tuple[bytes, list[memoryview]]:
        """Return all of the state."""
        return self._state.snapshot()

    def restore(self, version: int, head: bytes, data: memoryview) -> None:
        """Become what another's `snapshot` was."""
        self._state.restore(version, head, data)

    def staged_state(self) -> tuple[bytes, list[memoryview]]:
        """Return what is taken in and not applied."""
        return self._intake.staged_state()

    def restore_staged(self, head: bytes, data: memoryview) -> None:
        """Take over what another's `staged` returned."""
        self._intake.restore_staged(head, data)
