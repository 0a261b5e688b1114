"""Check which models are on disk, and whether the Hugging Face Hub can be reached."""

from __future__ import annotations

import os
import shlex
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException

from lmx_lab.doctor import Finding
from lmx_lab.settings import Settings
from lmx_lab.values.models import by_model
from lmx_lab.weights.catalog import Catalog
from lmx_lab.weights.files import start_in_thread
from lmx_lab.weights.hub_download import endpoint

TRUE_VALUES = ("1", "true", "yes", "on")
"""Values of ``HF_HUB_OFFLINE`` that ``huggingface_hub`` takes as true."""
WITHOUT_HUB = "models named org/name cannot be downloaded; starter models and models on disk work without the hub"


def check_models(settings: Settings) -> Iterator[Finding]:
    """Check the folders with models, and list the models in them."""
    for folder in settings.model_folders:
        if not os.path.isdir(folder):
            yield Finding(
                topic="models",
                verdict="bad",
                found=f"{folder}, one of LMX_LAB_MODEL_FOLDERS, is not a readable folder",
                means="commands that search for models report an error",
                remedy=f"mkdir -p {shlex.quote(str(folder))}, or change LMX_LAB_MODEL_FOLDERS",
            )
    models = by_model(Catalog(settings).scan())
    for name, entries in models.items():
        for warning in dict.fromkeys(entry.warning for entry in entries if entry.warning):
            yield Finding(topic="models", verdict="note", found=f"{name}: {warning}")
    if models:
        yield Finding(topic="models", verdict="fine", found=", ".join(models))
        return
    yield Finding(
        topic="models",
        verdict="note",
        found=f"no model in {settings.models_folder} or in the hub cache",
        means="there is no model to load yet",
        remedy="lmx-lab pull smollm2-135m",
    )


def check_hub(settings: Settings) -> Iterator[Finding]:
    """Check that the hub can be reached, unless downloads are turned off."""
    url = endpoint()
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in TRUE_VALUES:
        yield _not_contacted("HF_HUB_OFFLINE", "is set", WITHOUT_HUB)
    elif not settings.downloads:
        yield _not_contacted("LMX_LAB_DOWNLOADS", "is 0", "only lmx-lab pull downloads models")
    elif (reason := find_connection_problem(url, 2.0)) is not None:
        yield Finding(
            topic="hub",
            verdict="note",
            found=f"{url} cannot be reached from here ({reason})",
            means=WITHOUT_HUB,
            remedy="check the network and HTTPS_PROXY, or export HF_ENDPOINT=MIRROR",
        )
    else:
        yield Finding(topic="hub", verdict="fine", found=f"{url} answers")


def _not_contacted(variable: str, value: str, means: str) -> Finding:
    found = f"{variable} {value}, so the hub was not contacted"
    return Finding(topic="hub", verdict="note", found=found, means=means, remedy=f"unset {variable}")


def find_connection_problem(url: str, timeout_s: float) -> str | None:
    """Return why a server does not answer in time, or ``None`` if it does. Uses the proxies of the environment."""
    # A name lookup can take a minute and cannot be cancelled, so a thread that may outlive this call makes the request.
    problem = start_in_thread(lambda: _request(url, timeout_s), name="lmx-lab-doctor-hub")
    try:
        return problem.result(timeout_s)
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"


def _request(url: str, timeout_s: float) -> str | None:
    try:
        request = urllib.request.Request(url, method="HEAD", headers={"user-agent": "lmx-lab"})
        urllib.request.urlopen(request, timeout=timeout_s).close()
    except urllib.error.HTTPError as exc:
        # "Not found" or "unauthorized" proves that the server is there; the error of a gateway does not.
        with exc:
            return f"status {exc.code}" if exc.code >= 500 else None
    except urllib.error.URLError as exc:
        return str(exc.reason.strerror if isinstance(exc.reason, OSError) and exc.reason.strerror else exc.reason)
    except (OSError, ValueError, HTTPException) as exc:
        return str(exc)
    return None
