"""Tests that ids in URLs and bodies are never used as paths, in any spelling."""

import json
from urllib.parse import unquote

import pytest

from tests.support.sockets import send

# Sent unchanged in the request line, because client libraries normalize some of them.
SPELLINGS = [
    *("..", "../../etc/passwd", "..%2f..%2fetc%2fpasswd", "%2e%2e/%2e%2e/etc/passwd"),
    *("..%5c..%5cetc", "%252e%252e%252f"),
    *("%2fetc%2fpasswd", "/etc/passwd", "//etc/passwd", "echo%00", "%00", "echo/..", "echo/../other", "other%2f.."),
    *("%c0%ae%c0%ae%c0%af", "~", "%7e%2f.ssh", "file:%2f%2f%2fetc", "other%0d%0aX-Injected:%201", "a" * 5000),
]
BODIES = [
    *("..", "../../x", "/etc/passwd", "\0", "a\0b", "a/b", "a\\b", "\ud800", "a\r\nX: 1", "a" * 5000, ".", "~", " ", "")
]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_model_id_in_a_url_is_not_a_path(open_lab, spelling):
    answer = send(open_lab.server.port, f"GET /v1/models/{spelling}")
    assert answer.status == 404, answer.body
    assert b"root:" not in answer.body
    assert "injected" not in answer.head.lower()


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_session_id_in_a_url_is_not_a_path(daemon, spelling):
    right = ("Authorization", f"Bearer {daemon.token}")
    before = sorted(daemon.folder.parent.rglob("*"))
    # Deleting is idempotent, so deleting a missing session succeeds. An id with a slash is no route.
    deleted = 404 if "/" in unquote(spelling) else 204
    for method, rest, status in (("GET", "", 404), ("DELETE", "", deleted), ("GET", "/x", 404)):
        answer = send(daemon.port, f"{method} /v3/sessions/{spelling}{rest}", [right])
        assert answer.status == status, (method, answer.body)
        assert b"root:" not in answer.body
        assert "injected" not in answer.head.lower()
    assert sorted(daemon.folder.parent.rglob("*")) == before


@pytest.mark.parametrize("name", BODIES)
def test_an_id_in_a_body_is_not_a_path(daemon, open_lab, name):
    right = [("Authorization", f"Bearer {daemon.token}"), ("Content-Type", "application/json")]
    before = sorted(daemon.folder.parent.rglob("*"))
    made = send(daemon.port, "POST /v3/sessions", right, json.dumps({"session_id": name}).encode())
    assert made.status == 400, made.body
    assert sorted(daemon.folder.parent.rglob("*")) == before
    chat = {"model": name or "..", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    asked = send(open_lab.server.port, "POST /v1/chat/completions", right[1:], json.dumps(chat).encode())
    assert asked.status == 404, asked.body
