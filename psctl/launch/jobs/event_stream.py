"""Follows a job: reads the head's event log as typed events, across lost connections, to its last line.

A job runs without psctl, so a lost connection is not a failure: it is opened again while the job runs. When the head's
agent has ended and the log has no `finished`, the job ended with the agent, and the last event is made here; unless
another host leads now. Its log begins with the same bytes, so reading continues after the last line that was read.
"""

from __future__ import annotations

import random
import shlex
from collections.abc import Callable, Iterator

from psctl import errors
from psctl.clock import Clock
from psctl.job import events
from psctl.job.events import AnyEvent, Finished, finished_by_failure, from_line
from psctl.launch import agent_calls, leader_search
from psctl.launch.home import JobRecord
from psctl.launch.jobs.host_messages import SourcePaths
from psctl.process.leader_file import LeaderFile
from psctl.remote import slurm
from psctl.remote.shell import Shell, Tail
from psctl.types import UNDECODABLE

POLL = 0.1
"""Limit of a wait for the next bytes, in seconds: the delay until a key press is noticed."""

QUIET = 2.0
"""Seconds without an event after which psctl checks that the head's agent runs."""

RECONNECT = 120.0
"""Seconds of attempts to open a lost connection again, after which psctl stops following; the job continues."""

LONGEST_LINE = 1 << 24
"""Limit of bytes of a line; psctl writes no longer events."""


