"""The command line: the commands, the global options, and the place where an error becomes an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Protocol, cast

import typer
from typer.core import TyperGroup
from typer.main import get_command

import psctl
from psctl.cli.commands.attach import attach
from psctl.cli.commands.bench import bench
from psctl.cli.commands.checkpoint import checkpoint
from psctl.cli.commands.clusters import clusters
from psctl.cli.commands.doctor import doctor
from psctl.cli.commands.down import down
from psctl.cli.commands.explain import explain
from psctl.cli.commands.init import init
from psctl.cli.commands.jobs import jobs
from psctl.cli.commands.logs import logs
from psctl.cli.commands.plan import plan
from psctl.cli.commands.profile import profile
from psctl.cli.commands.pull import pull
from psctl.cli.commands.report import report
from psctl.cli.commands.run import run as run_command
from psctl.cli.commands.scale import scale
from psctl.cli.commands.ssh import ssh
from psctl.cli.commands.stacks import stacks
from psctl.cli.commands.status import status
from psctl.cli.commands.stop import stop
from psctl.cli.commands.store import store
from psctl.cli.commands.topo import topo
from psctl.cli.commands.trace import trace
from psctl.cli.commands.train import train
from psctl.cli.commands.ui import ui
from psctl.cli.commands.up import up
from psctl.cli.commands.use import use
from psctl.cli.commands.validate import validate
from psctl.cli.shared import completion
from psctl.cli.shared.context import ReportedError, print_json, quiet_pipe
from psctl.cli.shared.global_options import Click, output_of, share_options
from psctl.cli.shared.signals import Terminated
from psctl.errors import PsctlError, UsageError

_ClickError: type[Exception] = typer.BadParameter.__mro__[2]  # ClickException, wherever typer has its click from


class ClickFailure(Protocol):
    """The method of `_ClickError` that is called here."""

    def format_message(self) -> str: ...


GLOBALS = "Global options (psctl --help) may stand before or after any command: -o json, -q, -v, -y, --debug ..."

GROUPS: dict[str, tuple[Callable[..., object] | typer.Typer, ...]] = {
    "Begin": (init, validate, explain),
    "Machines": (doctor, up, down, use, clusters, topo, run_command),
    "Predict and measure": (plan, bench),
    "Train": (train, attach, stop, scale),
    "Watch": (status, jobs, logs, stacks, trace, profile, ssh, store, ui, report),
    "Save and restore": (checkpoint, pull),
}
"""The commands by what they are for, in the order in which a user needs them."""


class GroupedCommands(TyperGroup):
    """The root command; its help lists the commands in groups."""

    def format_commands(self, ctx: Click, formatter: Click) -> None:
        """Write a section for each group."""
        longest = max(map(len, self.commands))
        for title, members in GROUPS.items():
            names = [name_of(member) for member in members]
            with formatter.section(title):
                summaries = [self.commands[name].get_short_help_str(formatter.width - 6 - longest) for name in names]
                formatter.write_dl([(name.ljust(longest), text) for name, text in zip(names, summaries, strict=True)])


def name_of(member: Callable[..., object] | typer.Typer) -> str:
    """Return the name of a command or of a group of commands."""
    return str(member.info.name) if isinstance(member, typer.Typer) else member.__name__


def make_command() -> TyperGroup:
    """Return the root command, `psctl`, with all commands below it."""
    app = typer.Typer(
        name="psctl",
        cls=GroupedCommands,
        help="Distributed training over SSH: measures your machines, chooses how to synchronize, runs the job.\n\n"
        "Three commands from nothing to a run: pip install psctl; psctl init mine; psctl train mine/job.yaml",
        epilog="Exit codes: 0 done, 1 job failed, 2 usage, 3 unreachable, 4 host not fit, 5 timed out, 6 not found, "
        "7 busy, 8 host key, 9 checkpoint, 10 partial.",
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    )
    app.callback()(root)
    for verb in (member for members in GROUPS.values() for member in members):
        if isinstance(verb, typer.Typer):
            app.add_typer(verb, epilog=GLOBALS)
        else:
            app.command(name=verb.__name__, epilog=GLOBALS)(verb)
    command = get_command(app)
    assert isinstance(command, TyperGroup), "an application with several commands"
    share_options(command)
    return command


def _print_version(context: typer.Context, asked: bool) -> None:
    """Print the version and exit."""
    if not asked:
        return
    if context.find_root().params.get("output", "table") == "table":
        print(f"psctl {psctl.__version__}")
    else:
        print_json({"version": psctl.__version__})
    raise typer.Exit


def root(
    output: Annotated[
        str,
        typer.Option(
            "-o",
            "--output",
            metavar="table|json|jsonl",
            envvar="PSCTL_OUTPUT",
            help="Format of results; topo also has dot and svg.",
            is_eager=True,  # --version prints in this format
            callback=lambda value: value.removeprefix("="),  # of -o=json
        ),
    ] = "table",
    no_color: Annotated[bool, typer.Option("--no-color", help="Print without colour, as with NO_COLOR=1.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print only results and errors.")] = False,
    verbose: Annotated[
        int, typer.Option("-v", "--verbose", count=True, help="Print which cluster is used and how hosts are reached.")
    ] = 0,
    debug: Annotated[bool, typer.Option("--debug", help="Print the traceback of an error.")] = False,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Answer yes to every question.")] = False,
    no_input: Annotated[
        bool, typer.Option("--no-input", help="Never ask a question; fail where one is needed.")
    ] = False,
    timeout: Annotated[
        str | None, typer.Option("--timeout", metavar="DUR", help="Longest wait to reach a host, such as 30s.")
    ] = None,
    forks: Annotated[int, typer.Option("--forks", help="Number of hosts to work on at once.")] = 16,
    version: Annotated[bool, typer.Option("--version", help="Print psctl's version.", callback=_print_version)] = False,
) -> None:
    """Declare the global options; `GlobalOptions.of` reads them once the command has been parsed."""


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    code = 0  # kept when the reader of stdout closes it
    with quiet_pipe():
        code = _run(list(arguments))
    return code  # noqa: RET504


def _run(arguments: list[str]) -> int:
    command = make_command()
    if "_PSCTL_COMPLETE" in os.environ:
        return completion.answer(command, os.environ)
    output, debug = output_of(command, arguments, os.environ), "--debug" in arguments
    try:
        with command.make_context("psctl", list(arguments), obj=arguments) as context:
            code = command.invoke(context)
        return code if isinstance(code, int) else 0
    except typer.Exit as leaving:
        return int(leaving.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        return _interrupted(130, output)
    except Terminated:
        return _interrupted(143, output)
    except ReportedError as reported:
        return _report(reported.error, output, debug, in_results=True)
    except PsctlError as error:
        return _report(error, output, debug)
    except _ClickError as error:
        return _usage(cast(ClickFailure, error), output, debug)
    except BrokenPipeError:
        raise
    except (OSError, RuntimeError) as error:
        return _report(_of_system(error), output, debug)
    except Exception as error:  # noqa: BLE001 - the last resort: a defect of psctl is reported in one line, as any error
        return _report(_defect(error), output, debug)


def _defect(error: Exception) -> PsctlError:
    defect = PsctlError(f"psctl has a defect: {type(error).__name__}: {error}", hint="--debug shows where it is")
    defect.__cause__ = error
    return defect


def _of_system(error: OSError | RuntimeError) -> PsctlError:
    from psctl.cli.shared.system_errors import of_system
    from psctl.launch.home import folder_of

    found = of_system(error, folder_of(os.environ))
    if found is None:
        return _defect(error)
    found.__cause__ = error
    return found


def _interrupted(code: int, output: str) -> int:
    """Report Ctrl-C or SIGTERM in a command that follows no job; the command has undone its changes."""
    error = PsctlError("interrupted", hint="the changes of this command were undone")
    error.code, error.exit = "interrupted", code
    if output != "table":
        print_json(error.document())
    return code


def _usage(error: ClickFailure, output: str, debug: bool) -> int:
    """Report an error of typer's as any usage error; for a bare `psctl`, print the help."""
    message = error.format_message()
    if type(error).__name__ == "NoArgsIsHelpError":
        if output == "table":
            print(message)
            return 2
        message = "no command was given"
    context = getattr(error, "ctx", None)
    path = getattr(context, "command_path", "psctl") or "psctl"
    return _report(UsageError(message.rstrip("."), hint=f"{path} --help"), output, debug)


def _report(error: PsctlError, output: str, debug: bool, *, in_results: bool = False) -> int:
    """Print an error on stderr, or as a document on stdout unless it is `in_results` already; return the exit code."""
    if debug:
        from psctl.view.text import sanitize

        sys.stderr.write(sanitize("".join(traceback.format_exception(error))))  # it may quote output of a host
    if output == "table":
        from psctl.view.console import make_console
        from psctl.view.failure import draw_error

        draw_error(make_console(sys.stderr), error)
    elif not in_results:
        print_json(error.document())
    return error.exit
