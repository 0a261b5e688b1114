"""Requests as other projects' clients send them, recorded once and sent again here without the clients.

Each file in ``tests/client_requests`` is one request as JSON::

    {
        "client": "openai-python 3.54.0",
        "method": "POST",
        "path": "/v1/chat/completions",
        "headers": [["accept", "application/json"], ...],
        "body": {"model": "default", ...},
        "ignored": ["user"]
    }

``headers`` are in the order in which the client sends them, without ``host`` and ``content-length``. ``body`` has its
fields in their order too, and long texts are replaced; it is absent for requests without a body. ``ignored`` names the
fields that the server ignores, and may be absent. ``make clients`` records the requests of the clients in
``docs/clients.md`` again with ``RECORD=folder``.

The answer must be 200, and its body must have the form of its route. ``FORMS`` has the form of each route.
"""

import http.client
import json
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from lmx_lab.wire.chat import ChatChunk, ChatCompletion
from lmx_lab.wire.completions import Completion
from lmx_lab.wire.embeddings import EmbeddingList
from lmx_lab.wire.messages import Message, MessageEvent, TokenCount
from lmx_lab.wire.ollama import (
    OllamaChatAnswer,
    OllamaEmbedAnswer,
    OllamaEmbeddingsAnswer,
    OllamaGenerateAnswer,
    OllamaModelInfo,
    OllamaModels,
    OllamaPullProgress,
    OllamaRunningModels,
    OllamaVersion,
)
from lmx_lab.wire.rerank import CohereResults, DocumentResults, RerankResults, TextRank
from lmx_lab.wire.responses import ModelResponse, ResponseEvent
from tests.support.labs import serving

FOLDER = Path(__file__).parents[1] / "client_requests"


def body_of(model):
    """Return a check that the answer is one JSON value of this form."""

    def check(text):
        TypeAdapter(model).validate_json(text)

    return check


def events_of(model, *, end=""):
    """Return a check that the answer consists of server-sent events of this form.

    Args:
        end: Data of the last event if it has another form.
    """

    def check(text):
        data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        if end:
            assert data.pop() == end
        assert data
        for event in data:
            model.model_validate_json(event)

    return check


def lines_of(model):
    """Return a check that the answer consists of lines of JSON of this form."""

    def check(text):
        *lines, rest = text.split("\n")
        assert lines
        assert rest == ""
        for line in lines:
            model.model_validate_json(line)

    return check


FORMS = {
    "/v1/chat/completions": (body_of(ChatCompletion), events_of(ChatChunk, end="[DONE]")),
    "/v1/completions": (body_of(Completion), events_of(Completion, end="[DONE]")),
    "/v1/messages": (body_of(Message), events_of(MessageEvent)),
    "/v1/messages/count_tokens": (body_of(TokenCount), None),
    "/v1/responses": (body_of(ModelResponse), events_of(ResponseEvent)),
    "/v1/embeddings": (body_of(EmbeddingList), None),
    "/v1/rerank": (body_of(RerankResults), None),
    "/v2/rerank": (body_of(CohereResults), None),
    "/rerank": (body_of(DocumentResults | list[TextRank]), None),
    "/api/chat": (body_of(OllamaChatAnswer), lines_of(OllamaChatAnswer)),
    "/api/generate": (body_of(OllamaGenerateAnswer), lines_of(OllamaGenerateAnswer)),
    "/api/embed": (body_of(OllamaEmbedAnswer), None),
    "/api/embeddings": (body_of(OllamaEmbeddingsAnswer), None),
    "/api/tags": (body_of(OllamaModels), None),
    "/api/ps": (body_of(OllamaRunningModels), None),
    "/api/show": (body_of(OllamaModelInfo), None),
    "/api/pull": (body_of(OllamaPullProgress), lines_of(OllamaPullProgress)),
    "/api/version": (body_of(OllamaVersion), None),
}
"""For each route, the checks of a complete answer, which is ``application/json``, and of a streamed one."""


def recorded():
    return sorted(FOLDER.glob("*.json"))


@pytest.fixture(scope="module")
def echo(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("clients"), "echo", any_model=True) as lab:
        yield lab


def send(lab, request):
    """Send a recorded request with exactly its headers."""
    data = json.dumps(request["body"]).encode() if "body" in request else b""
    connection = http.client.HTTPConnection("127.0.0.1", lab.server.port, timeout=60)
    try:
        connection.putrequest(request["method"], request["path"], skip_accept_encoding=True)
        for name, value in request["headers"]:
            connection.putheader(name, value)
        connection.putheader("content-length", str(len(data)))
        connection.endheaders(data)
        response = connection.getresponse()
        return response, response.read().decode()
    finally:
        connection.close()


@pytest.mark.parametrize("path", recorded(), ids=lambda path: path.stem)
def test_a_recorded_request_is_answered_in_the_form_of_its_route(echo, path):
    request = json.loads(path.read_text(encoding="utf-8"))
    response, text = send(echo, request)
    assert response.status == 200, text
    whole, streamed = FORMS[request["path"].partition("?")[0]]
    is_whole = response.getheader("content-type") == "application/json"
    check = whole if is_whole else streamed
    check(text)
    ignored = response.getheader("x-lmx-ignored")
    assert (ignored.split(", ") if ignored else []) == request.get("ignored", [])


def test_requests_are_recorded():
    assert recorded()
