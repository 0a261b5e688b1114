"""Complete models and sessions for the Tab key; typer completes commands and options.

The user waits for the completion. Therefore only the names of folders and files are read, not the models, and a request
to the daemon has a short time limit. After a failure there are no completions and no message, because a message would
appear in the line that is being typed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress

from lmx_lab.settings import Settings
from lmx_lab.urls import bracketed
from lmx_lab.values.models import ECHO


def complete_model(incomplete: str) -> list[str]:
    """Complete ids of models in the lab's own folder and in additional folders, and of starter models."""
    with suppress(Exception):
        from lmx_lab.weights.starters import STARTERS

        return _beginning_with(incomplete, {*_local_models(), *STARTERS})
    return []


def complete_pull(incomplete: str) -> list[str]:
    """Complete ids of starter models that are not on the disk."""
    with suppress(Exception):
        from lmx_lab.weights.starters import STARTERS

        return _beginning_with(incomplete, set(STARTERS) - _local_models())
    return []


def complete_session(incomplete: str) -> list[str]:
    """Complete ids of the last used sessions of this user's own daemon."""
    with suppress(Exception):
        # The import takes 25 ms, and other commands do not need it.
        from urllib.request import ProxyHandler, Request, build_opener

        # The same checks as in lmx_lab.client.credentials, whose import would take too long: only this user can have
        # written the file.
        path = Settings.read().daemon_folder / "state.json"
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), encoding="utf-8") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or status.st_mode & 0o077:
                return []
            state = json.load(file)
        address = f"http://{bracketed(state['host'])}:{state['port']}/v3/sessions?limit=100"
        request = Request(address, headers={"Authorization": f"Bearer {state['token']}"})
        # Without a proxy, because the daemon is on this machine, and the token must not leave it.
        with build_opener(ProxyHandler({})).open(request, timeout=0.5) as response:
            ids: list[str] = [session["session_id"] for session in json.load(response)["sessions"]]
        return [id_ for id_ in ids if id_.startswith(incomplete)]
    return []


def _beginning_with(incomplete: str, names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if name.startswith(incomplete))


def _local_models() -> set[str]:
    """Return the ids in the lab's own folder and in additional folders. Reading the hub's cache would take longer."""
    from lmx_lab.weights.locations import folder_locations
    from lmx_lab.weights.starters import find_starter

    settings = Settings.read()
    names = [location.id for location in folder_locations(settings.models_folder, "store")]
    found = {name if (starter := find_starter(name)) is None else starter.id for name in names}
    for folder in settings.model_folders:
        found |= {location.id for location in folder_locations(folder, "folder")}
    # This name is reserved for the built-in model; a folder with this name can only be loaded by its path.
    return found - {ECHO.id}
