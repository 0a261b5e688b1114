"""Display errors of this package in IPython as the caller's line and a message, without a traceback into the package,
and interrupts of its work as the caller's line.

``install`` is called when the package is imported in IPython. IPython supports a single handler, for given classes of
exceptions. All other exceptions are displayed as usual.
"""

from __future__ import annotations

import asyncio
import linecache
import sys
import sysconfig
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from lmx_lab.errors import LabError

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

RULE = "-" * 75
REMEDY = "%tb shows the traceback"
PACKAGE = str(Path(__file__).parent.parent)
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})

_state = {"full": False}


def full_tracebacks(enabled: bool = True) -> None:
    """Display errors of this package with all frames and causes, or in the short form (the default) if False.

    To see the traceback of only the last error, use ``%tb``.
    """
    _state["full"] = enabled


def install(shell: InteractiveShell) -> None:
    """Install the handler in this shell. A handler that was set before keeps its classes. Idempotent."""
    classes, previous = shell.custom_exceptions, shell.CustomTB
    if LabError in classes:
        return

    def show(shell: Any, etype: type[BaseException], value: BaseException, trace: Any, tb_offset: Any = None) -> None:
        if isinstance(value, classes):
            previous(etype, value, trace, tb_offset=tb_offset)
        elif _state["full"] or shell.call_pdb or not (sentences := _sentences(value) or _interrupt(value, trace)):
            shell.showtraceback((etype, value, trace), tb_offset=tb_offset, running_compiled_code=True)
        else:
            # The variables from which %tb and %debug take the last error.
            sys.last_type, sys.last_value, sys.last_traceback = etype, value, trace
            if sys.version_info >= (3, 12):
                sys.last_exc = value
            shell._showtraceback(etype, value, short_lines(shell, value, trace, sentences))

    # ``ValueError`` is the base class of pydantic's error, whose import is slow.
    shown = (LabError, ExceptionGroup, ValueError, KeyboardInterrupt, asyncio.CancelledError)
    cast(Any, shell).set_custom_exc((*classes, *shown), show)


def _sentences(error: BaseException) -> list[str]:
    """Return the messages of an error of this package, of a group of such errors, or of a pydantic error about one of
    its requests; an empty list for other errors."""
    if isinstance(error, ExceptionGroup):
        leaves = list(_leaves(error))
        if not all(isinstance(leaf, LabError) for leaf in leaves):
            return []
        counts = Counter(f"{type(leaf).__name__}: {leaf}" for leaf in leaves)
        return [f"{error}:", *(f"{text} ({n} times)" if n > 1 else text for text, n in counts.items())]
    if isinstance(error, LabError):
        return f"{type(error).__name__}: {error}".splitlines()
    if type(error).__module__.split(".")[0] != "pydantic_core" or "lmx_lab.wire.base" not in sys.modules:
        return []
    # Imported here, because pydantic is not needed for other errors.
    from pydantic import ValidationError

    from lmx_lab.wire.base import request_class
    from lmx_lab.wire.errors import invalid_request

    if not isinstance(error, ValidationError) or (shape := request_class(error.title)) is None:
        return []
    return [f"ValidationError: {error.title}: {invalid_request(error.errors(), shape=shape)}"]


def _interrupt(error: BaseException, trace: TracebackType | None) -> list[str]:
    """Return what is displayed of an interrupt or a cancellation in this package; an empty list for other errors, and
    for those in a function of the caller that the package calls, such as a metric.
    """
    if not isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
        return []
    files = [frame.filename for frame in traceback.extract_tb(trace)]
    inside = [at for at, file in enumerate(files) if file.startswith(PACKAGE)]
    if not inside or not all(map(_is_library, files[inside[0] :])):
        return []
    return [str(error) or REMEDY]


def _is_library(file: str) -> bool:
    # Compiled modules, such as those of zmq, have relative paths.
    return file.startswith((PACKAGE, "<frozen", *LIBRARIES)) or not (file.startswith("<") or Path(file).is_absolute())


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


def short_lines(
    shell: InteractiveShell, error: BaseException, trace: TracebackType | None, sentences: list[str]
) -> list[str]:
    """Return the lines of a short error: its class, the lines of the caller, and the sentences."""
    frames = traceback.extract_tb(trace)
    inside = next((at for at, frame in enumerate(frames) if frame.filename.startswith(PACKAGE)), len(frames))
    own = [frame for frame in frames[:inside] if _is_cell(shell, frame) or not frame.filename.startswith(LIBRARIES)]
    first = [frame for frame in own if _is_cell(shell, frame)][:1]
    places = []
    # The line of the cell and, if different, the line that called the package.
    for frame in [*first, *(frame for frame in own[-1:] if frame not in first)]:
        cell = shell.compile.format_code_name(frame.filename)
        where = f"{cell[0]} {cell[1]}" if cell is not None else f"File {frame.filename}"
        function = "" if frame.name == "<module>" else f", in {frame.name}"
        code = linecache.getline(frame.filename, frame.lineno or 0).strip()
        places.append(f"{where}, line {frame.lineno}{function}:  {code}")
    if isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
        return [f"{type(error).__name__}: {places[-1] if places else ''}", *sentences]
    head = [RULE, f"{type(error).__name__:<{len(RULE) - len(REMEDY)}}{REMEDY}", *places, ""]
    # A short error has at most 8 lines.
    room = 8 - len(head)
    if len(sentences) > room:
        sentences = [*sentences[: room - 1], f"… and {len(sentences) - room + 1} more lines"]
    return [*head, *sentences]


def _is_cell(shell: InteractiveShell, frame: traceback.FrameSummary) -> bool:
    return shell.compile.format_code_name(frame.filename) is not None
