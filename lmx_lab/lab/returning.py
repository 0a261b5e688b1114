"""A model that was unloaded for want of requests comes back with a panel's next one.

For everybody else ``ModelSwap`` does that, on the server's loop, which a cell may block; panels have a loop of their
own.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from lmx_lab.errors import ModelBusyError, ModelNotFoundError
from lmx_lab.server.naming import Kinds, rests_by_path
from lmx_lab.weights import ModelEntry

if TYPE_CHECKING:
    from lmx_lab.lab.running import Lab

TRIES = 3
"""How often somebody else's load or unload may come between."""


async def bring_back(lab: Lab, kinds: Kinds) -> None:
    """Load what rests, if it is of these kinds, and wait for loads of others; in swap mode only.

    Cancelling ends the waiting, not the load. A model that nobody unloaded for want of requests stays where it is.

    Raises:
        LabError: it could not be loaded.
    """
    if not lab.settings.swap:
        return
    loader = lab.services.loader
    for _ in range(TRIES):
        await loader.settled()
        entry = await _resting(lab, kinds)
        if entry is None:
            return
        with contextlib.suppress(ModelBusyError):
            local = rests_by_path(entry.id, lab.engine.snapshot)
            await loader.load(entry.id, local=local, finish_queued=True)


async def _resting(lab: Lab, kinds: Kinds) -> ModelEntry | None:
    now = lab.engine.snapshot
    kept = any(pinned.entry.kind in kinds for pinned in now.pinned)
    if kept or now.resting_model is None:
        return None
    try:
        local = rests_by_path(now.resting_model, now)
        entry = await asyncio.to_thread(lab.catalog.resolve, now.resting_model, local=local)
    except ModelNotFoundError:
        return None  # its files were deleted meanwhile; the engine says what is missing
    return entry if entry.kind in kinds else None
