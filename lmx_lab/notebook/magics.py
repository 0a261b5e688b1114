"""What ``%load_ext lmx_lab`` adds to a notebook: ``%%offload`` for busy cells, ``%lmx`` and ``%%lmx`` for the lab."""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextvars
import re
import shlex
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from types import CodeType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, cast

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_cell_magic, magics_class, no_var_expand
from IPython.utils.text import DollarFormatter

from lmx_lab.errors import LabError

if TYPE_CHECKING:
    from lmx_lab.notebook import Lab

CALL = "get_ipython().run_cell_magic('offload', "
"""How IPython writes a cell that begins with ``%%offload``."""
AWAITED = "--awaited"
BEAT_S = 0.1
"""How often a waiting cell looks up: an interrupt does not wake a loop on which nothing happens."""
NO_AWAIT = (
    "%%offload runs its cell in a thread, where nothing can be awaited. Take the await out of the cell, or the "
    "%%offload: what is awaited does not keep the kernel's loop busy."
)
NOT_AWAITED = (
    "%%offload has to be the first line of its cell, with %autoawait on; in code, "
    f"await get_ipython().run_cell_magic('offload', {AWAITED!r}, text)."
)
GOES_ON = (
    "%%offload: nobody waits for this cell any more, but its thread goes on. Only a restart of the kernel ends it."
)


def register(shell: InteractiveShell) -> None:
    """Add the magics to a shell; doing it again changes nothing."""
    unregister(shell)
    shell.register_magics(LabMagics)
    # Not among those for cleaning up, which come before IPython turns cells with a magic into calls.
    shell.input_transformers_post.append(Awaiting(shell))
    shell.input_transformers_cleanup.append(Questions())


def unregister(shell: InteractiveShell) -> None:
    """Take them away again."""
    # By name: after a reload the class is another one.
    for transformers in (shell.input_transformers_post, shell.input_transformers_cleanup):
        transformers[:] = [
            it for it in transformers if type(it).__name__ not in (Awaiting.__name__, Questions.__name__)
        ]
    for kind, name in (("cell", "offload"), ("line", "lmx"), ("cell", "lmx")):
        shell.magics_manager.magics[kind].pop(name, None)


# %%offload


@dataclass(frozen=True)
class Awaiting:
    """Puts ``await`` before the call of ``%%offload``: a magic itself cannot be awaited."""

    shell: InteractiveShell

    def __call__(self, lines: list[str]) -> list[str]:
        # Within a running cell, such as one that begins with %%time, nothing could be awaited.
        runs = cast(Any, self.shell.displayhook).exec_result is not None
        if runs or len(lines) != 1 or not lines[0].startswith(CALL) or not self.shell.autoawait:
            return lines
        return [f"await {CALL}'{AWAITED} ' {lines[0].removeprefix(CALL)}"]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A cell's code in two parts."""

    statements: CodeType
    value: CodeType | None
    """The last expression, if there is one and it is to be shown."""

    def run(self, shell: InteractiveShell) -> Any:
        exec(self.statements, shell.user_global_ns, shell.user_ns)
        return None if self.value is None else eval(self.value, shell.user_global_ns, shell.user_ns)


def compiled(shell: Any, text: str) -> Cell:
    """The text below ``%%offload`` as code whose lines have the numbers that the notebook shows.

    Raises:
        UsageError: it awaits something.
        SyntaxError: it is no Python.
    """
    source = shell.transform_cell(text)
    # What IPython has taken away from the beginning.
    blank = len(text) - len(text.lstrip("\n"))
    running = shell.displayhook.exec_result
    number = running.execution_count if running else shell.execution_count
    # As IPython has called the whole cell, so that its first line is shown as it was written.
    name = shell.compile.cache("%%offload\n" + "\n" * blank + source, number, f"%%offload\n{text}".removesuffix("\n"))
    tree = shell.transform_ast(shell.compile.ast_parse("\n" * (blank + 1) + source, name))
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr) or shell.displayhook.semicolon_at_end_of_expression(source):
        return Cell(statements=_code(shell, tree, name, "exec"), value=None)
    value = _code(shell, ast.Expression(last.value), name, "eval")
    del tree.body[-1]
    return Cell(statements=_code(shell, tree, name, "exec"), value=value)


def _code(shell: Any, tree: ast.AST, name: str, mode: str) -> CodeType:
    try:
        return cast(CodeType, shell.compile(tree, name, mode))
    except SyntaxError:
        with shell.compile.extra_flags(ast.PyCF_ALLOW_TOP_LEVEL_AWAIT):
            shell.compile(tree, name, mode)
        raise UsageError(NO_AWAIT) from None


