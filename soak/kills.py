"""End and kill every program of the lab at random moments, and start it again."""

from __future__ import annotations

from soak import killed_daemons, killed_pulls, killed_servers
from soak.row import Row
from soak.soak import Soak


def run(soak: Soak) -> list[Row]:
    if soak.kills is not None:
        return killed_daemons.run(soak)
    return [*killed_servers.run(soak), *killed_pulls.run(soak), *killed_daemons.run(soak)]
