"""Events of the server, typed; those of a newer one are no failure."""

from __future__ import annotations

from typing import get_args

import pytest

from lmx_lab.client.inference import Include, KnownEvent, UnknownLabEvent, lab_event
from lmx_lab.server.events import EXTRAS
from lmx_lab.server.openapi import EVENTS
from lmx_lab.wire.admin import Heartbeat


def test_the_client_knows_what_the_server_sends() -> None:
    assert set(get_args(KnownEvent)) == set(EVENTS)
    assert set(get_args(Include)) == set(EXTRAS)


def test_new_fields_are_left_out() -> None:
    assert lab_event('{"type": "heartbeat", "uptime": 1.5, "mood": "good"}') == Heartbeat(uptime=1.5)


@pytest.mark.parametrize(
    "text", ['{"type": "weather", "rain": true}', '{"type": "heartbeat"}', '{"uptime": 1}', "[]", "{", "", "\x00"]
)
def test_what_is_not_known_is_passed_on_as_it_came(text: str) -> None:
    assert lab_event(text) == UnknownLabEvent(text=text)