async def offloaded(shell: InteractiveShell, cell: Cell) -> Any:
    """Run a cell in a thread of its own, and wait for its value without keeping the loop busy.

    Raises:
        KeyboardInterrupt: the wait was ended; the thread goes on.
    """
    # From IPython's tracebacks, which show the cell before and after.
    __tracebackhide__ = True
    outcome = in_thread(lambda: cell.run(shell))
    done = asyncio.wrap_future(outcome)
    try:
        while not done.done():
            await asyncio.wait([done], timeout=BEAT_S)
    except asyncio.CancelledError:
        # What ipykernel makes of an interrupt of a cell that awaits.
        print(GOES_ON, file=sys.stderr)
        outcome.add_done_callback(_tell_late_error)
        raise KeyboardInterrupt from None
    value, error = done.result()
    if isinstance(error, StopIteration):
        raise Stopped(*error.args).with_traceback(error.__traceback__) from None
    if error is not None:
        raise error
    return value


class Stopped(Exception):
    """The ``StopIteration`` of a cell, by its name: Python lets none of those out of what is awaited."""


Stopped.__name__ = Stopped.__qualname__ = StopIteration.__name__


Outcome = tuple[Any, BaseException | None]


def in_thread(work: Callable[[], Any]) -> Future[Outcome]:
    """Run it in a thread whose output goes where the caller's goes; neither an interrupt nor an exit waits for it."""
    # Not asyncio.to_thread: the interpreter waits for the threads of that pool before it ends.
    outcome: Future[Outcome] = Future()
    outcome.set_running_or_notify_cancel()
    context = contextvars.copy_context()

    def main() -> None:
        context.run(lambda: outcome.set_result(_outcome(work)))

    threading.Thread(target=main, name="lmx-lab-offload", daemon=True).start()
    return outcome


def _outcome(work: Callable[[], Any]) -> Outcome:
    # As a value: a future does not take every exception, StopIteration for one.
    try:
        return work(), None
    except BaseException as exc:
        return None, exc.with_traceback(_from_the_cell(exc.__traceback__))


