"""Tests of error responses of all routes: each has the common error body with a code that the document contains."""

import httpx2
import pytest

from tests.contract.openapi import OpenApiContract, code_of
from tests.support.labs import serving

pytestmark = pytest.mark.slow
METHODS = {"GET", "POST", "PUT", "PATCH", "DELETE"}


@pytest.fixture(params=["server", "api"])
def contract(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def keyed(tmp_path):
    """Run an inference server with an API key."""
    with serving(tmp_path, "echo", api_key="s3cret", downloads=False) as lab, httpx2.Client() as http:
        authorization = {"authorization": "Bearer s3cret"}
        document = http.get(f"{lab.url}/openapi.json", headers=authorization)
        assert document.json()["security"] == [{"key": []}]
        yield OpenApiContract(f"{lab.url}/openapi.json", key="s3cret")


def placeholder_parameters(operation):
    return {part["name"]: "nothing" for part in operation.get("parameters", ()) if part["in"] == "path"}


@pytest.mark.parametrize(
    ("header", "value", "status", "code"),
    [("Host", "evil.example", 421, "host-forbidden"), ("Origin", "http://evil.example", 403, "origin-forbidden")],
)
def test_requests_with_a_foreign_host_or_origin_are_rejected_by_all_routes(contract, header, value, status, code):
    for method, path, operation in contract.operations():
        answer = contract.request(
            method, path, headers={**contract.headers, header: value}, at=placeholder_parameters(operation)
        )
        assert (answer.status_code, code_of(answer.json())) == (status, code), (method, path)


def test_all_routes_except_health_checks_need_the_key(api, keyed):
    for contract in (api, keyed):
        for method, path, operation in contract.operations():
            answer = contract.request(method, path, headers={}, at=placeholder_parameters(operation))
            if operation.get("security") == []:
                assert answer.status_code != 401, (method, path)
            else:
                assert (answer.status_code, code_of(answer.json())) == (401, "unauthorized"), (method, path)


def test_bodies_that_are_too_large_are_rejected_by_all_routes(contract):
    large = {"x": "x" * 9 * 2**20}
    for method, path, operation in contract.operations():
        if "requestBody" in operation:
            answer = contract.request(method, path, body=large, at=placeholder_parameters(operation))
            assert (answer.status_code, code_of(answer.json())) == (413, "body-too-large"), (method, path)


NAMED_PATHS = ("/v1/chat/stream", "/v1/responses/compact", "/v1/responses/input_tokens")
"""A WebSocket, and paths that other methods read as the id of a response."""


def test_other_methods_are_rejected_with_the_list_of_allowed_methods(contract):
    base = contract.schema.get_base_url()
    taken = {}
    for method, path, _ in contract.operations():
        taken.setdefault(path, set()).add(method)
    assert any(len(methods) > 1 for methods in taken.values())
    with httpx2.Client(base_url=base, headers=contract.headers) as http:
        for path, methods in taken.items():
            if path in NAMED_PATHS:
                continue
            for method in METHODS - methods:
                answer = http.request(method, path)
                assert answer.status_code == 405, (method, path)
                allowed = {name.strip() for name in answer.headers["allow"].split(",")}
                # Load balancers may send HEAD to the health routes, which is not in the document.
                assert allowed - {"HEAD"} == methods, path
                assert code_of(answer.json()) == "invalid-request"


def test_unknown_paths_are_rejected_with_the_common_error_body(contract):
    with httpx2.Client(base_url=contract.schema.get_base_url(), headers=contract.headers) as http:
        for path in ("/nothing", "/v1/nothing", "/v3/nothing", "/v3/sessions/a%2Fb", "/v1/chat/stream"):
            answer = http.get(path)
            assert (answer.status_code, code_of(answer.json())) == (404, "invalid-request"), path
            assert answer.json()["error"]["request_id"] == answer.headers["x-request-id"]
