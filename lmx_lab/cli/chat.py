"""``lmx-lab chat``: a conversation with the model, in a session of the daemon."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lmx_lab.cli.app import app, epilog, note
from lmx_lab.cli.completion import complete_model, complete_session
from lmx_lab.cli.parsing import Command
from lmx_lab.cli.reach import NEEDS, Token, Url, daemon_client
from lmx_lab.cli.terminal import can_be_asked
from lmx_lab.errors import InvalidRequestError, SessionNotFoundError
from lmx_lab.settings import Settings

if TYPE_CHECKING:
    from lmx_lab.client import DaemonClient, Session

LAST = "chat.json"
"""The file with the session that a chat without a session id continues."""


@app.command(
    cls=Command,
    epilog=epilog(
        'lmx-lab chat "What is the capital of France?"',
        "lmx-lab chat --new --system 'Answer in one word.'",
        "git diff | lmx-lab chat --session review",
        needs=NEEDS,
        status="0 after an answer, 1 if there is none, 2 if an argument cannot be, 130 if Ctrl-C has cancelled it",
    ),
)
def chat(
    text: Annotated[list[str] | None, typer.Argument(help="The question. Without one, it is a conversation.")] = None,
    *,
    session: Annotated[
        str | None,
        typer.Option(
            help="Id of a session, made if it is not there. By default the last chat's.",
            autocompletion=complete_session,
        ),
    ] = None,
    new: Annotated[bool, typer.Option("--new", help="Start a new session.")] = False,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model of a new session; by default the one that the server has loaded.", autocompletion=complete_model
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt of a new session.")] = None,
    allow: Annotated[bool, typer.Option("--allow", help="Let tools run without asking.")] = False,
    url: Url = None,
    token: Token = None,
) -> None:
    """Talk to the model through the daemon, which remembers the session. Ctrl-C cancels the answer.

    The answer goes to standard output, everything else to standard error. Without a terminal, tools that need a
    permission are denied.
    """
    question = _question(text)
    # The client takes most of a second to import, which --help and completion should not wait for.
    from lmx_lab.cli.conversation import Conversation

    with daemon_client(url, token) as client:
        begins = new or model is not None or system is not None
        if session is not None:
            _check_named(client, session, begins=begins)
        last = Settings.read().home / LAST
        session_id = session if session is not None or begins else _remembered(client, last)
        here = client.session(session_id, model=model, system_prompt=system)
        _remember(here, last)
        conversation = Conversation(here, allow=allow)
        if question is not None:
            sys.exit(conversation.ask(question))
        conversation.run()


def _question(text: list[str] | None) -> str | None:
    """The question from the arguments or standard input; None for an interactive conversation."""
    if not text and can_be_asked():
        return None
    question = " ".join(text) if text else sys.stdin.read() if sys.stdin is not None else ""
    if not question.strip():
        raise InvalidRequestError("there is no question; give one as an argument, or on standard input")
    return question


def _check_named(client: DaemonClient, session_id: str, *, begins: bool) -> None:
    """Check the id of a session that was given.

    Raises:
        InvalidRequestError: the id is not valid, or options for a new session were given and the session exists.
    """
    with contextlib.suppress(SessionNotFoundError):
        client.read_session(session_id)
        if begins:
            raise InvalidRequestError(
                f"session {session_id} is there already, and --new, --model and --system are of a new one; "
                "leave them out, or choose another id",
                param="session",
            )


def _remembered(client: DaemonClient, last: Path) -> str | None:
    try:
        session_id = str(json.loads(last.read_bytes())["session_id"])
        client.read_session(session_id)
    except (OSError, ValueError, TypeError, KeyError, InvalidRequestError):
        return None  # The file does not exist or is not valid.
    except SessionNotFoundError:
        note("the session of the last chat is gone; this is a new one")
        return None
    return session_id


def _remember(session: Session, last: Path) -> None:
    with contextlib.suppress(OSError):  # The answer matters more than remembering the session.
        last.parent.mkdir(parents=True, exist_ok=True)
        last.write_text(json.dumps({"session_id": session.session_id}), encoding="utf-8")
