"""Ask the running labs of a home for their models, and for the files that they use."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from lmx_lab.client.lab import AsyncLabClient
from lmx_lab.errors import LabError, UnreachableError
from lmx_lab.running import running_labs
from lmx_lab.settings import Settings
from lmx_lab.urls import local_url
from lmx_lab.wire.admin import ModelRecords

ANSWER_S = 10.0
"""Time limit for the list of models of a lab."""


@dataclass(frozen=True, kw_only=True)
class FilesInUse:
    """The files of models that running labs have in memory or are loading."""

    unloads: dict[Path, str] = field(default_factory=dict)
    """The command that unloads the model or cancels its load, by the path of the model."""
    unknown: tuple[str, ...] = ()
    """Labs that did not list their models, or the files of these, each with the reason."""


async def ask_labs(settings: Settings, *, besides: int | None = None) -> dict[str, ModelRecords | LabError]:
    """Return the models of each running lab of this home, or the error of a lab that does not list them, by URL.

    The lab at the configured port is included even if it has another home.

    Args:
        besides: The port of a lab to leave out.
    """
    labs = await asyncio.to_thread(running_labs, settings.home)
    urls = {lab.url for lab in labs if lab.port != besides}
    if settings.port not in (0, besides):
        urls.add(local_url(settings.host, settings.port))

    async def ask(url: str) -> ModelRecords | LabError:
        try:
            async with AsyncLabClient(url, api_key=settings.api_key) as client, asyncio.timeout(ANSWER_S):
                return await client.models()
        except TimeoutError:
            return LabError(f"no answer within {ANSWER_S:g} s")
        except LabError as exc:
            return exc

    answers = dict(zip(sorted(urls), await asyncio.gather(*map(ask, sorted(urls))), strict=True))
    return {url: answer for url, answer in answers.items() if not isinstance(answer, UnreachableError)}


async def files_in_use(settings: Settings, *, besides: int | None = None) -> FilesInUse:
    """Return the files of models that running labs use; see ``ask_labs``."""
    unloads: dict[Path, str] = {}
    unknown = []
    for url, answer in (await ask_labs(settings, besides=besides)).items():
        if isinstance(answer, LabError):
            unknown.append(f"the lab at {url} does not list its models: {answer.message}")
        elif answer.in_use is None:
            # A lab takes callers at its address in a network for those of another machine.
            unknown.append(f"the lab at {url} does not list the files that it uses")
        else:
            unloads |= {Path(path): f"lmx-lab unload {model} --url {url}" for path, model in answer.in_use.items()}
    return FilesInUse(unloads=unloads, unknown=tuple(unknown))
