"""The errors that psctl raises, as one tree.

    PsctlError                      code, exit, message, hint, where
    |- UsageError                   usage               2   the command line is wrong
    |- InvalidFile                  invalid-file        2   a cluster, job or topology file is wrong
    |- HostUnreachable              host-unreachable    3   no route, refused, name unknown
    |  |- LoginShellFailed          host-unreachable    3   logged in, but its login shell runs no command
    |  '- AllocationEnded           host-unreachable    3   the Slurm allocation of the host has ended
    |- AuthFailed                   auth-failed         3   reached, but not let in
    |- PythonMissing                python-missing      4
    |- DiskFull                     disk-full           4
    |- VersionMismatch              version-mismatch    4
    |- TimedOut                     timed-out           5
    |- NoSuchCluster/Job/Checkpoint no-such-*           6
    |- JobRunning                   job-running         7   slots or hosts are held by another job
    |- PortTaken                    port-taken          7
    |- HostKeyUnknown               host-key-unknown    8
    |- HostKeyChanged               host-key-changed    8
    |- CheckpointIncomplete         checkpoint-incomplete 9
    |- CheckpointCorrupt            checkpoint-corrupt  9
    |- Partial                      partial            10   some hosts done, some not
    |- JobFailed                    job-failed          1   the user's code, or a loss beyond the restarts
    |- CommandFailed                host-command-failed 1   a command on a host ended non-zero
    '- ConnectionFailed             connection-failed   1   a data-plane connection ended; never the user's fault
       |- ProtocolError             protocol            1   the peer broke the protocol (or is no member of the job)
       |  '- MessageRefused         protocol            1   a member sent a message that psctl's tables do not allow
       '- PeerLost                  peer-lost           1   the peer ended or the link was cut
          '- PeerLeft               peer-lost           1   the peer closed the connection, with a reason

Errors in a user's files are `ValueError`s too; an `assert` marks a bug in psctl. Only cli/app.py turns one of these
errors into an exit code; the table of codes is promised to users.
"""

from __future__ import annotations


