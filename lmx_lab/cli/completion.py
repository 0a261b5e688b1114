"""What the Tab key completes beside commands and options: models and sessions.

Whoever presses it waits: names of folders are read instead of models, and the daemon is asked for a moment. What goes
wrong completes nothing, since a message would land in the middle of the line that is typed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from lmx_lab.settings import Settings
from lmx_lab.urls import bracketed

ANSWER_S = 0.5
SESSIONS = 100


def complete_model(incomplete: str) -> list[str]:
    """Ids of the lab's own store and of further folders; those of starters, which are fetched if needed."""
    with suppress(Exception):
        return sorted({*_beginning(_here(), incomplete), *_beginning(_starters(), incomplete)})
    return []


def complete_pull(incomplete: str) -> list[str]:
    """Starters that are not here yet."""
    with suppress(Exception):
        return sorted({*_beginning(_starters(), incomplete)} - set(_here()))
    return []


def complete_session(incomplete: str) -> list[str]:
    """Sessions of this user's own daemon, those that were used last."""
    with suppress(Exception):
        return [session["session_id"] for session in _sessions() if session["session_id"].startswith(incomplete)]
    return []


def _beginning(names: Iterator[str], incomplete: str) -> Iterator[str]:
    return (name for name in names if name.startswith(incomplete))


def _here() -> Iterator[str]:
    settings = Settings.read()
    for folder in (settings.models_folder, *settings.model_folders):
        yield from _models_in(folder)


def _models_in(folder: Path, prefix: str = "") -> Iterator[str]:
    """By their names: a folder with a ``config.json``, a file or a folder with a file in ``.gguf``; one level below
    ``org/name``."""
    with suppress(OSError):
        for path in folder.iterdir():
            if path.name.startswith("."):
                continue
            if path.suffix == ".gguf" or (path / "config.json").exists():
                yield prefix + path.name
            elif path.is_dir():
                if any(path.glob("*.gguf")):
                    yield prefix + path.name
                elif not prefix:
                    yield from _models_in(path, f"{path.name}/")


def _starters() -> Iterator[str]:
    from lmx_lab.weights.starters import STARTERS

    yield from STARTERS


def _sessions() -> list[dict[str, Any]]:
    import urllib.request  # 25 ms, of which every command would wait

    # As lmx_lab.client.credentials does, whose import takes most of a second: only what nobody else can have written.
    with open(Settings.read().daemon_folder / "state.json", encoding="utf-8", opener=_not_through_links) as file:
        written = os.fstat(file.fileno())
        if written.st_uid != os.geteuid() or written.st_mode & 0o077:
            return []
        state = json.load(file)
    address = f"http://{bracketed(state['host'])}:{state['port']}/v3/sessions?limit={SESSIONS}"
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {state['token']}"})
    # Not through a proxy: it is this machine, and the token stays here.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=ANSWER_S) as answer:
        sessions: list[dict[str, Any]] = json.load(answer)["sessions"]
    return sessions


def _not_through_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
