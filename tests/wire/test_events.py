"""Tests that every event of the daemon is in the union, has a text for display and is documented."""

import inspect
import json
import re
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from lmx_lab.client import daemon_events
from lmx_lab.wire import events
from lmx_lab.wire.events import (
    EVENT_CLASSES,
    LOG_EVENTS,
    BaseControlFrame,
    BaseEvent,
    UnknownEvent,
    daemon_event,
    topic_of,
)

DOCS = Path(__file__).parents[2] / "docs" / "daemon.md"
AT = "2026-11-22T10:00:00.123Z"
STATS = {
    **{"tokens": 3, "prompt_tokens": 9, "completion_tokens": 3, "tool_calls": 1, "steps": 2, "elapsed_s": 1.5},
    **{"tokens_per_second": 20.0, "ttft_ms": 40.0},
}


def classes():
    """Return all event classes that the wire package defines, in the union or not."""
    found = {it for it in vars(events).values() if inspect.isclass(it)}
    return {it for it in found if issubclass(it, BaseEvent) and not inspect.isabstract(it) and it is not UnknownEvent}


def sample(annotation):
    """Return a JSON value of the type."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return {
            name: sample(field.annotation) for name, field in annotation.model_fields.items() if field.is_required()
        }
    if "Literal" in str(annotation) and not str(annotation).startswith("dict"):
        return get_args(annotation)[0] if isinstance(get_args(annotation)[0], str) else sample(get_args(annotation)[0])
    simple = {str: "word", int: 1, float: 1.0, bool: False}
    if annotation in simple:
        return simple[annotation]
    return {"dict": {}, "list": []}.get(str(annotation).partition("[")[0])


def frame(kind):
    member = EVENT_CLASSES[kind]
    made = {"event": kind, "at": AT, "stream_id": "stm_1", "data": sample(member.model_fields["data"].annotation)}
    return made | {"seq": 1 if kind in LOG_EVENTS else None} | ({"stats": STATS} if kind == "turn.done" else {})


def test_every_event_class_is_in_the_union():
    assert set(EVENT_CLASSES.values()) == classes()
    assert {kind for kind, it in EVENT_CLASSES.items() if not issubclass(it, BaseControlFrame)} == LOG_EVENTS


@pytest.mark.parametrize("kind", EVENT_CLASSES)
def test_every_event_is_parsed_as_its_class_and_has_a_display_text(kind):
    event = daemon_event(json.dumps(frame(kind)))
    assert type(event) is EVENT_CLASSES[kind]
    assert event.display_text().strip()
    assert event.display_tone in {"", "good", "warn", "bad"}


@pytest.mark.parametrize("kind", EVENT_CLASSES)
def test_every_event_has_a_topic_and_a_row_in_the_documentation(kind):
    assert topic_of(kind) != "other"
    table = DOCS.read_text(encoding="utf-8").partition("## Events\n")[2].partition("\n## ")[0]
    documented = set(re.findall(r"`([a-z]+\.[a-z]+)`", " ".join(re.findall(r"^\| (.*?) \|", table, re.MULTILINE))))
    assert kind in documented
    assert documented <= set(EVENT_CLASSES)


def test_an_unknown_event_of_a_newer_daemon_has_a_display_text():
    event = daemon_event(json.dumps(frame("turn.token") | {"event": "turn.new", "data": {"so": "so"}}))
    assert isinstance(event, UnknownEvent)
    assert (event.display_text(), topic_of("turn.new"), topic_of("quite.new")) == ('{"so": "so"}', "turns", "other")


def test_the_client_exports_every_event_class():
    assert all(getattr(daemon_events, it.__name__) is it for it in classes())
