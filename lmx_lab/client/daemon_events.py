"""Export the classes of the daemon's events: ``match event: case TurnTokenEvent(): print(event.data.text)``.

They are defined in ``lmx_lab.wire.events``, together with the ``data`` of each event.
"""

# Star imports, so that a new event needs no entry in another list of names.
from lmx_lab.wire.events import *  # noqa: F403
