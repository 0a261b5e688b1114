"""The daemon's events as the client returns them: ``match event: case TurnTokenEvent(): print(event.data.text)``.

These are the classes of ``lmx_lab.wire.events`` and ``lmx_lab.wire.event_stream``, which also define the ``data`` of
each event.
"""

# Star imports, so that a new event is available here without another list of names.
from lmx_lab.wire.event_stream import *  # noqa: F403
from lmx_lab.wire.events import *  # noqa: F403