def _from_the_cell(trace: TracebackType | None) -> TracebackType | None:
    """Without the frames that led to the cell."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _tell_late_error(outcome: Future[Outcome]) -> None:
    _, error = outcome.result()
    if error is not None:
        print(f"%%offload: the thread has ended with {type(error).__name__}: {error}", file=sys.stderr)


# %lmx and %%lmx


QUESTION = re.compile(
    r"""
    ^(?P<before>[ \t]*(?:[\w.,\ ]+=[ \t]*)?)%lmx[ \t]+(?P<text>ask[ \t].*\?)[ \t]*$
    | ^[ \t]*[%!].*$  # other commands of IPython's, whose quotation marks need no partner
    | (?P<quotes>\"{3}|'{3})(?:\\[\s\S]|[^\\])*?(?:(?P=quotes)|\Z)
    | \"(?:\\[\s\S]|[^\"\\\n])*\" | '(?:\\[\s\S]|[^'\\\n])*'
    | \#[^\n]*
    """,
    re.MULTILINE | re.VERBOSE,
)
"""One, as a line of its own; or what may hold something that only looks like it."""


class Questions:
    """Keeps ``%lmx ask ... ?`` from IPython, which takes a question mark at the end of a line for a wish for help."""

    def __call__(self, lines: list[str]) -> list[str]:
        # Below a cell magic is its text, which is not ours.
        if lines and lines[0].startswith("%%"):
            return lines
        return QUESTION.sub(self._kept, "".join(lines)).splitlines(keepends=True)

    def _kept(self, found: re.Match[str]) -> str:
        if found["text"] is None:
            return found[0]
        return f"{found['before']}get_ipython().run_line_magic('lmx', {found['text']!r})"


@magics_class
class LabMagics(Magics):
    @no_var_expand
    @cell_magic
    def offload(self, line: str, cell: str) -> Any:
        """Run the cell in a thread, so that a server on the kernel's loop goes on answering.

        Everything else is as without it: the same variables, the last expression is shown, output and errors appear
        in this cell. What is not possible in a thread: ``await``. The stop button ends the waiting, not the thread.
        """
        first, *rest = line.split() or [""]
        if first != AWAITED:
            raise UsageError(NOT_AWAITED)
        if rest:
            raise UsageError(f"%%offload takes no arguments, and was given {' '.join(rest)!r:.80}")
        return offloaded(self._shell, compiled(self._shell, cell))

    @line_cell_magic
    def lmx(self, line: str, cell: str | None = None) -> Any:
        """The lab in one line, or a cell that is a prompt.

        ::

            %lmx                               show the lab that runs
            %lmx launch [MODEL] [--loop auto|kernel|thread] [--lan] [--port N]
            %lmx load MODEL                    in the place of what is loaded
            %lmx unload
            %lmx models                        what is on disk, what is loaded
            %lmx panel
            %lmx stop
            %lmx ask TEXT                      ask the loaded model

            %%lmx [--max-tokens N] [--temperature T] [--system TEXT] [--raw]
            Text over several lines, in which {expression} and $name stand for values, unless --raw is given.

        An answer is shown as it comes; in the end it is a ``Reply``, also as ``_``.
        """
        try:
            return self._verb(line.strip()) if cell is None else self._prompt(line, cell)
        except LabError as exc:
            # What to do next is in the message; where it was raised helps nobody.
            raise UsageError(exc.message) from exc

    def _prompt(self, line: str, cell: str) -> Any:
        options = _parsed(CELL, line)
        prompt = cell if options.pop("raw") else self._expanded(cell)
        return self._ask(prompt, **{name: value for name, value in options.items() if value is not None})

    def _verb(self, line: str) -> Any:
        word, _, text = line.partition(" ")
        if word == "ask":
            # A text is no list of arguments: it has apostrophes.
            return self._ask(text)
        options = _parsed(LINE, line)
        verb = options.pop("verb")
        return getattr(self, f"_{verb or 'show'}")(**options)

    def _show(self) -> Lab | None:
        from lmx_lab.notebook import current

        lab = current()
        if lab is None:
            print("No lab runs in this kernel; %lmx launch MODEL starts one, such as %lmx launch smollm2-135m.")
        return lab

    def _launch(self, **options: Any) -> Lab:
        from lmx_lab.notebook import launch

        return launch(**options)

    def _load(self, *, model: str) -> Any:
        return _lab().load(model)

    def _unload(self) -> None:
        print(f"{_lab().unload():.2f} GB freed.")

    def _models(self) -> Any:
        return _lab().models()

    def _panel(self) -> Any:
        return _lab().panel()

    def _stop(self) -> None:
        lab = _lab()
        lab.stop()
        print(f"The server at {lab.url} was stopped.")

    def _ask(self, prompt: str, **parameters: Any) -> Any:
        if not prompt.strip():
            raise UsageError("there is no text; %lmx ask TEXT, or %%lmx with the text below it")
        if getattr(self._shell, "kernel", None) is None:
            # A terminal cannot take back what was streamed, and would show it twice.
            return _lab().chat(prompt, **parameters)
        stream = _lab().chat(prompt, stream=True, **parameters)
        for piece in stream:
            print(piece, end="")
        # With the next output, which is the reply.
        cast(Any, self._shell).display_pub.clear_output(wait=True)
        return stream.reply

    def _expanded(self, text: str) -> str:
        try:
            return DollarFormatter().vformat(text, args=[], kwargs=self._shell.user_ns)
        except Exception:
            # As with IPython's own magics: text that only looks like a format stays as it is.
            return text

    @property
    def _shell(self) -> InteractiveShell:
        assert self.shell is not None
        return self.shell


class _Parser(argparse.ArgumentParser):
    """One whose mistakes do not end the kernel."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs, add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (%lmx? shows what there is)")


def _lab() -> Lab:
    from lmx_lab.notebook import current

    lab = current()
    if lab is None:
        raise UsageError("no lab runs in this kernel; %lmx launch MODEL starts one")
    return lab


def _parsed(parser: _Parser, line: str) -> dict[str, Any]:
    """
    Raises:
        UsageError: what is wrong, and where the help is.
    """
    try:
        return vars(parser.parse_args(shlex.split(line)))
    except ValueError as exc:
        # An apostrophe or a quotation mark without its partner.
        parser.error(str(exc))


def _line_parser() -> _Parser:
    parser = _Parser(prog="%lmx")
    verbs = parser.add_subparsers(dest="verb", metavar="verb")
    launch = verbs.add_parser("launch")
    launch.add_argument("model", nargs="?")
    launch.add_argument("--loop", choices=("auto", "kernel", "thread"), default="auto")
    launch.add_argument("--lan", action="store_true")
    launch.add_argument("--port", type=int)
    verbs.add_parser("load").add_argument("model")
    # ask: only so that it is among the choices that a mistake is told.
    for name in ("ask", "unload", "models", "panel", "stop"):
        verbs.add_parser(name)
    return parser


def _cell_parser() -> _Parser:
    parser = _Parser(prog="%%lmx")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--system")
    parser.add_argument("--raw", action="store_true")
    return parser


LINE, CELL = _line_parser(), _cell_parser()
