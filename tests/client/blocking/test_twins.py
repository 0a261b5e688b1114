"""Blocking clients have what their async twins have, under the same names, with the same arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from lmx_lab.client.blocking.daemon import DaemonClient
from lmx_lab.client.blocking.lab import LabClient
from lmx_lab.client.blocking.session import Session
from lmx_lab.client.blocking.subscription import BlockingSubscription
from lmx_lab.client.daemon import AsyncDaemonClient
from lmx_lab.client.event_subscription import Subscription
from lmx_lab.client.lab import AsyncLabClient
from lmx_lab.client.session import AsyncSession

ALONE = {"aclose", "close", "connection", "credentials", "session_id", "url"}
"""Of async clients alone, or attributes of instances, which are no members of classes."""


def members(of: type) -> dict[str, Any]:
    found = {name: getattr(of, name) for name in dir(of) if not name.startswith("_")}
    return {name: member for name, member in found.items() if name not in ALONE}


def arguments(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    given = inspect.signature(function).parameters.values()
    return [(it.name, it.kind, it.default) for it in given]


@pytest.mark.parametrize(
    ("twin", "blocking"),
    [
        (AsyncLabClient, LabClient),
        (AsyncDaemonClient, DaemonClient),
        (AsyncSession, Session),
        (Subscription, BlockingSubscription),
    ],
)
def test_they_have_the_same_methods_with_the_same_arguments(twin: type, blocking: type) -> None:
    there, here = members(twin), members(blocking)
    assert set(there) == set(here)
    for name, member in there.items():
        assert callable(member) == callable(here[name]), name
        if callable(member):
            assert arguments(member) == arguments(here[name]), name
