"""The job's state machine with its journal: no instruction is forgotten or repeated when the coordinator is lost.

The order of steps makes it so. Inputs that have arrived are written to the journal as one record; when the standby,
if there is one, has stored that too, each is counted in its session and handled, and its instructions are carried out.
Only then the next record is written. A member's message is acknowledged after it is in the journal. A successor handles
the inputs of the journal again without carrying out instructions, carries out those of the last record, which may be
done or not, and then begins a journal of its own: until that is on disk, another successor does the same again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from psctl.coordinator.connections import FIRST
from psctl.coordinator.journal import CoordinatorState, Journal, JournalCopy, NoCopy, RestoredState
from psctl.coordinator.state.instructions import Input, Instruction, MessageReceived, TakenOver
from psctl.coordinator.state.takeover import REQUESTS
from psctl.types import Member


class JournaledStateMachine:
    """A state machine whose inputs are in a journal. Call `start` or `take_over` once, then `handle`.

    Args:
        folder: of the journal.
        state: new or restored.
        carry_out: carries out an instruction.
        begin_session: begins a member's session on its connection, or resumes it: (member, whether it is new).
        copy: of the journal.
        confirm: waits until what follows from the last record may be carried out.
    """

    def __init__(
        self, folder: Path, state: CoordinatorState, carry_out: Callable[[Instruction], None],
        begin_session: Callable[[Member, bool], None], copy: JournalCopy | None = None,
        confirm: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._folder, self._state, self._copy, self._confirm = folder, state, copy or NoCopy(), confirm
        self._machine, self._sessions = state.machine, state.sessions
        self._carry_out, self._begin_session = carry_out, begin_session
        self._journal: Journal | None = None

    def start(self, now: float) -> None:
        """Start the job at time `now`."""
        self._carry_all_out(self._machine.start(now))
        self._journal = Journal(self._folder, self._state, self._copy)

    def take_over(
        self, restored: RestoredState, taken: TakenOver, now: float, carry_out_again: Callable[[Instruction], None]
    ) -> None:
        """Continue the job of a coordinator that was lost. No member is connected yet.

        Args:
            restored: the state, which this state machine is of.
            taken: the input that says so.
            now: the time.
            carry_out_again: carries out an instruction if that was not done before.
        """
        for instruction in restored.instructions:
            if not isinstance(instruction, REQUESTS):
                carry_out_again(instruction)
        self._state.number += 1
        self._journal = Journal(self._folder, self._state, self._copy)
        self._journal.append([taken], now)
        self._handle_one(taken, now)

    def handle(self, given: Sequence[Input], now: float) -> None:
        """Handle inputs at time `now`, in order."""
        assert self._journal is not None, "start or take_over comes first"
        self._journal.append(given, now)
        self._confirm()
        for each in given:
            self._handle_one(each, now)

    def make_snapshot(self) -> None:
        """Begin the journal anew, because a copy of it begins."""
        assert self._journal is not None, "start or take_over comes first"
        self._journal.make_snapshot()

    def _handle_one(self, given: Input, now: float) -> None:
        new = self._sessions.on_input(given)
        if isinstance(given, MessageReceived) and isinstance(given.message, FIRST):
            self._begin_session(given.member, new)
        self._carry_all_out(self._machine.handle(given, now))

    def close(self) -> None:
        """Remove the journal: the job is over."""
        if self._journal is not None:
            self._journal.close()

    def _carry_all_out(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            self._sessions.on_instruction(instruction)
            self._carry_out(instruction)
