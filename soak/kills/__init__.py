"""End and kill every program of the lab at random moments, and start it again."""

from __future__ import annotations

from soak.kills import daemons, pulls, servers
from soak.report import Row, Soak


def run(soak: Soak) -> list[Row]:
    if soak.kills is not None:
        return daemons.run(soak)
    return [*servers.run(soak), *pulls.run(soak), *daemons.run(soak)]