class PsctlError(Exception):
    """An error of psctl, with a code, an exit status and a remedy; by itself, one that psctl did not expect.

    Args:
        message: one line: the problem, its place, and its cause.
        hint: one line: the next step for the user; empty when there is none.
        where: file:line:column, host name, or job name; empty when unknown.

    `others` holds further errors found at the same time: all mistakes of one file are reported together.
    """

    code = "internal"
    exit = 1
    cure = "Report it, with the output of --debug: it is a defect of psctl."
    """What to do about this kind of error; `hint` is about one."""

    def __init__(self, message: str, hint: str = "", where: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.where = where
        self.others: tuple[PsctlError, ...] = ()

    def document(self) -> dict[str, dict[str, object]]:
        """Return the error as the JSON document promised to users; `others` lists further errors, if any."""
        body: dict[str, object] = {
            "code": self.code, "exit": self.exit, "message": self.message, "hint": self.hint, "where": self.where,
        }  # fmt: skip
        if self.others:
            body["others"] = [other.document()["error"] for other in self.others]
        return {"error": body}


class UsageError(PsctlError):
    """The command line is wrong; nothing was changed."""

    code, exit = "usage", 2
    cure = "Read the hint; `psctl COMMAND --help` has the options and examples."


class InvalidFile(PsctlError, ValueError):
    """A file that a user wrote is wrong; `where` is file:line:column."""

    code, exit = "invalid-file", 2
    cure = (
        "Correct the line that the message names; `psctl validate FILE` finds all mistakes at once, `psctl "
        "explain KEY` has each key."
    )


class HostUnreachable(PsctlError):
    """No connection to a host: name unknown, refused, no route, no answer; or the command in exec: fails."""

    code, exit = "host-unreachable", 3
    cure = (
        "`ssh HOST`, or the command in exec:, shows the same from your terminal; `psctl doctor` tells which step "
        "fails: name, TCP, key or login."
    )


class LoginShellFailed(HostUnreachable):
    """The login on a host succeeds, but its login shell runs no commands: a start-up file of the user prevents it."""


class AllocationEnded(HostUnreachable):
    """The Slurm allocation that a host belonged to has ended, and all its processes with it."""


class AuthFailed(PsctlError):
    """A host's sshd answered and refused the login."""

    code, exit = "auth-failed", 3
    cure = (
        "Log in once by `ssh HOST`; give `ssh: {user:, identity_file:}` in the cluster file, or load the key "
        "with ssh-add."
    )


class PythonMissing(PsctlError):
    """A host has no usable Python, or lacks packages that psctl or the job file needs and psctl may not install."""

    code, exit = "python-missing", 4
    cure = (
        "Install Python 3.11 or newer there, name it under `runtime: {python:}`, or let psctl install "
        "packages by `environment: managed`; packages of your own are named by `runtime: {requirements:}`."
    )


class DiskFull(PsctlError):
    """A disk has no space for the files that must be written: of a host, or of this machine for what is fetched."""

    code, exit = "disk-full", 4
    cure = "Free space there, or put `runtime: {workdir:}` on another disk."


class VersionMismatch(PsctlError):
    """Versions (of Python, torch, a driver, a checkpoint) or settings do not work together, or a clock differs."""

    code, exit = "version-mismatch", 4
    cure = (
        "`psctl up` brings hosts to one version; `runtime: {torch:}` in the cluster file pins torch. For clocks, "
        "drivers, settings and checkpoints the hint says what to do."
    )


class TimedOut(PsctlError):
    """A deadline passed; the message names the process or host that did not answer."""

    code, exit = "timed-out", 5
    cure = (
        "Of a job: `psctl stacks JOB` and `psctl logs JOB` show what the process does, and `timeouts:` in the job file "
        "gives it more time. Of a host: it is busy or its link is slow; try again, or see `psctl doctor`."
    )


class NoSuchCluster(PsctlError):
    """No cluster of that name was seen by `up`, no cluster file is at that path, or `kind: slurm` has no allocation."""

    code, exit = "no-such-cluster", 6
    cure = "`psctl clusters` lists the known ones; `psctl up FILE` makes one known, `psctl init` writes a file."


class NoSuchJob(PsctlError):
    """No job of that name is known on this machine, or it has ended and the command needs one that runs."""

    code, exit = "no-such-job", 6
    cure = (
        "`psctl jobs` lists the jobs that were started from this machine, and their states; `logs`, `report` and "
        "`checkpoint` work on jobs that have ended."
    )


class NoSuchCheckpoint(PsctlError):
    """The job, folder or URL has no such checkpoint, or the code of its job is no longer on the host."""

    code, exit = "no-such-checkpoint", 6
    cure = (
        "`psctl checkpoint list JOB|URL` lists those that exist; `psctl checkpoint restore ... --job JOB.yaml` brings "
        "the code again."
    )


class JobRunning(PsctlError):
    """A running job holds slots or hosts that are needed, or another psctl starts this job now."""

    code, exit = "job-running", 7
    cure = "`psctl status` shows the job that holds the slots; wait, or `psctl stop JOB`."


class PortTaken(PsctlError):
    """No free port in the range that the cluster file allows; the message names the holder where it can be seen."""

    code, exit = "port-taken", 7
    cure = (
        "End the process that holds the port, or name others: `network: {ports:}`, `psctl ui --port`, "
        "`metrics: {prometheus:}`."
    )


class HostKeyUnknown(PsctlError):
    """A host (or jump host) is not in known_hosts and the policy is strict, or known_hosts cannot be written."""

    code, exit = "host-key-unknown", 8
    cure = (
        "Log in once by `ssh HOST` and compare the key, or set `ssh: {host_key_policy: accept-new}`; known_hosts must "
        "be writable then."
    )


class HostKeyChanged(PsctlError):
    """A host (or jump host) shows another key than known_hosts has for it."""

    code, exit = "host-key-changed", 8
    cure = (
        "If the host was installed anew: `ssh-keygen -R HOST`, then log in once. If not, somebody may be in "
        "between: ask its owner."
    )


class CheckpointIncomplete(PsctlError):
    """A checkpoint lacks its manifest or a file that the manifest names, or could not be written whole."""

    code, exit = "checkpoint-incomplete", 9
    cure = (
        "Use an older one (`psctl checkpoint list JOB`); a checkpoint that was being written when all was "
        "lost is never complete."
    )


class CheckpointCorrupt(PsctlError):
    """A checkpoint's bytes do not match its manifest."""

    code, exit = "checkpoint-corrupt", 9
    cure = "`psctl checkpoint verify` names the damaged file; use the copy on another host, or an older checkpoint."


class Partial(PsctlError):
    """Some hosts are done and some are not; the results name each."""

    code, exit = "partial", 10
    cure = (
        "The results name the hosts that failed, each with its cause; correct them and repeat the command, "
        "which is safe."
    )


class JobFailed(PsctlError):
    """The job ended because user code failed or more was lost than the job may lose."""

    code, exit = "job-failed", 1
    cure = "The box at the end has your code's frames; after a loss `psctl checkpoint restore JOB@latest` continues."


class CommandFailed(PsctlError):
    """A command on a host ended non-zero, with its evidence.

    Args:
        host: name of the host.
        command: the command as one printable line without secrets.
        status: exit status, or minus the signal number.
        tail: last lines of its standard error (or output when that is empty).
        hint: the remedy, where one is known.
    """

    code, exit = "host-command-failed", 1
    cure = "The message has the command and its last line; `--debug` has all of it."

    def __init__(self, host: str, command: str, status: int, tail: str, hint: str = "") -> None:
        last = tail.strip().splitlines()[-1] if tail.strip() else "no output"
        super().__init__(f"{host}: `{command}` ended with {status}: {last}", hint, where=host)
        self.host, self.command, self.status, self.tail = host, command, status, tail


class ConnectionFailed(PsctlError):
    """A data-plane connection ended; `where` names the peer."""

    code = "connection-failed"
    cure = "`psctl logs JOB` has more of both ends; such an error by itself ends no job."


class ProtocolError(ConnectionFailed):
    """The peer violated the protocol: its connection is closed; nothing else is affected."""

    code = "protocol"
    cure = "Report it, with `psctl logs JOB`; a member that is not of the job is refused in this way too."


class MessageRefused(ProtocolError):
    """A member of the job sent a message that is not permitted or cannot be decoded; its connection is closed."""


class PeerLost(ConnectionFailed):
    """The peer ended, closed without a farewell message, or its link was cut."""

    code = "peer-lost"
    cure = (
        "The job replaces the process or restarts by itself (`restart:` in the job file); `psctl status JOB` shows it."
    )


class PeerLeft(PeerLost):
    """The peer closed the connection in order, for a reason: it does not want another one."""
