"""Answer requests whose path differs from that of a route: clients build paths from a base URL with or without ``/v1``.

llama.cpp's server has most of its routes with and without ``/v1``, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send

PREFIXES = frozenset({"v1", "openai", "api"})
"""First parts of paths that a base URL may lack, or have in addition."""
ROUTE = "lmx_lab.route"
"""Key in a request's scope: the route that answers it."""


class OtherPaths(BaseRoute):
    """The last route. It passes a request to the route with the most similar path.

    Args:
        routes: All other routes.
    """

    def __init__(self, routes: Sequence[BaseRoute]) -> None:
        self._routes = list(routes)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        prefix = scope.get("root_path", "")
        path = scope["path"].removeprefix(prefix)
        partial: tuple[Match, Scope] = (Match.NONE, {})
        for similar in similar_paths(path):
            changed = {"path": prefix + similar}
            for route in self._routes:
                match, found = route.matches({**scope, **changed})
                if match is Match.FULL:
                    return match, {**found, **changed, ROUTE: route}
                if match is Match.PARTIAL and partial[0] is Match.NONE:
                    partial = match, {**found, **changed, ROUTE: route}
        return partial

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        route: BaseRoute = scope[ROUTE]
        await route.handle(scope, receive, send)


def similar_paths(path: str) -> Iterator[str]:
    """Yield other forms of a path: without empty parts, and with fewer prefixes or with ``/v1`` at the beginning."""
    similar = re.sub("/+", "/", path).rstrip("/")
    # Limited, because each path is compared with those of all routes.
    for _ in range(3):
        if not similar:
            return
        if similar != path:
            yield similar
        yield f"/v1{similar}"
        first, slash, rest = similar[1:].partition("/")
        if first not in PREFIXES:
            return
        similar = slash + rest
