"""Run a conversation on a terminal: questions, streamed answers and permissions.

Without a daemon, a lab that runs on this machine answers, or an engine in this process.
"""

from __future__ import annotations

import contextlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator

import lmx_lab
from lmx_lab.cli import FAILED, INTERRUPTED
from lmx_lab.cli.terminal import (
    discard_typed_input,
    is_interactive,
    print_error,
    print_note,
    read_line,
)
from lmx_lab.client import Session
from lmx_lab.errors import LabError, NotLoadedError, counted
from lmx_lab.sanitize import escape_text, single_line
from lmx_lab.settings import Settings
from lmx_lab.urls import local_url
from lmx_lab.wire.events import (
    DaemonEvent,
    MessageDoneEvent,
    ResetFrame,
    ToolEndEvent,
    ToolStartEvent,
    TurnDoneEvent,
    TurnQueuedEvent,
    TurnTokenEvent,
)
from lmx_lab.wire.sessions import Decision, PermissionRecord, TurnOverrides

with contextlib.suppress(ImportError):  # Some builds of Python do not have readline.
    import readline  # noqa: F401  (importing it gives input() a history and editing)


class Conversation(ABC):
    """Questions and answers. Answers go to standard output, everything else to standard error."""

    note: str
    """Printed before the first question."""

    @abstractmethod
    def _answer(self, text: str, printer: AnswerPrinter) -> None:
        """Print the answer while it is generated.

        Raises:
            LabError: there is no answer.
        """

    def run(self) -> None:
        """Read and answer questions until the end of the input, or until Ctrl-C outside of an answer."""
        print_note(self.note)
        with contextlib.suppress(EOFError, KeyboardInterrupt):
            while True:
                if (question := read_line("> ")).strip():
                    self.ask(question)

    def ask(self, text: str) -> int:
        """Print the answer while it is generated. Ctrl-C cancels it.

        Returns:
            The exit status.
        """
        printer = AnswerPrinter()
        try:
            self._answer(text, printer)
        except KeyboardInterrupt:
            printer.end_line()
            print_note("cancelled")
            return INTERRUPTED
        except LabError as exc:
            printer.end_line()
            print_error(exc)
            return FAILED
        return 0


class SessionConversation(Conversation):
    """A conversation in a session of the daemon. Ctrl-C cancels the turn."""

    def __init__(self, session: Session, *, allow: bool, max_tokens: int | None = None) -> None:
        self._session = session
        self._allow = allow
        self._overrides = TurnOverrides(max_tokens=max_tokens)
        self.note = f"session {session.session_id}; Ctrl-D ends the chat, and the next lmx-lab chat continues it"

    def _answer(self, text: str, printer: AnswerPrinter) -> None:
        # Closing the stream cancels the turn, for example if standard output was closed.
        with contextlib.closing(
            self._session.stream(text, overrides=self._overrides, on_permission=self._decide)
        ) as events:
            for event in events:
                printer.print(event)

    def _decide(self, permission: PermissionRecord) -> Decision:
        if self._allow:
            return Decision(decision="allow")
        if not is_interactive():
            print_note(f"{permission.tool} was denied: there is no terminal for a question; --allow runs tools")
            return Decision(decision="deny")
        # The complete call in one line, because the decision is about exactly this call.
        arguments = ", ".join(
            f"{name if name.isidentifier() else repr(name)}={value!r}" for name, value in permission.arguments.items()
        )
        print_note(f"the model wants to call {permission.tool}({arguments})")
        discard_typed_input()
        answer = ""
        with contextlib.suppress(EOFError):
            answer = read_line("Allow it? [y]es, [a]lways in this session, [N]o ").strip().lower()
        return Decision(
            decision="allow" if answer in ("y", "yes", "a", "always") else "deny",
            scope="session" if answer in ("a", "always") else "once",
        )


