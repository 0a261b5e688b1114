"""A conversation on a terminal: questions, streamed answers and permissions."""

from __future__ import annotations

import contextlib
import sys

from lmx_lab.cli.app import err, note
from lmx_lab.cli.exit_status import FAILED, INTERRUPTED
from lmx_lab.cli.terminal import asked, can_be_asked, forget_typed, line, shown
from lmx_lab.client import Session
from lmx_lab.errors import LabError
from lmx_lab.wire.event_stream import ResetFrame
from lmx_lab.wire.events import (
    DaemonEvent,
    MessageDoneEvent,
    ToolEndEvent,
    ToolStartEvent,
    TurnDoneEvent,
    TurnQueuedEvent,
    TurnTokenEvent,
)
from lmx_lab.wire.sessions import Decision, PermissionRecord


class Conversation:
    """Questions and answers in one session. Answers go to standard output, everything else to standard error."""

    def __init__(self, session: Session, *, allow: bool) -> None:
        self._session = session
        self._allow = allow

    def run(self) -> None:
        """Ask questions until the end of the input, or until Ctrl-C outside of an answer."""
        with contextlib.suppress(ImportError):
            # Optional: some Python builds lack it.
            import readline  # noqa: F401  (input() then has a history and can be edited)
        note(f"session {self._session.session_id}; Ctrl-D ends this, and the next lmx-lab chat continues it")
        with contextlib.suppress(EOFError, KeyboardInterrupt):
            while True:
                if (question := asked("> ")).strip():
                    self.ask(question)

    def ask(self, text: str) -> int:
        """Print the answer while it is generated; returns the exit status. Ctrl-C cancels the turn."""
        answer = AnswerPrinter()
        try:
            # Closing cancels the turn, for example when standard output was closed.
            with contextlib.closing(self._session.stream(text, on_permission=self._permit)) as events:
                for event in events:
                    answer.show(event)
        except KeyboardInterrupt:
            answer.end_line()
            note("cancelled")
            return INTERRUPTED
        except LabError as exc:
            answer.end_line()
            err.print(f"{exc.code}: {shown(exc.message)}", style="bold red", markup=False, highlight=False)
            return FAILED
        return 0

    def _permit(self, permission: PermissionRecord) -> Decision:
        if self._allow:
            return Decision(decision="allow")
        if not can_be_asked():
            note(f"{shown(permission.tool)} was denied: there is no terminal to ask on; --allow lets tools run")
            return Decision(decision="deny")
        # The complete call in one line, because the decision is about exactly this call.
        arguments = ", ".join(
            f"{name if name.isidentifier() else repr(name)}={value!r}" for name, value in permission.arguments.items()
        )
        note(shown(f"the model wants to call {permission.tool}({arguments})"))
        forget_typed()
        said = ""
        with contextlib.suppress(EOFError):
            said = asked("Allow it? [y]es, [a]lways in this session, [N]o ").strip().lower()
        return Decision(
            decision="allow" if said in ("y", "yes", "a", "always") else "deny",
            scope="session" if said in ("a", "always") else "once",
        )


class AnswerPrinter:
    """Prints one turn."""

    def __init__(self) -> None:
        self._message_id: str | None = None
        self._text = ""
        self._in_line = False

    def show(self, event: DaemonEvent) -> None:
        match event:
            case TurnQueuedEvent() if event.data.ahead:
                self._aside(f"it waits: {event.data.ahead} before it in this session")
            case TurnTokenEvent():
                self._piece(event.data.message_id, event.data.text)
            case MessageDoneEvent():
                self._whole(event.data.message.message_id, event.data.message.content)
            case ToolStartEvent():
                self._aside(f"calls {event.data.name} {event.data.arguments!r}")
            case ToolEndEvent():
                self._aside(f"{event.data.name}: {event.data.status}: {event.data.text}")
            case ResetFrame():
                self._aside("events are missing here")
            case TurnDoneEvent():
                stats, reason = event.data.stats, event.data.stop_reason
                ended = "" if reason == "end" else f", ended by {reason}"
                self._aside(f"{stats.completion_tokens} tokens, {stats.tokens_per_second:.1f} tokens/s{ended}")
            case _:
                pass

    def _piece(self, message_id: str, text: str) -> None:
        if message_id != self._message_id:
            self.end_line()
            self._message_id, self._text = message_id, ""
        self._text += text
        self._write(text)

    def _whole(self, message_id: str | None, text: str) -> None:
        """Print the part of a complete message that was not streamed."""
        seen = self._text if message_id == self._message_id else ""
        if not text.startswith(seen):
            self.end_line()
            seen = ""
        self._write(text[len(seen) :])
        self.end_line()
        self._message_id, self._text = message_id, text

    def _write(self, text: str) -> None:
        if text:
            sys.stdout.write(shown(text))
            sys.stdout.flush()
            self._in_line = not text.endswith("\n")

    def end_line(self) -> None:
        """End the current line, if it is not empty."""
        if self._in_line:
            self._write("\n")

    def _aside(self, text: str) -> None:
        self.end_line()
        note(line(text))
