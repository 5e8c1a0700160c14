"""The command line: verbs, global options, and the one place where an error becomes an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer
from typer.main import get_command

import psctl
from psctl.cli.commands import (
    attach,
    bench,
    checkpoint,
    doctor,
    down,
    init,
    jobs,
    list_clusters,
    logs,
    plan,
    scale,
    status,
    stop,
    store,
    topo,
    train,
    up,
    use,
    validate,
)
from psctl.cli.shared import completion
from psctl.cli.shared.context import Context, Told, print_json, quiet_pipe
from psctl.cli.shared.global_options import Options, output_of, split
from psctl.cli.shared.signals import Terminated
from psctl.errors import PsctlError, UsageError

_ClickError: type[Exception] = typer.BadParameter.__mro__[2]  # ClickException, wherever typer has its click from

GLOBALS = "Global options (psctl --help) may stand before or after any command: -o json, -q, -v, -y, --debug ..."

VERBS = (
    init, validate, doctor, up, down, use, list_clusters, topo, plan, train, attach, logs, status, jobs, stop, scale,
    store, checkpoint, bench,
)  # fmt: skip
"""In the order of a user's way through them."""


def make_app() -> typer.Typer:
    """Return the application."""
    app = typer.Typer(
        name="psctl",
        help="Distributed training over SSH: looks at your machines, picks the fastest way to synchronise, runs it.\n\n"
        "Three commands from nothing to a run: pip install psctl; psctl init mine; psctl train mine/job.yaml",
        epilog="Exit codes: 0 done, 1 job failed, 2 usage, 3 unreachable, 4 host not fit, 5 timed out, 6 not found, "
        "7 busy, 8 host key, 9 checkpoint, 10 partial.",
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    )
    app.callback()(root)
    for module in VERBS:
        name = module.__name__.rpartition(".")[2]
        if isinstance(module.VERB, typer.Typer):
            app.add_typer(module.VERB, name=name, epilog=GLOBALS)
        else:
            app.command(name=name, epilog=GLOBALS)(module.VERB)
    return app


def root(
    context: typer.Context,
    output: Annotated[
        str,
        typer.Option(
            "-o",
            "--output",
            metavar="table|json|jsonl",
            envvar="PSCTL_OUTPUT",
            help="How to print results; topo draws dot and svg, too.",
        ),
    ] = "table",
    no_color: Annotated[bool, typer.Option("--no-color", help="Print without colour (as NO_COLOR=1).")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print results and errors only.")] = False,
    verbose: Annotated[
        int, typer.Option("-v", "--verbose", count=True, help="Say which cluster is meant and how hosts were reached.")
    ] = 0,
    debug: Annotated[bool, typer.Option("--debug", help="Print the traceback of an error.")] = False,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Say yes to every question.")] = False,
    no_input: Annotated[bool, typer.Option("--no-input", help="Never ask; fail where a question would come.")] = False,
    timeout: Annotated[
        str | None, typer.Option("--timeout", metavar="DUR", help="Longest wait to reach a host, such as 30s.")
    ] = None,
    forks: Annotated[int, typer.Option("--forks", help="Hosts that are worked on at once.")] = 16,
    version: Annotated[bool, typer.Option("--version", help="Print psctl's version.")] = False,
) -> None:
    """Read the options that every command has."""
    assert not version, "answered before the command line is read"
    options = Options(
        output=output, no_color=no_color, quiet=quiet, verbose=verbose, debug=debug, yes=yes, no_input=no_input,
        timeout=timeout, forks=forks, verb=context.invoked_subcommand or "",
    )  # fmt: skip
    context.obj = Context(options, os.environ, context.obj or ())


def run(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
    """Run one command line and return its exit code."""
    output = output_of(arguments, os.environ if environment is None else environment)
    code = 0  # kept when the reader of stdout goes away
    with quiet_pipe():
        code = _run(list(arguments), output, "--debug" in arguments)
    return code  # noqa: RET504


def _run(arguments: list[str], output: str, debug: bool) -> int:
    try:
        front, rest = split(arguments)
        if "--version" in front:
            return _version(output)
        command = get_command(make_app())
        if "_PSCTL_COMPLETE" in os.environ:
            return completion.answer(command, os.environ)
        with command.make_context("psctl", [*front, *rest], obj=arguments) as context:
            code = command.invoke(context)
        return code if isinstance(code, int) else 0
    except typer.Exit as leaving:
        return int(leaving.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        return _interrupted(130, output)
    except Terminated:
        return _interrupted(143, output)
    except Told as told:
        return _report(told.error, output, debug, told=True)
    except PsctlError as error:
        return _report(error, output, debug)
    except _ClickError as error:
        return _usage(error, output, debug)
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001 - the last resort: a defect of ours, said in one line like any error
        defect = PsctlError(f"psctl has a defect: {type(error).__name__}: {error}", hint="--debug shows where it is")
        defect.__cause__ = error
        return _report(defect, output, debug)


def _interrupted(code: int, output: str) -> int:
    """Ctrl-C or SIGTERM before there was a job, or in a short command: what was begun has been undone."""
    error = PsctlError("interrupted", hint="what was begun was undone")
    error.code, error.exit = "interrupted", code
    if output != "table":
        print_json(error.document())
    return code


def _version(output: str) -> int:
    if output == "table":
        print(f"psctl {psctl.__version__}")
    else:
        print_json({"version": psctl.__version__})
    return 0


def _usage(error: Exception, output: str, debug: bool) -> int:
    """What typer refuses is a usage error like any other; a bare `psctl` gets the help."""
    said = error.format_message() if hasattr(error, "format_message") else str(error)
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        if output == "table":
            print(said)
            return 2
        said = "no command was given"
    path = getattr(context, "command_path", "psctl") or "psctl"
    return _report(UsageError(said.rstrip("."), hint=f"{path} --help"), output, debug)


def _report(error: PsctlError, output: str, debug: bool, *, told: bool = False) -> int:
    """Say what went wrong: two lines on stderr, or a document on stdout unless it was `told` with the results."""
    if debug:
        from psctl.view.text import sanitize

        sys.stderr.write(sanitize("".join(traceback.format_exception(error))))  # a host's words may be in it
    if output == "table":
        from psctl.view.console import make_console
        from psctl.view.failure import draw_error

        draw_error(make_console(sys.stderr), error)
    elif not told:
        print_json(error.document())
    return error.exit
