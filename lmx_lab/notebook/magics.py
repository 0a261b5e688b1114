"""Define the magics of ``%load_ext lmx_lab``: ``%%offload`` runs a cell in a thread; the others use a lab."""

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
from types import CodeType
from typing import TYPE_CHECKING, Any, NoReturn, cast

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_cell_magic, magics_class, no_var_expand
from IPython.utils.text import DollarFormatter

import lmx_lab
from lmx_lab.batch.prompts import RowPrompts
from lmx_lab.errors import LabError

if TYPE_CHECKING:
    from lmx_lab.notebook.lab import Lab

CALL = "get_ipython().run_cell_magic('offload', "
"""The beginning of the code to which IPython transforms a cell with ``%%offload``."""
AWAITED = "--awaited"
"""Argument that ``OffloadTransformer`` adds: the call is awaited."""


def register(shell: InteractiveShell) -> None:
    """Add the magics to a shell. Idempotent."""
    unregister(shell)
    shell.register_magics(LabMagics)
    # Not a cleanup transformer: those run before IPython transforms magics to calls.
    shell.input_transformers_post.append(OffloadTransformer(shell))
    shell.input_transformers_cleanup.append(QuestionTransformer())


def unregister(shell: InteractiveShell) -> None:
    """Remove the magics from a shell. Idempotent."""
    # By name, because a reload creates new classes.
    own = {OffloadTransformer.__name__, QuestionTransformer.__name__}
    for transformers in (shell.input_transformers_post, shell.input_transformers_cleanup):
        transformers[:] = [each for each in transformers if type(each).__name__ not in own]
    for kind, name in (("cell", "offload"), ("line", "lmx"), ("cell", "lmx")):
        shell.magics_manager.magics[kind].pop(name, None)


# %%offload


@dataclass(frozen=True)
class OffloadTransformer:
    """Transforms cells: inserts ``await`` before the call of ``%%offload``, because a magic cannot await."""

    shell: InteractiveShell

    def __call__(self, lines: list[str]) -> list[str]:
        # Inside another magic, such as %%time, await is not possible.
        is_nested = cast(Any, self.shell.displayhook).exec_result is not None
        if is_nested or len(lines) != 1 or not lines[0].startswith(CALL) or not self.shell.autoawait:
            return lines
        return [f"await {CALL}'{AWAITED} ' {lines[0].removeprefix(CALL)}"]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The compiled code of a cell."""

    statements: CodeType
    value: CodeType | None
    """The last expression, if its value is to be displayed."""

    def run(self, shell: InteractiveShell) -> Any:
        exec(self.statements, shell.user_global_ns, shell.user_ns)
        return None if self.value is None else eval(self.value, shell.user_global_ns, shell.user_ns)


def compile_cell(shell: Any, text: str) -> Cell:
    """Compile the text below ``%%offload``, with the line numbers that the notebook displays.

    Raises:
        UsageError: the text contains ``await``.
        SyntaxError: the text is not valid Python.
    """
    source = shell.transform_cell(text)
    # Empty lines at the beginning, which IPython has removed.
    blank = len(text) - len(text.lstrip("\n"))
    running = shell.displayhook.exec_result
    number = running.execution_count if running else shell.execution_count
    # With the source under which IPython has cached the cell, so that tracebacks display its first line as written.
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
        raise UsageError(
            "%%offload runs its cell in a thread, where await is not possible. Remove either the await or the "
            "%%offload: a cell that awaits does not block the kernel's loop."
        ) from None


async def run_offloaded(shell: InteractiveShell, cell: Cell) -> Any:
    """Run a cell in a thread, and return its value without blocking the loop.

    Raises:
        KeyboardInterrupt: the wait was interrupted; the thread keeps running.
    """
    # Hides this function, which is between the frames of the cell, in IPython's tracebacks.
    __tracebackhide__ = True
    outcome = start_thread(lambda: cell.run(shell))
    done = asyncio.wrap_future(outcome)
    try:
        while not done.done():
            # An interrupt does not wake an idle event loop.
            await asyncio.wait([done], timeout=0.1)
    except asyncio.CancelledError:
        # ipykernel cancels a cell that awaits when it is interrupted.
        print(
            "%%offload: the cell no longer waits, but its thread is still running. Only a restart of the kernel ends "
            "it.",
            file=sys.stderr,
        )
        outcome.add_done_callback(_print_late_error)
        raise KeyboardInterrupt from None
    value, error = done.result()
    if isinstance(error, StopIteration):
        raise OffloadedStopIteration(*error.args).with_traceback(error.__traceback__) from None
    if error is not None:
        raise error
    return value


class OffloadedStopIteration(Exception):
    """A ``StopIteration`` of a cell, with the same name, because a coroutine cannot raise a ``StopIteration``."""


OffloadedStopIteration.__name__ = OffloadedStopIteration.__qualname__ = StopIteration.__name__


Outcome = tuple[Any, BaseException | None]
"""The result of a function, and its exception."""


def start_thread(work: Callable[[], Any]) -> Future[Outcome]:
    """Run a function in a daemon thread whose output appears in the caller's cell."""
    # Not asyncio.to_thread: the interpreter waits for the threads of that pool before it exits.
    outcome: Future[Outcome] = Future()
    outcome.set_running_or_notify_cancel()

    def main() -> None:
        # The exception is part of the result, because a future does not accept every exception, such as StopIteration.
        try:
            result: Outcome = work(), None
        except BaseException as exc:
            trace = exc.__traceback__
            # The frames of this module precede those of the cell.
            while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
                trace = trace.tb_next
            result = None, exc.with_traceback(trace)
        outcome.set_result(result)

    # The context of the caller selects the cell of the output, also in the callbacks of the result.
    run = contextvars.copy_context().run
    threading.Thread(target=run, args=(main,), name="lmx-lab-offload", daemon=True).start()
    return outcome


