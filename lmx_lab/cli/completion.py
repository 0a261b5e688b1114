"""Complete models and sessions for the Tab key; typer completes commands and options.

The user waits for the completion. Therefore only the names of model folders are read, not the models, and a request to
the daemon has a short time limit. After a failure there are no completions and no message, because a message would
appear in the line that is being typed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from lmx_lab.cli.lazy import load
from lmx_lab.settings import Settings
from lmx_lab.urls import bracketed

REQUEST_S = 0.5
MAX_SESSIONS = 100


def complete_model(incomplete: str) -> list[str]:
    """Complete ids of models in the lab's own folder and in additional folders, and of starter models."""
    with suppress(Exception):
        return sorted({*_filter(_local_models(), incomplete), *_filter(_starters(), incomplete)})
    return []


def complete_pull(incomplete: str) -> list[str]:
    """Complete ids of starter models that are not on the disk."""
    with suppress(Exception):
        return sorted({*_filter(_starters(), incomplete)} - set(_local_models()))
    return []


def complete_session(incomplete: str) -> list[str]:
    """Complete ids of the last used sessions of this user's own daemon."""
    with suppress(Exception):
        return list(_filter((session["session_id"] for session in _sessions()), incomplete))
    return []


def _filter(names: Iterator[str], incomplete: str) -> Iterator[str]:
    return (name for name in names if name.startswith(incomplete))


def _local_models() -> Iterator[str]:
    settings = Settings.read()
    find_starter = load("lmx_lab.weights.starters:find_starter")
    for name in _models_in(settings.models_folder):
        starter = find_starter(name)
        yield name if starter is None else starter.id
    for folder in settings.model_folders:
        yield from _models_in(folder)


def _models_in(folder: Path, prefix: str = "") -> Iterator[str]:
    """Yield the names of folders with a ``config.json`` or a ``.gguf`` file, and of ``.gguf`` files; of those one level
    below, ``org/name``."""
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
    yield from load("lmx_lab.weights.starters:STARTERS")


def _sessions() -> list[dict[str, Any]]:
    # The same checks as in lmx_lab.client.credentials, whose import would take too long: only this user can have
    # written the file.
    with open(Settings.read().daemon_folder / "state.json", encoding="utf-8", opener=_open_without_links) as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            return []
        state = json.load(file)
    # urllib.request takes 25 ms to import, for which other commands should not wait.
    urllib_request = load("urllib.request:")
    address = f"http://{bracketed(state['host'])}:{state['port']}/v3/sessions?limit={MAX_SESSIONS}"
    request = urllib_request.Request(address, headers={"Authorization": f"Bearer {state['token']}"})
    # Without a proxy, because the daemon is on this machine, and the token must not leave it.
    opener = urllib_request.build_opener(urllib_request.ProxyHandler({}))
    with opener.open(request, timeout=REQUEST_S) as response:
        sessions: list[dict[str, Any]] = json.load(response)["sessions"]
    return sessions


def _open_without_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