class LineSplitter:
    """Splits the bytes of a growing file into complete lines; `offset` is the number of bytes of the lines yielded."""

    def __init__(self) -> None:
        self.offset = 0
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield each line that is complete now.

        Raises:
            ProtocolError: a line is longer than LONGEST_LINE.
        """
        self._rest += data
        while True:
            line, newline, rest = self._rest.partition(b"\n")
            if not newline:
                break
            self._rest = rest
            self.offset += len(line) + 1
            yield line
        if len(self._rest) > LONGEST_LINE:
            raise errors.ProtocolError("the event log has a line of more than the permitted length")

    def restart(self) -> None:
        """Discard the unfinished line; reading continues at `offset`."""
        self._rest = b""


class EventReader:
    """Reads a job's events.

    Args:
        record: the job.
        connect: returns a new connection to the job's head.
        clock: a monotonic clock.
        notice: shows a sentence when the connection is lost or opened again.
        recorded: returns the job's record in this machine's home, which other commands of the user change.
        shell: an open connection, if there is one.
        find_leader: returns the record with the host that leads now; None: no other host can lead.
    """

    def __init__(
        self,
        record: JobRecord,
        connect: Callable[[], Shell],
        clock: Clock,
        notice: Callable[[str], None],
        recorded: Callable[[], JobRecord],
        shell: Shell | None = None,
        find_leader: Callable[[], JobRecord] | None = None,
    ) -> None:
        self._find_leader, self._recorded = find_leader, recorded
        self._last_line = b""
        self._moved_at = 0.0  # when the agent of a head that may have a successor was found to have ended
        self._record, self._connect, self._clock, self._notice = record, connect, clock, notice
        self._shell = shell
        self._lines = LineSplitter()
        self._paths = SourcePaths(record)
        self._past = 0  # bytes of the log when it was measured
        self._lost_since: float | None = None
        self._ended = False  # the allocation of the job's hosts has
        self._tries = 0

    @property
    def path(self) -> str:
        """The path of the event log on the head."""
        return f"{self._record.head.job_dir}/{events.FILE}"

    def measure_past(self) -> None:
        """Take the log as it is now for the past; `past_is_read` says when `events` has yielded all of it.

        Silence of POLL seconds does not say so: a far host sends its first bytes later, and a busy job is never silent.

        Raises:
            PsctlError: the head cannot be reached.
        """
        self._shell = self._shell or self._connect()
        found = self._shell.run(["stat", "-c", "%s", self.path], check=False)
        self._past = 0 if found.status else int(found.stdout)  # 0: there is no log yet

    @property
    def past_is_read(self) -> bool:
        """Whether all events of the past have been yielded."""
        return self._lines.offset >= self._past

    def events(self) -> Iterator[AnyEvent | None]:
        """Yield events up to `finished`, and None after each POLL seconds without one.

        Raises:
            HostUnreachable: the head was not reached again within RECONNECT; the job may still run.
        """
        while True:
            try:
                if self._shell is None or self._moved_at:
                    self._look_for_leader()
                shell = self._shell or self._connect()
                self._shell = shell
                with shell.tail(self.path, self._lines.offset) as tail:
                    if self._lost_since is not None:
                        self._notice(f"{shell.name} is back")
                    self._lost_since, self._tries = None, 0
                    for event in self._read(shell, tail):
                        yield event
                        if isinstance(event, Finished):
                            return
            except errors.AllocationEnded as error:
                if self._ended:  # its files are not on a disk of this machine either
                    yield finished_by_failure(self._clock.wall(), error.message)
                    return
                self._ended, self._shell = True, None
            except (errors.HostUnreachable, errors.AuthFailed, errors.TimedOut) as error:
                yield from self._wait(error)
            self._lines.restart()

    def _read(self, shell: Shell, tail: Tail) -> Iterator[AnyEvent | None]:
        """Yield events of one connection until its reader on the host ends."""
        quiet = self._clock.now()
        while True:
            data = tail.read(POLL)
            if data is None:
                return
            if data:
                quiet = self._clock.now()
                for line in self._lines.feed(data):
                    self._last_line = line
                    yield self._event(line)
                continue
            yield None
            if self._clock.now() - quiet >= QUIET:
                quiet = self._clock.now()
                leader = leader_search.read(shell, self._record.head) if self._may_move else None
                if leader is not None and leader.host != self._record.leader:
                    self._look_for_leader()
                    return
                if not agent_calls.alive(shell, self._record.head):
                    yield from self._drain(tail)
                    if self._may_have_successor(leader):
                        yield from self._pause(1.0)
                        return
                    yield self._gone(shell)

    # ---- another leader --------------------------------------------------------------------------------------------

    @property
    def _may_move(self) -> bool:
        return self._find_leader is not None and leader_search.may_move(self._record)

    def _may_have_successor(self, leader: LeaderFile | None) -> bool:
        """Return whether to wait for the standby of a head whose agent has ended."""
        if leader is None or leader.standby is None:
            return False
        self._moved_at = self._moved_at or self._clock.now()
        return self._clock.now() - self._moved_at < leader_search.ELECTION

    def _look_for_leader(self) -> None:
        """Read from another host from now on, if that leads."""
        if not self._may_move or self._find_leader is None:
            return
        found = self._find_leader()
        if found.leader == self._record.leader:
            return
        self._notice(f"{found.head.name} leads {found.job} now, in place of {self._record.head.name}")
        self._record, self._paths, self._moved_at = found, SourcePaths(found), 0.0
        self._shell = self._connect()
        self._lines.offset = self._offset_in(self._shell)
        self._lines.restart()

    def _offset_in(self, shell: Shell) -> int:
        """Return where a new leader's log continues after the last line that was read: in general at the same place."""
        line = self._last_line
        if not line:
            return 0
        path, before = shlex.quote(self.path), self._lines.offset - len(line) - 1
        there = shell.run(["sh", "-c", f"tail -c +{before + 1} {path} | head -c {len(line)}"], check=False)
        if there.stdout == line:
            return self._lines.offset
        known = shell.run(["grep", "-b", "-x", "-F", "-e", line.decode(errors="replace"), self.path], check=False)
        if known.status == 0 and known.stdout:
            return int(known.stdout.splitlines()[-1].partition(b":")[0]) + len(line) + 1
        return int(shell.run(["stat", "-c", "%s", self.path]).stdout)  # it was not copied any more: go on at the end

    def _drain(self, tail: Tail) -> Iterator[AnyEvent]:
        while data := tail.read(1.0):
            for line in self._lines.feed(data):
                yield self._event(line)

    def _event(self, line: bytes) -> AnyEvent:
        try:
            return self._paths.event(from_line(line))
        except UNDECODABLE as error:
            raise errors.ProtocolError(
                f"{self.path} on {self._record.head.name} has no valid event at byte {self._lines.offset}: {error}",
                hint="was it written by another version of psctl?",
                where=self._record.job,
            ) from error

    def _gone(self, shell: Shell) -> Finished:
        """Return the last event of a job whose head's agent has ended; after `stop --force` its status is stopped."""
        recorded = self._recorded()
        if recorded.state == "stopped":
            now = self._clock.wall()
            return Finished(
                time=now, status="stopped", exit=1, steps=recorded.step, seconds=max(0.0, now - recorded.created),
                metrics={},
            )  # fmt: skip
        if why := slurm.why_ended(self._record.cluster.allocation):
            return finished_by_failure(self._clock.wall(), why)
        line = agent_calls.last_log_line(shell, self._record.head)
        text = f"the agent on {shell.name} ended without a report" + (f"; its log: {line}" if line else "")
        return finished_by_failure(self._clock.wall(), text)

    def _wait(self, error: errors.PsctlError) -> Iterator[None]:
        """Wait before the next try to connect."""
        now = self._clock.now()
        self._shell = None
        if self._lost_since is None:
            self._lost_since = now
            self._notice(f"{error.message}; the job continues without it, connecting again")
        if now - self._lost_since > RECONNECT:
            raise errors.HostUnreachable(
                f"{self._record.head.name} was not reached for {RECONNECT:.0f} s; {self._record.job} may still run",
                hint=f"psctl attach {self._record.job}",
                where=self._record.head.name,
            ) from error
        self._tries += 1
        yield from self._pause(min(5.0, 0.25 * 2**self._tries) * random.uniform(0.75, 1.25))  # noqa: S311 - spreads

    def _pause(self, seconds: float) -> Iterator[None]:
        until = self._clock.now() + seconds
        while self._clock.now() < until:
            self._clock.sleep(POLL)
            yield None
