"""Every program of the lab told to end, or killed, at moments that nobody has chosen; and the start after that."""

from __future__ import annotations

from soak import killed_daemons, killed_pulls, killed_servers
from soak.row import Row
from soak.soak import Soak


def run(soak: Soak) -> list[Row]:
    return [*killed_servers.run(soak), *killed_pulls.run(soak), *killed_daemons.run(soak)]
