"""Put the commands together, and run one of them: streams, errors and exit statuses."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, TextIO

import typer

from lmx_lab.cli import (
    FAILED,
    INTERRUPTED,
    SUCCESS,
    USAGE,
    bench,
    chat,
    daemon,
    doctor,
    events,
    labs,
    models,
    serve,
)
from lmx_lab.cli.options import STATUS, CommandGroup, epilog
from lmx_lab.cli.terminal import print_error, print_line
from lmx_lab.errors import InvalidRequestError, LabError

app = typer.Typer(
    name="lmx-lab",
    cls=CommandGroup,
    help="Serve local language models on MLX and llama.cpp, chat with them and measure them.\n\n"
    "Start with the first two examples below. Run lmx-lab doctor to check this machine.",
    epilog=epilog(
        "lmx-lab serve --model smollm2-135m   start a server; downloads the model once",
        "lmx-lab bench --model smollm2-135m   measure its tokens per second",
        "lmx-lab daemon                       add sessions and tools to the server",
        "lmx-lab chat 'Say hello.'            chat in a session of the daemon",
        "lmx-lab serve --help                 show the options of a command",
        "lmx-lab --install-completion         complete options, models and sessions",
        status=f"{STATUS}. Results go to standard output, errors to standard error, one line each with the code first",
    ),
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
# In the order in which --help lists them.
for _module in (serve, labs, daemon, chat, events, bench, models, doctor):
    app.add_typer(_module.app)


def _print_version(is_given: bool) -> None:
    if is_given:
        # Imported here, because it takes 20 ms.
        from importlib.metadata import version

        print_line(f"lmx-lab {version('lmx-lab')}")
        raise typer.Exit


@app.callback()
def common(
    *,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    # Without a docstring, which would replace the help of the application.
    del version


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command. A ``LabError`` is printed as one line, an interrupt prints nothing; neither prints a traceback.

    Args:
        arguments: By default those of the process.

    Returns:
        The exit status.
    """
    failure: OSError | None = None
    try:
        _open_closed_streams()
        app(arguments)
        status = SUCCESS
    except SystemExit as exc:
        status = exc.code if isinstance(exc.code, int) else SUCCESS if exc.code is None else FAILED
    except KeyboardInterrupt:
        status = INTERRUPTED
    except LabError as exc:
        with contextlib.suppress(OSError):
            print_error(exc)
        status = USAGE if type(exc) is InvalidRequestError else FAILED
    except OSError as exc:
        failure, status = exc, FAILED
    return _flush(status, failure)


def _open_closed_streams() -> None:
    """Open ``/dev/null`` for streams that were closed (``>&-``). Otherwise the next file that is opened would get the
    number of the closed stream, and the output would be written to it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdin = sys.stdin or io.TextIOWrapper(io.FileIO(0, closefd=False))
    sys.stdout = sys.stdout or io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
    sys.stderr = sys.stderr or io.TextIOWrapper(io.FileIO(2, "w", closefd=False), write_through=True)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Characters that the encoding of the output lacks are escaped instead of raising an exception.
        sys.stdout.reconfigure(errors="backslashreplace")


def _flush(status: int, failure: OSError | None) -> int:
    """Flush the output and report a failure, unless the reader of the output has closed it, as ``head`` does.

    Returns:
        The exit status.
    """
    try:
        sys.stdout.flush()
    except OSError as exc:
        _discard(sys.stdout)
        failure = failure or exc
    if failure is not None:
        status = status or FAILED
        with contextlib.suppress(OSError):
            if os.environ.get("LMX_LAB_LOG_LEVEL") == "debug":
                traceback.print_exception(failure)
            if failure.errno != errno.EPIPE:
                # Failures to write models and logs are LabErrors, and failures to open a file contain its name.
                is_output = failure.filename is None and failure.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO)
                prefix = "the output cannot be written: " if is_output else ""
                suffix = f": {failure.filename}" if failure.filename else ""
                print(f"{prefix}{failure.strerror or failure}{suffix}", file=sys.stderr, flush=True)
    try:
        sys.stderr.flush()
    except OSError:
        _discard(sys.stderr)
    return status


def _discard(stream: TextIO) -> None:
    """Discard output that could not be written. Otherwise Python would try to write it again at exit, and report an
    error."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
