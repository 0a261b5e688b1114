"""A model that was unloaded for want of requests comes back with a panel's next one.

For everybody else ``ModelSwap`` does that, on the server's loop, which a cell may block; panels have a loop of their
own.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING

from lmx_lab.errors import ModelBusyError, ModelNotFoundError
from lmx_lab.server.naming import Kinds, rests_by_path
from lmx_lab.values.models import LoadSpec
from lmx_lab.weights.threads import in_thread

if TYPE_CHECKING:
    from lmx_lab.notebook.lab import Lab

TRIES = 3
"""How often somebody else's load or unload may come between."""


async def bring_back(lab: Lab, kinds: Kinds) -> None:
    """Load what rests, if it is of these kinds, and wait for loads of others; in swap mode only.

    Cancelling ends the waiting, not the load. A model that nobody unloaded for want of requests stays where it is.

    Raises:
        LabError: it could not be loaded.
    """
    loader = lab.services.loader
    for _ in range(TRIES):
        # A model that is kept beside the loaded one answers, whatever is being loaded.
        if not lab.settings.swap or any(pinned.entry.answers(kinds) for pinned in lab.engine.snapshot.pinned):
            return
        await loader.settled()
        now = lab.engine.snapshot
        if (name := now.resting_model) is None:
            return
        local = rests_by_path(name, now)
        try:
            entry = await in_thread(functools.partial(lab.catalog.resolve, name, local=local))
        except ModelNotFoundError:
            return  # its files were deleted meanwhile; the engine says what is missing
        if not entry.answers(kinds):
            return
        with contextlib.suppress(ModelBusyError):
            await loader.load(LoadSpec(model=entry.id), local=local, finish_queued=True)
