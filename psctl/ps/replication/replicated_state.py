"""The state machine that a chain of servers replicates, as a protocol."""

from __future__ import annotations

from typing import Protocol


class ReplicatedState(Protocol):
    """A state machine: the same entries take the same version to the same next one, on every server."""

    @property
    def version(self) -> int | None:
        """How many entries are applied; None: it has no state yet."""

    @property
    def copy_limit(self) -> int:
        """Bytes that a copy, or what is handed over, may take at most."""

    def entry_buffer(self, head: bytes, size: int) -> memoryview:
        """Return where an entry's payload of `size` bytes goes; `release` gives it back."""

    def apply(self, head: bytes, payload: memoryview, *, kept: bool) -> object:
        """Apply an entry; when it is `kept`, its payload must stay as it is."""

    def release(self, payload: memoryview) -> None:
        """Take back a payload of `room`, or one that was kept."""

    def snapshot(self) -> tuple[bytes, list[memoryview]]:
        """Return all of the state: a head, and bytes that stay as they are."""

    def restore(self, version: int, head: bytes, data: memoryview) -> None:
        """Become what another's `snapshot` was."""

    def staged_state(self) -> tuple[bytes, list[memoryview]]:
        """Return what is taken in and not applied; in the form of `snapshot`."""

    def restore_staged(self, head: bytes, data: memoryview) -> None:
        """Take over what another's `staged` returned."""