class AnswerPrinter:
    """Prints the events of one turn."""

    def __init__(self) -> None:
        self._message_id: str | None = None
        self._text = ""
        """The text of the current message that was printed."""
        self._in_line = False
        """Whether the last line that was printed has not ended."""

    def print(self, event: DaemonEvent) -> None:
        """Print the answer's text to standard output, and notes on other events of the turn to standard error."""
        match event:
            case TurnQueuedEvent() if event.data.ahead:
                turns = counted(event.data.ahead, "earlier turn")
                self._print_note(f"waiting for {turns} of this session")
            case TurnTokenEvent():
                if event.data.message_id != self._message_id:
                    self.end_line()
                    self._message_id, self._text = event.data.message_id, ""
                self._text += event.data.text
                self.write(event.data.text)
            case MessageDoneEvent():
                # The part of the complete message that was not streamed.
                message = event.data.message
                printed = self._text if message.message_id == self._message_id else ""
                if not message.content.startswith(printed):
                    self.end_line()
                    printed = ""
                self.write(message.content[len(printed) :])
                self.end_line()
                self._message_id, self._text = message.message_id, message.content
            case ToolStartEvent():
                self._print_note(f"calls {event.data.name} {event.data.arguments!r}")
            case ToolEndEvent():
                self._print_note(f"{event.data.name}: {event.data.status}: {event.data.text}")
            case ResetFrame():
                self._print_note("events are missing here")
            case TurnDoneEvent():
                stats, reason = event.data.stats, event.data.stop_reason
                end = "" if reason == "end" else f", ended by {reason}"
                self._print_note(
                    f"{counted(stats.completion_tokens, 'token')}, {stats.tokens_per_second:.1f} tok/s{end}"
                )
            case _:
                pass

    def write(self, text: str) -> None:
        """Print a piece of the answer's text."""
        if text:
            sys.stdout.write(escape_text(text))
            sys.stdout.flush()
            self._in_line = not text.endswith("\n")

    def end_line(self) -> None:
        """End the current line, if it is not empty."""
        if self._in_line:
            self.write("\n")

    def _print_note(self, text: str) -> None:
        self.end_line()
        print_note(single_line(text))


@contextlib.contextmanager
def lab_for_chat(settings: Settings, model: str | None) -> Iterator[lmx_lab.Lab]:
    """Provide a lab with this model: the running lab if it has loaded the model, otherwise a new lab in this process.

    Raises:
        NotLoadedError: no lab is running, and no model was named.
        LabError: the model could not be loaded.
    """
    url = local_url(settings.host, settings.port)
    with contextlib.ExitStack() as stack:
        loaded: set[str] = set()
        with contextlib.suppress(LabError):
            lab = stack.enter_context(lmx_lab.attach(url, api_key=settings.api_key))
            loaded = {record.id for record in lab.models() if record.loaded and record.kind == "chat"}
        if loaded and (model is None or model in loaded):
            print_note(f"the lab at {url} answers, with {model or ', '.join(sorted(loaded))}")
            yield lab
            return
        if model is None:
            raise NotLoadedError(
                f"no lab with a model is running at {url}, and no model was named; name one, such as "
                "lmx-lab chat -m smollm2-135m, or start lmx-lab serve --model smollm2-135m",
            )
        lab = stack.enter_context(lmx_lab.Lab(Settings.read(host="127.0.0.1", port=0), loop="thread"))
        report = lab.load(model)
        print_note(f"{report!r}, in this process; lmx-lab serve --model {model} keeps a model in memory")
        yield lab


class DirectConversation(Conversation):
    """A conversation without a session. Only complete answers are kept in its history."""

    note = "Ctrl-D ends the chat, which is not stored; with lmx-lab daemon, a chat is stored as a session"

    def __init__(self, lab: lmx_lab.Lab, *, system: str | None, max_tokens: int | None = None) -> None:
        self._lab = lab
        self._limits = {} if max_tokens is None else {"max_tokens": max_tokens}
        self._messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system is not None else []

    def _answer(self, text: str, printer: AnswerPrinter) -> None:
        messages = [*self._messages, {"role": "user", "content": text}]
        with contextlib.closing(self._lab.chat(messages, stream=True, **self._limits)) as stream:
            for piece in stream:
                printer.write(piece)
            printer.end_line()
        if stream.reply is not None:
            self._messages = [*messages, stream.reply.message]
            print_note(repr(stream.reply).rpartition("\n")[2])
