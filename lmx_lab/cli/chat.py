"""Provide ``lmx-lab chat``: a conversation with the model, in a session if a daemon runs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lmx_lab.cli.completion import complete_model, complete_session
from lmx_lab.cli.options import (
    NEEDS_DAEMON,
    Command,
    DaemonToken,
    DaemonUrl,
    daemon_client,
    epilog,
    settings_with_folders,
)
from lmx_lab.cli.terminal import is_interactive, print_note
from lmx_lab.errors import InvalidRequestError, SessionNotFoundError, UnreachableError
from lmx_lab.settings import Settings

if TYPE_CHECKING:
    from lmx_lab.client import DaemonClient

app = typer.Typer()


@app.command(
    cls=Command,
    epilog=epilog(
        'lmx-lab chat -m smollm2-135m "Which city is the capital of France?"',
        "lmx-lab chat -m smollm2-135m       ask several questions",
        "lmx-lab chat --new --system 'Answer in one word.'",
        "git diff | lmx-lab chat --session review",
        needs="a model; for --session and --new, " + NEEDS_DAEMON,
        status="0 after an answer, 1 if there is none, 2 if an argument is not valid, 130 if Ctrl-C has cancelled it",
    ),
)
def chat(
    text: Annotated[list[str] | None, typer.Argument(help="The question. Without it, the chat is interactive.")] = None,
    *,
    session: Annotated[
        str | None,
        typer.Option(
            help="Id of a session, which is created if it does not exist. By default that of the last chat.",
            autocompletion=complete_session,
        ),
    ] = None,
    new: Annotated[bool, typer.Option("--new", help="Start a new session.")] = False,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="Model that answers, of a new session if a daemon runs. By default the loaded model.",
            autocompletion=complete_model,
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt, of a new session if a daemon runs.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Maximum tokens of an answer. By default 4096.")] = None,
    allow: Annotated[bool, typer.Option("--allow", help="Run tools without asking for a permission.")] = False,
    url: DaemonUrl = None,
    token: DaemonToken = None,
) -> None:
    """Chat with a model. Ctrl-C cancels the answer, and a closed terminal also ends the chat.

    If a daemon runs, the chat is stored in one of its sessions and may call tools; without a terminal, tools that need
    a permission are denied. Without a daemon, a running lab answers, or the model is loaded for this chat. The answer
    goes to standard output, everything else to standard error.
    """
    # Under nohup, the signal of a closed terminal is ignored, and stays ignored.
    for number in (signal.SIGHUP, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _hang_up)
    # None if the chat is interactive.
    question = None
    if text or not is_interactive():
        question = " ".join(text) if text else sys.stdin.read() if sys.stdin is not None else ""
        if not question.strip():
            raise InvalidRequestError("there is no question; give one as an argument or on standard input")
    from lmx_lab.cli.conversation import Conversation, DirectConversation, SessionConversation, lab_for_chat

    with contextlib.ExitStack() as stack:
        conversation: Conversation
        uses_daemon = session is not None or new or url is not None or token is not None
        if not uses_daemon:
            from lmx_lab.daemon.home import read_state

            with contextlib.suppress(UnreachableError):
                uses_daemon = read_state(Settings.read().daemon_folder) is not None
        if not uses_daemon:
            lab = stack.enter_context(lab_for_chat(settings_with_folders(), model))
            conversation = DirectConversation(lab, system=system, max_tokens=max_tokens)
        else:
            client = stack.enter_context(daemon_client(url, token))
            is_new = new or model is not None or system is not None
            if session is not None:
                # Also checks that the id is valid.
                with contextlib.suppress(SessionNotFoundError):
                    client.read_session(session)
                    if is_new:
                        raise InvalidRequestError(
                            f"session {session} exists, and --new, --model and --system are for new sessions; omit "
                            "them, or choose another id",
                            param="session",
                        )
            # The file with the id of the session that a chat without --session continues.
            last = Settings.read().home / "chat.json"
            session_id = session if session is not None or is_new else _read_last_session(client, last)
            current = client.session(session_id, model=model, system_prompt=system)
            with contextlib.suppress(OSError):  # The answer matters more than the file.
                last.parent.mkdir(parents=True, exist_ok=True)
                last.write_text(json.dumps({"session_id": current.session_id}), encoding="utf-8")
            conversation = SessionConversation(current, allow=allow, max_tokens=max_tokens)
        if question is not None:
            sys.exit(conversation.ask(question))
        conversation.run()


def _hang_up(number: int, frame: object) -> None:
    """Cancel the answer as Ctrl-C does, and end the input."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.raise_signal(signal.SIGINT)


def _read_last_session(client: DaemonClient, last: Path) -> str | None:
    try:
        session_id = str(json.loads(last.read_bytes())["session_id"])
        client.read_session(session_id)
    except (OSError, ValueError, TypeError, KeyError, InvalidRequestError):
        return None  # The file does not exist or is not valid.
    except SessionNotFoundError:
        print_note("the session of the last chat was deleted; this is a new one")
        return None
    return session_id
