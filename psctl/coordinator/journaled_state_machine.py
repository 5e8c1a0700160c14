"""The job's state machine with its journal: no instruction is forgotten or repeated when the coordinator is killed.

The order of steps makes it so. An input is written to the journal, then counted in its session, then handled; the
instructions are carried out, and only then the next input is written. A member's message is acknowledged after it is in
the journal. A successor handles the inputs of the journal again without carrying out instructions, carries out those of
the last input, which may be done or not, and then begins a journal of its own: until that is on disk, another successor
does the same again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from psctl.coordinator.connections import FIRST
from psctl.coordinator.journal import Journal, RestoredState
from psctl.coordinator.sessions import MemberSessions
from psctl.coordinator.state.instructions import Input, Instruction, MessageReceived, TakenOver
from psctl.coordinator.state.job_state_machine import JobStateMachine
from psctl.coordinator.state.takeover import REQUESTS
from psctl.types import Member


class JournaledStateMachine:
    """A state machine whose inputs are in a journal. Call `start` or `take_over` once, then `handle`.

    Args:
        folder: of the journal.
        machine, sessions: the state, new or restored.
        carry_out: carries out an instruction.
        begin_session: begins a member's session on its connection, or resumes it: (member, whether it is new).
    """

    def __init__(
        self, folder: Path, machine: JobStateMachine, sessions: MemberSessions,
        carry_out: Callable[[Instruction], None], begin_session: Callable[[Member, bool], None],
    ) -> None:  # fmt: skip
        self._folder, self._machine, self._sessions = folder, machine, sessions
        self._carry_out, self._begin_session = carry_out, begin_session
        self._journal: Journal | None = None

    def start(self, now: float) -> None:
        """Start the job at time `now`."""
        self._carry_all_out(self._machine.start(now))
        self._journal = Journal(self._folder, self._machine, self._sessions)

    def take_over(
        self, restored: RestoredState, pid: int, now: float, carry_out_again: Callable[[Instruction], None]
    ) -> None:
        """Continue the job of a coordinator that was killed.

        Args:
            restored: the state, which this state machine and the sessions are of.
            pid: the new coordinator's process.
            now: the time.
            carry_out_again: carries out an instruction if that was not done before.
        """
        for instruction in restored.instructions:
            if not isinstance(instruction, REQUESTS):
                carry_out_again(instruction)
        self._journal = Journal(self._folder, self._machine, self._sessions, restored.state.number + 1)
        self.handle(TakenOver(pid), now)

    def handle(self, given: Input, now: float) -> None:
        """Handle an input at time `now`."""
        assert self._journal is not None, "start or take_over comes first"
        self._journal.append(given, now)
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
