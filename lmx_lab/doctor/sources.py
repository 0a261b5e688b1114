"""Models: what is here, and whether the hub could bring more."""

from __future__ import annotations

import os
import shlex
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException

from lmx_lab.doctor.finding import Finding
from lmx_lab.settings import Settings
from lmx_lab.weights import Catalog

HUB_S = 2.0
YES = ("1", "true", "yes", "on")
STILL = "starters and what is on disk work without it"


def examine_models(settings: Settings) -> Iterator[Finding]:
    for folder in settings.model_folders:
        if not os.path.isdir(folder):
            yield Finding(
                topic="models",
                verdict="bad",
                found=f"{folder}, one of LMX_LAB_MODEL_FOLDERS, is no folder that can be read",
                means="commands that look for models refuse it",
                remedy=f"mkdir -p {shlex.quote(str(folder))}, or name another one",
            )
    ids = [entry.id for entry in Catalog(settings).scan()]
    if ids:
        yield Finding(topic="models", verdict="fine", found=", ".join(ids))
        return
    yield Finding(
        topic="models",
        verdict="note",
        found=f"none in {settings.models_folder} or the hub cache",
        means="there is nothing to load yet",
        remedy="lmx-lab pull smollm2-135m",
    )


def examine_hub(settings: Settings) -> Iterator[Finding]:
    from lmx_lab.weights.hub.download import endpoint

    url = endpoint()
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in YES:
        yield _not_asked("HF_HUB_OFFLINE", "is set", f"org/name cannot be fetched; {STILL}")
    elif not settings.downloads:
        yield _not_asked("LMX_LAB_DOWNLOADS", "is 0", "nothing but lmx-lab pull fetches models")
    elif (reason := unreachable(url, HUB_S)) is not None:
        yield Finding(
            topic="hub",
            verdict="note",
            found=f"{url} cannot be reached from here ({reason})",
            means=f"org/name cannot be fetched; {STILL}",
            remedy="look at the network and HTTPS_PROXY, or export HF_ENDPOINT=MIRROR",
        )
    else:
        yield Finding(topic="hub", verdict="fine", found=f"{url} answers")


def _not_asked(variable: str, value: str, means: str) -> Finding:
    found = f"{variable} {value}, so it was not asked"
    return Finding(topic="hub", verdict="note", found=found, means=means, remedy=f"unset {variable}")


def unreachable(url: str, patience_s: float) -> str | None:
    """Why nothing answers there within this time; None if something does. As the environment says, through a proxy."""
    reasons: list[str | None] = []
    # A thread that nobody waits for: to look a name up can take a minute, and cannot be cut short.
    asking = threading.Thread(target=lambda: reasons.append(_refused(url, patience_s)), daemon=True)
    asking.start()
    asking.join(patience_s)
    return reasons[0] if reasons else f"no answer within {patience_s:g} s"


def _refused(url: str, patience_s: float) -> str | None:
    try:
        request = urllib.request.Request(url, method="HEAD", headers={"user-agent": "lmx-lab"})
        urllib.request.urlopen(request, timeout=patience_s).close()
    except urllib.error.HTTPError as exc:
        # Whoever says "not found" or "log in" is there; a gateway that cannot go on is not.
        return f"status {exc.code}" if exc.code >= 500 else None
    except urllib.error.URLError as exc:
        return str(exc.reason.strerror if isinstance(exc.reason, OSError) and exc.reason.strerror else exc.reason)
    except (OSError, ValueError, HTTPException) as exc:
        return str(exc)
    return None
