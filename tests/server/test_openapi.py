"""Tests that the OpenAPI document of the server is consistent and complete."""

import json

import pytest

from lmx_lab.engine import ModelManager
from lmx_lab.http.guard import GuardPolicy
from lmx_lab.server import create_server
from lmx_lab.server.events import EXTRAS
from lmx_lab.server.rerank import ANSWERS
from lmx_lab.settings import Settings
from lmx_lab.wire.chat import ChatRequest
from lmx_lab.wire.completions import CompletionRequest
from lmx_lab.wire.embeddings import EmbeddingsBody
from lmx_lab.wire.rerank import RerankBody, TextsRerankBody


@pytest.fixture(scope="module")
def api():
    policy = GuardPolicy(hosts=frozenset())
    return create_server(manager=ModelManager(Settings()), policy=lambda: policy).api


@pytest.fixture(scope="module")
def document(api):
    return api.openapi()


def values(node, name):
    """Return all values with this name, at any depth."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        if key == name:
            yield value
        if isinstance(value, dict | list):
            yield from values(value, name)


def operations(document):
    return [operation for path in document["paths"].values() for operation in path.values()]


def fields(document, model):
    """Return the schema of each field; for a nullable field, the alternative that is not null."""
    found = document["components"]["schemas"][model]["properties"]
    return {name: field.get("anyOf", [field])[0] for name, field in found.items()}


@pytest.mark.slow
def test_all_references_can_be_resolved(document):
    references = set(values(document, "$ref"))
    assert len(references) > 20
    for reference in references:
        node = document
        root, *path = reference.split("/")
        assert root == "#"
        for part in path:
            node = node[part]
    assert list(values(document, "$defs")) == []


@pytest.mark.slow
def test_streams_are_described_by_their_events(document):
    def stream(path, method):
        return document["paths"][path][method]["responses"]["200"]["content"]["text/event-stream"]["schema"]

    def shapes(data):
        assert data["contentMediaType"] == "application/json"
        return [place["$ref"].rsplit("/", 1)[1] for place in data["contentSchema"]["anyOf"]]

    for path, chunk in (("/v1/chat/completions", "ChatChunk"), ("/v1/completions", "Completion")):
        line, end = stream(path, "post")["properties"]["data"]["anyOf"]
        assert shapes(line) == [chunk, "ErrorBody"]
        assert end == {"const": "[DONE]"}
    assert len(shapes(stream("/admin/events", "get")["properties"]["data"])) == 7


def test_all_operations_have_descriptions(document):
    paths = {"/v1/chat/completions", "/v1/models", "/healthz", "/readyz", "/admin/models", "/admin/events"}
    assert paths <= set(document["paths"])
    assert [operation for operation in operations(document) if not operation.get("summary")] == []
    assert [operation["summary"] for operation in operations(document) if not operation.get("description")] == []


def test_failures_mention_their_headers(document):
    expected = {"Retry-After", "x-lmx-lab", "x-request-id", "x-should-retry"}
    for operation in operations(document):
        failures = {status: answer for status, answer in operation["responses"].items() if status >= "400"}
        assert {"403", "500"} <= set(failures)
        assert not {"422", "4XX"} & set(operation["responses"])
        # The body of /readyz has the same fields, whether the server is ready or not.
        assert [status for status, answer in failures.items() if not expected <= set(answer["headers"])] in (
            [],
            ["503"],
        )


def test_failures_have_one_body_and_name_their_codes(document):
    post = document["paths"]["/v1/chat/completions"]["post"]["responses"]

    def codes(status):
        body, narrowed = post[status]["content"]["application/json"]["schema"]["allOf"]
        assert body == {"$ref": "#/components/schemas/ErrorBody"}
        found = narrowed["properties"]["error"]["properties"]["code"]["enum"]
        assert all(f"`{code}`" in post[status]["description"] for code in found)
        return found

    assert codes("400") == ["invalid-request", "context_length_exceeded"]
    assert codes("429") == ["queue-full"]
    assert codes("503") == ["no-model-loaded", "oom-unloaded", "internal-error"]
    assert codes("504") == ["lmx-timeout"]


def test_the_websocket_is_described_by_its_messages(document):
    socket = document["paths"]["/v1/chat/stream"]["get"]
    assert "101" in socket["responses"]
    assert all(shape in socket["description"] for shape in ("ChatRequest", "SocketToken", "SocketDone", "SocketError"))


def test_numbers_have_their_limits(document):
    chat, plain = fields(document, "ChatRequest"), fields(document, "CompletionRequest")
    assert (chat["n"]["minimum"], chat["n"]["maximum"]) == (1, 8)
    assert (chat["top_logprobs"]["minimum"], chat["top_logprobs"]["maximum"]) == (0, 20)
    assert (chat["top_k"]["minimum"], chat["max_tokens"]["minimum"], plain["max_tokens"]["minimum"]) == (-1, 1, 0)
    assert fields(document, "EmbeddingsBody")["dimensions"]["minimum"] == 1
    assert fields(document, "RerankBody")["top_n"]["minimum"] == 1
    assert list(values(document, "ge")) == list(values(document, "le")) == []


def test_fields_that_are_not_supported_list_the_allowed_values(document):
    assert document["components"]["schemas"]["ChatRequest"]["properties"]["documents"]["enum"] == [None, []]


def test_formats_tools_and_choices_are_described(document):
    chat, schemas = fields(document, "ChatRequest"), document["components"]["schemas"]
    formats = [place["$ref"].rsplit("/", 1)[1] for place in chat["response_format"]["oneOf"]]
    assert formats == ["TextFormat", "JsonObjectFormat", "JsonSchemaFormat", "RegexFormat", "GrammarFormat"]
    assert schemas["NamedSchema"]["required"] == ["schema"]
    assert fields(document, "RegexFormat")["regex"]["maxLength"] == 65_536
    assert schemas["Tools"]["maxItems"] == 128
    assert chat["tool_choice"]["oneOf"][0]["enum"] == ["none", "auto", "required"]
    assert fields(document, "FunctionDefinition")["name"]["maxLength"] == 128
    assert "tool_calls" in fields(document, "AnswerMessage")
    assert "tool_calls" in fields(document, "ChoiceDelta")


def test_all_rerank_routes_have_both_bodies(document):
    for path, answer in ANSWERS.items():
        post = document["paths"][path]["post"]
        alternatives = post["requestBody"]["content"]["application/json"]["schema"]["oneOf"]
        assert [place["$ref"].rsplit("/", 1)[1] for place in alternatives] == ["RerankBody", "TextsRerankBody"]
        answers = json.dumps(post["responses"]["200"]["content"]["application/json"]["schema"])
        assert answer.__name__ in answers
        assert "TextRank" in answers


def test_the_examples_are_valid(document):
    for shape in (ChatRequest, CompletionRequest, EmbeddingsBody, RerankBody, TextsRerankBody):
        for example in document["components"]["schemas"][shape.__name__]["examples"]:
            shape.model_validate(example)


def test_include_is_described_with_its_values(document):
    (include,) = document["paths"]["/admin/events"]["get"]["parameters"]
    assert all(f"`{name}`" in include["description"] for name in EXTRAS)


def test_the_document_does_not_change_between_calls(api, document):
    before = json.dumps(document)
    assert json.dumps(api.openapi()) == before
