"""The POSIX sh scripts that a host runs for psctl: constants; other text reaches them as arguments or input only.

Each first prints the random marker of its call and its process number: output of ~/.bashrc before that line is dropped.

GUARD ends a command with its channel. It runs the command with `n` bytes of the channel's input, and a watcher that
reads the input after them: there is none until the channel ends, by a deadline, Ctrl-C, a killed psctl or a lost
network. Then the watcher kills the process group, which is the shell's own: sshd starts each command in a session of
its own, and so does the local shell.
"""

from __future__ import annotations

_HELLO = 'printf "%s %s\\n" "$1" "$$"; shift; '

_WATCH = '(cat <&3; kill -s KILL -- "-$$") >/dev/null 2>&1 & '

GUARD = (
    _HELLO + 'n=$1; shift; exec 3<&0 </dev/null; if [ "$n" -eq 0 ]; then ' + _WATCH + '(exec "$@" 3<&-); '
    'else { head -c "$n" <&3; ' + _WATCH + '} | (exec "$@" 3<&-); fi'
)
"""Arguments: word, number of bytes of input, command... `exec`, for else sh would take `echo` as its own word."""

KILL_GROUP = _HELLO + 'kill -s KILL -- "-$1" 2>/dev/null; exit 0'
"""Arguments: word, process group."""

PUT = (
    _HELLO + 'export LC_ALL=C; p=$1 m=$2 n=$3; if [ -d "$p" ]; then echo "$p: is a folder" >&2; exit 1; fi; '
    'umask 077; mkdir -p -- "$(dirname -- "$p")" || exit 1; t="$p.psctl-$$"; '
    'cat >"$t" || { rm -f -- "$t"; exit 1; }; g=$(wc -c <"$t"); '
    'if [ "$g" -ne "$n" ]; then rm -f -- "$t"; echo "$g of $n bytes came" >&2; exit 75; fi; '
    'chmod -- "$m" "$t" && mv -f -- "$t" "$p" || { rm -f -- "$t"; exit 1; }'
)
"""Arguments: word, path, mode in octal, size. Input: the content. A short one (the sender ended) leaves nothing."""

FETCH = _HELLO + 'export LC_ALL=C; n=$(wc -c <"$1") || exit 1; n=$((n)); printf "%s\\n" "$n"; exec cat -- "$1"'
"""Arguments: word, path. Output: the size, a newline, the content."""

_STARTED = (
    "started() { if [ -e /proc/self/stat ]; then { read -r b </proc/sys/kernel/random/boot_id && "
    'read -r l <"/proc/$1/stat"; } 2>/dev/null || return 1; set -- ${l##*) }; case $1 in Z|X) return 1;; esac; '
    'shift 19; printf %s "$b:$1"; else set -- $(LC_ALL=C ps -o lstart= -p "$1"); '
    '[ $# -gt 0 ] && printf %s "$*"; fi; }; '
)
"""When a process started: boot and clock ticks since, from /proc; without one, ps's date. Fails when it is gone.

The name in /proc/PID/stat may hold anything, so the fields are counted from behind its last parenthesis."""

_BORN = (
    _STARTED + 'printf "%s %s\\n" "$$" "$(started $$)" >&3; eval "$PSCTL_START_ENV"; unset PSCTL_START_ENV; '
    'exec "$@" 3>&-'
)

START = (
    _HELLO + "PSCTL_START_ENV=$(cat); export PSCTL_START_ENV; l=$1 c=$2 i=$3; shift 3; "
    '(umask 077; mkdir -p -- "$(dirname -- "$l")" && : >>"$l") && cd -- "$c" || exit 1; '
    'command -v setsid >/dev/null || { echo "setsid (util-linux) is missing" >&2; exit 1; }; '
    'if setsid -f true 2>/dev/null; then r=$(setsid -f sh -c "$i" psctl "$@" 3>&1 >>"$l" 2>&1 </dev/null); '
    'else r=$(setsid sh -c "$i" psctl "$@" 3>&1 >>"$l" 2>&1 </dev/null &); fi; printf "%s\\n" "$r"'
)
"""Arguments: word, log, folder, BORN, command... Input: `export K=quoted` lines, which no process list shows.

`setsid -f` and not `&`: a shell without job control starts `&` with SIGINT ignored for good."""

START_IN_STEP = (
    _HELLO + "PSCTL_START_ENV=$(cat); export PSCTL_START_ENV; l=$1 c=$2 i=$3; shift 3; "
    '(umask 077; mkdir -p -- "$(dirname -- "$l")" && : >>"$l") && cd -- "$c" || exit 1; '
    'exec sh -c "$i" psctl "$@" 3>&1 >>"$l" 2>&1 </dev/null'
)
"""As START, for a script that OVER_COMMAND gave a session: the process takes its place, and the child carries it on."""

BORN = _BORN

ALIVE = _HELLO + _STARTED + 'if [ "$(started "$1")" = "$2" ]; then echo yes; else echo no; fi'
"""Arguments: word, pid, start time. Output: yes or no."""

SIGNAL = (
    _HELLO
    + _STARTED
    + 'if [ "$(started "$1")" = "$2" ] && kill "-$3" "$1" 2>/dev/null; then echo yes; else echo no; fi'
)
"""Arguments: word, pid, start time, signal number. Output: yes or no."""

TAIL = (
    'until [ -e "$1" ] && [ "$(wc -c <"$1")" -ge "$2" ]; do sleep 0.1 2>/dev/null || sleep 1; done; '
    'exec tail -c "+$(($2 + 1))" -f -- "$1"'
)
"""Arguments: path, offset. Run under GUARD."""

_OVER = (
    'if [ -z "${HOME-}" ]; then HOME=$(eval "echo ~$(id -un)"); export HOME; fi; cd || exit 1; '
    "unset SSH_CONNECTION SSH_CLIENT; m=$1; IFS= read -r P; "
    'if [ -z "$P" ]; then echo "no standard input arrives: does the command in exec: need -i?" >&2; exit 1; fi; '
    'printf "\\n%s begin\\n" "$m" >&2; N=$(printf "\\n_"); N=${N%_}; eval "set -- $P"; '
    'setsid "$@"; s=$?; printf "\\n%s end %s\\n" "$m" "$s" >&2; '
)

OVER_COMMAND = _OVER + 'exit "$s"'
"""Arguments: word. First line of its input: the command, quoted, with "$N" for newlines; `kind: command` runs it.

The command gets a session of its own, as sshd would give it: GUARD kills its process group. `setsid` is not the last
command, so sh forks for it, and it does not fork itself. The two lines on standard error tell the end of the command
from the end of what carries it. A SSH_CONNECTION there is psctl's own, which the child inherited.
"""

OVER_STEP = _OVER + '[ "$s" = 0 ] || sleep 0.2 2>/dev/null || sleep 1; exit "$s"'
"""As OVER_COMMAND, for a step of a batch system. srun lost the last lines of 4 of 15 commands that failed while input
for them was on its way; of 40 that ended a moment after these lines, none."""
