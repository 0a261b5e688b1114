"""Tests that blocking classes have the methods of the async classes, with the same arguments."""

import pytest

from lmx_lab.blocking import with_keywords
from lmx_lab.client.daemon import AsyncDaemonClient, BlockingSubscription, DaemonClient
from lmx_lab.client.lab import AsyncLabClient, LabClient
from lmx_lab.client.session import AsyncSession, Session
from lmx_lab.client.subscription import Subscription

ALONE = {"aclose", "close", "connection", "credentials", "session_id", "url"}
"""Members that only async or only blocking classes have, and attributes of instances."""


def members(of):
    found = {name: getattr(of, name) for name in dir(of) if not name.startswith("_")}
    return {name: member for name, member in found.items() if name not in ALONE}


def arguments(function):
    return [(it.name, it.kind, it.default) for it in with_keywords(function).parameters.values()]


@pytest.mark.parametrize(
    ("async_class", "blocking"),
    [
        (AsyncLabClient, LabClient),
        (AsyncDaemonClient, DaemonClient),
        (AsyncSession, Session),
        (Subscription, BlockingSubscription),
    ],
)
def test_blocking_classes_have_the_methods_and_arguments_of_async_classes(async_class, blocking):
    theirs, ours = members(async_class), members(blocking)
    assert set(theirs) == set(ours)
    for name, member in theirs.items():
        assert callable(member) == callable(ours[name]), name
        if callable(member):
            assert arguments(member) == arguments(ours[name]), name