def _print_late_error(outcome: Future[Outcome]) -> None:
    _, error = outcome.result()
    if error is not None:
        print(f"%%offload: the thread ended with {type(error).__name__}: {error}", file=sys.stderr)


# %lmx and %%lmx


QUESTION = re.compile(
    r"""
    ^(?P<before>[ \t]*(?:[\w.,\ ]+=[ \t]*)?)%lmx[ \t]+(?P<text>ask[ \t].*\?)[ \t]*$
    | ^[ \t]*[%!].*$  # other magics and shell commands, in which quotation marks need not be paired
    | (?P<quotes>\"{3}|'{3})(?:\\[\s\S]|[^\\])*?(?:(?P=quotes)|\Z)
    | \"(?:\\[\s\S]|[^\"\\\n])*\" | '(?:\\[\s\S]|[^'\\\n])*'
    | \#[^\n]*
    """,
    re.MULTILINE | re.VERBOSE,
)
"""Matches a question, which is a line of its own, and everything that may contain text that looks like one."""


class QuestionTransformer:
    """Transforms cells: calls ``%lmx ask ...?`` before IPython takes its question mark for a request for help."""

    def __call__(self, lines: list[str]) -> list[str]:
        # The text below a cell magic belongs to that magic.
        if lines and lines[0].startswith("%%"):
            return lines

        def transform(match: re.Match[str]) -> str:
            if match["text"] is None:
                return match[0]
            return f"{match['before']}get_ipython().run_line_magic('lmx', {match['text']!r})"

        return QUESTION.sub(transform, "".join(lines)).splitlines(keepends=True)


