"""Chat without a daemon, with a lab that runs on this machine or with an engine in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import lmx_lab
from lmx_lab.cli import FAILED, INTERRUPTED
from lmx_lab.cli.conversation import AnswerPrinter, answer_questions
from lmx_lab.cli.terminal import print_error, print_note
from lmx_lab.errors import LabError, NotLoadedError
from lmx_lab.settings import Settings
from lmx_lab.urls import local_url


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


class DirectConversation:
    """A conversation without a session. Prints answers to standard output, and everything else to standard error."""

    def __init__(self, lab: lmx_lab.Lab, *, system: str | None) -> None:
        self._lab = lab
        self._messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system is not None else []

    def run(self) -> None:
        """Read and answer questions until the end of the input, or until Ctrl-C outside of an answer."""
        print_note("Ctrl-D ends the chat, which is not stored; with lmx-lab daemon, a chat is stored as a session")
        answer_questions(self.ask)

    def ask(self, text: str) -> int:
        """Print the answer while it is generated. Ctrl-C cancels it. Only complete answers are kept in the history.

        Returns:
            The exit status.
        """
        printer = AnswerPrinter()
        messages = [*self._messages, {"role": "user", "content": text}]
        try:
            with contextlib.closing(self._lab.chat(messages, stream=True)) as stream:
                for piece in stream:
                    printer.write(piece)
                printer.end_line()
        except KeyboardInterrupt:
            printer.end_line()
            print_note("cancelled")
            return INTERRUPTED
        except LabError as exc:
            printer.end_line()
            print_error(exc)
            return FAILED
        if stream.reply is not None:
            self._messages = [*messages, stream.reply.message]
            print_note(repr(stream.reply).rpartition("\n")[2])
        return 0
