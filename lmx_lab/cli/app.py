"""The command line itself, and what all commands share: printing, words of help, logging."""

from __future__ import annotations

import gc
import logging
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from lmx_lab.cli.parsing import Commands
from lmx_lab.cli.terminal import shown
from lmx_lab.errors import LabError
from lmx_lab.sanitize import LogFormatter

__all__ = [
    "app",
    "complain",
    "epilog",
    "err",
    "keep_what_is_made",
    "note",
    "out",
    "say",
    "start_logging",
]

STATUS = "0 if all went well, 1 if it failed, 2 if an argument or a setting cannot be, 130 after Ctrl-C"


def epilog(*examples: str, needs: str = "", status: str = STATUS) -> str:
    """What stands below a command's options: what it needs, examples, what its exit status means."""
    lines = [f"Needs {needs}.\n"] if needs else []
    lines += ["Examples:", *(f"  {each}" for each in examples), f"\nExit status: {status}."]
    return escape("\n".join(lines))


app = typer.Typer(
    name="lmx-lab",
    cls=Commands,
    help="Local language models on MLX and llama.cpp: serve them, talk to them, measure them, see what is there.\n\n"
    "The first steps are the first two examples below. What is wrong on this machine, lmx-lab doctor says.",
    epilog=epilog(
        "lmx-lab serve --model smollm2-135m   a server; the model is fetched once",
        "lmx-lab bench --model smollm2-135m   its tokens per second",
        "lmx-lab daemon                       sessions and tools, beside the server",
        "lmx-lab chat 'Say hello.'            a conversation, which daemon keeps",
        "lmx-lab serve --help                 more of a command, with examples",
        "lmx-lab --install-completion         the Tab key: options, models, sessions",
        status=f"{STATUS}. Errors are on standard error, a line each, code first; results are on standard output",
    ),
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,
)
out = Console(soft_wrap=True)
err = Console(stderr=True, soft_wrap=True)


def _say_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # 20 ms, needed only here

        say(f"lmx-lab {version('lmx-lab')}")
        raise typer.Exit


@app.callback()
def common(
    *,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_say_version, help="Say the version, and exit.")
    ] = False,
) -> None:
    # Without a docstring: the help is the application's.
    del version


def say(text: str, *, style: str | None = None) -> None:
    """One line as it is: names and paths may contain what rich takes for markup."""
    out.print(shown(text), style=style, markup=False, highlight=False)


def note(text: str) -> None:
    """What is about a command's output, and not of it."""
    err.print(shown(text), style="dim", markup=False, highlight=False)


def complain(exc: LabError) -> None:
    """One line with the error's code and message, which a server may have said."""
    err.print(Text.assemble((shown(exc.code), "bold red"), f": {shown(exc.message)}"), highlight=False)


def start_logging(level: str) -> None:
    logging.basicConfig(level=level.upper())
    for handler in logging.getLogger().handlers:
        handler.setFormatter(LogFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in ("httpx", "httpx2", "httpcore2", "filelock"):
        logging.getLogger(name).setLevel(logging.WARNING)


def keep_what_is_made() -> None:
    """Look for garbage only among what is made from here on: a full look at all modules stops everything for 50 ms."""
    gc.collect()
    gc.freeze()