@magics_class
class LabMagics(Magics):
    """The magics, registered in one shell."""

    @no_var_expand
    @cell_magic
    def offload(self, line: str, cell: str) -> Any:
        """Run the cell in a thread, so that it does not block the kernel's loop and the tasks on it.

        The cell uses the notebook's variables, the value of its last expression is displayed, and output and errors
        appear below it. ``await`` is not possible. The stop button stops the waiting, not the thread.
        """
        first, *rest = line.split() or [""]
        if first != AWAITED:
            raise UsageError(
                "%%offload has to be the first line of its cell, with %autoawait on; in code, use "
                f"await get_ipython().run_cell_magic('offload', {AWAITED!r}, text)."
            )
        if rest:
            raise UsageError(f"%%offload takes no arguments, but {' '.join(rest)!r:.80} was given")
        return run_offloaded(self._shell, compile_cell(self._shell, cell))

    @line_cell_magic
    def lmx(self, line: str, cell: str | None = None) -> Any:
        """Use the lab in one line, or use a cell as a prompt.

        ::

            %lmx                               display the running lab
            %lmx launch [MODEL] [--loop auto|kernel|thread] [--lan] [--port N]
            %lmx load MODEL                    load a model, which replaces the loaded one
            %lmx unload [--wait|--now]         let running answers finish without a time limit, or stop them
            %lmx models                        list the models on disk, and which of them are loaded
            %lmx panel
            %lmx stop
            %lmx ask TEXT                      ask the loaded model

            %%lmx [--max-tokens N] [--temperature T] [--system TEXT] [--raw]
            Text of several lines. {expression} and $name are replaced by values, unless --raw is given.

            %%lmx --map FRAME [--column NAME] [--into NAME] [--cache PATH] [--max-tokens N] ...
            Template of the prompt for each row of FRAME, as for lab.map. If it does not contain the name of --column
            in braces, the text in this column follows it. --into stores the answers in another column of FRAME.

        An answer is displayed while it is generated. The result is a ``Reply``, or the table of answers, also as ``_``.
        """
        try:
            if cell is not None:
                return self._prompt(line, cell)
            word, _, text = line.strip().partition(" ")
            if word == "ask":
                # Not parsed as arguments, because a text may contain apostrophes.
                return self._ask(text)
            return self._run_verb(**_parse(LINE, line.strip()))
        except LabError as exc:
            # The message names the next step; a traceback into this package does not help the reader of a notebook.
            raise UsageError(exc.message) from exc

    def _prompt(self, line: str, cell: str) -> Any:
        options = {name: value for name, value in _parse(CELL, line).items() if value is not None}
        if "map" in options:
            return self._map(cell, options.pop("map"), **options)
        if misplaced := [name for name in ("column", "into", "cache") if name in options]:
            raise UsageError(f"--{misplaced[0]} needs --map, the name of a data frame (%lmx? shows the options)")
        if not options.pop("raw", False):
            # Like IPython's own magics: text that cannot be formatted, such as JSON, is left unchanged.
            try:
                cell = DollarFormatter().vformat(cell, args=[], kwargs=self._shell.user_ns)
            except Exception as exc:
                problem = f"{type(exc).__name__}: {exc}"
                print(f"%%lmx: no value was inserted ({problem:.200}); --raw leaves braces unchanged", file=sys.stderr)
        return self._ask(cell, **options)

    def _map(self, cell: str, name: str, *, column: str | None = None, into: str | None = None, **options: Any) -> Any:
        """Answer a prompt for each row of a variable of the notebook, and return the table of answers."""
        if options.pop("raw", False):
            raise UsageError("--raw has no meaning with --map, whose template contains only names of columns")
        if name not in self._shell.user_ns:
            raise UsageError(f"there is no variable {name!r:.80}; --map needs the name of a data frame")
        rows = self._shell.user_ns[name]
        pandas = sys.modules.get("pandas")
        if into is not None and (pandas is None or not isinstance(rows, pandas.DataFrame)):
            library = type(rows).__module__.partition(".")[0]
            kind = f"{library}.{type(rows).__name__}".removeprefix("builtins.")
            raise UsageError(
                f"--into adds a column to a data frame of pandas, but {name} is a {kind}; use a data frame of pandas, "
                "or leave --into out and use the result of the cell"
            )
        template = cell.strip()
        if column is not None and column not in RowPrompts(template).names:
            template = f"{template}\n\n{{{column}}}"
        answers: Any = _running_lab().map(rows, template, **options)
        if into is not None:
            rows[into] = answers["answer"].array
        return answers

    def _run_verb(self, verb: str | None, **options: Any) -> Any:
        if verb == "launch":
            return lmx_lab.launch(**options)
        if verb is None and lmx_lab.current() is None:
            print("No lab is running in this kernel. %lmx launch MODEL starts one, such as %lmx launch smollm2-135m.")
            return None
        lab = _running_lab()
        result: Any = None
        match verb:
            case None:
                result = lab
            case "load":
                result = lab.load(options["model"])
            case "unload":
                print(f"{lab.unload(wait=options['wait'])!r}.")
            case "models":
                result = lab.models()
            case "panel":
                result = lab.panel()
            case "stop":
                lab.stop()
                print(f"The server at {lab.url} was stopped.")
        return result

    def _ask(self, prompt: str, **parameters: Any) -> Any:
        if not prompt.strip():
            raise UsageError("there is no text; use %lmx ask TEXT, or %%lmx with the text below it")
        if getattr(self._shell, "kernel", None) is None:
            # A terminal cannot clear streamed text, and would display the answer twice.
            return _running_lab().chat(prompt, **parameters)
        stream = _running_lab().chat(prompt, stream=True, **parameters)
        stream.show()
        # The reply is displayed next, as the value of the cell.
        cast(Any, self._shell).display_pub.clear_output(wait=True)
        return stream.reply

    @property
    def _shell(self) -> InteractiveShell:
        assert self.shell is not None
        return self.shell


class _Parser(argparse.ArgumentParser):
    """A parser whose errors do not exit the kernel."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs, add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (%lmx? shows the options)")


def _running_lab() -> Lab:
    lab = lmx_lab.current()
    if lab is None:
        raise UsageError("no lab is running in this kernel; %lmx launch MODEL starts one")
    return lab


def _parse(parser: _Parser, line: str) -> dict[str, Any]:
    """Parse the arguments of a magic.

    Raises:
        UsageError: an argument is invalid.
    """
    try:
        return vars(parser.parse_args(shlex.split(line)))
    except ValueError as exc:
        # An unpaired quotation mark.
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
    unload = verbs.add_parser("unload").add_mutually_exclusive_group()
    unload.add_argument("--wait", action="store_true", default=None)
    unload.add_argument("--now", action="store_false", default=None, dest="wait")
    # ask is included because error messages list the verbs.
    for name in ("ask", "models", "panel", "stop"):
        verbs.add_parser(name)
    return parser


LINE = _line_parser()
CELL = _Parser(prog="%%lmx")
CELL.add_argument("--max-tokens", type=int)
CELL.add_argument("--temperature", type=float)
CELL.add_argument("--system")
CELL.add_argument("--raw", action="store_true", default=None)
CELL.add_argument("--map", metavar="FRAME")
CELL.add_argument("--column")
CELL.add_argument("--into")
CELL.add_argument("--cache")
