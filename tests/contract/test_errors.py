"""What every address may answer, whoever asks and however: each refusal is the one error body, with a code that the
document names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.contract.conftest import HERE
from tests.contract.openapi import Contract
from tests.flows.conftest import serving

SOCKET = "/v1/chat/stream"
METHODS = {"GET", "POST", "PUT", "PATCH", "DELETE"}


@pytest.fixture(params=["server", "api"])
def contract(request: pytest.FixtureRequest) -> Contract:
    found: Contract = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[Contract]:
    """An inference server that asks for a key."""
    with serving(tmp_path, "echo", api_key="s3cret", downloads=False) as lab, httpx2.Client() as http:
        authorization = {"authorization": "Bearer s3cret"}
        document = http.get(f"{lab.url}/openapi.json", headers=authorization)
        assert document.json()["security"] == [{"key": []}]
        yield Contract(f"{lab.url}/openapi.json", key="s3cret", config=HERE / "server.toml")


def somewhere(operation: dict[str, Any]) -> dict[str, str]:
    return {part["name"]: "nothing" for part in operation.get("parameters", ()) if part["in"] == "path"}


@pytest.mark.parametrize(
    ("header", "value", "status", "code"),
    [("Host", "evil.example", 421, "host-forbidden"), ("Origin", "http://evil.example", 403, "origin-forbidden")],
)
def test_strangers_are_refused_everywhere_as_described(
    contract: Contract, header: str, value: str, status: int, code: str
) -> None:
    for method, path, operation in contract.operations():
        answer = contract.ask(method, path, headers={**contract.headers, header: value}, at=somewhere(operation))
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), (method, path)


def test_without_the_key_there_is_only_the_health(api: Contract, keyed: Contract) -> None:
    for contract in (api, keyed):
        for method, path, operation in contract.operations():
            answer = contract.ask(method, path, headers={}, at=somewhere(operation))
            open_to_all = operation.get("security") == []
            assert (answer.status_code == 401) is not open_to_all, (method, path)
            assert open_to_all or answer.json()["error"]["code"] == "unauthorized"


def test_what_is_too_large_is_refused_as_described(contract: Contract) -> None:
    large = {"x": "x" * 9 * 2**20}
    for method, path, operation in contract.operations():
        if "requestBody" in operation:
            answer = contract.ask(method, path, body=large, at=somewhere(operation))
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body-too-large"), (method, path)


def test_an_address_names_all_its_methods_and_refuses_others_in_the_one_form(contract: Contract) -> None:
    base = contract.schema.get_base_url()
    taken: dict[str, set[str]] = {}
    for method, path, _ in contract.operations():
        taken.setdefault(path, set()).add(method)
    assert any(len(methods) > 1 for methods in taken.values()) is ("/v3/sessions" in taken)
    with httpx2.Client(base_url=base, headers=contract.headers) as http:
        for path, methods in taken.items():
            for method in METHODS - methods if path != SOCKET else ():
                answer = http.request(method, path)
                assert answer.status_code == 405, (method, path)
                allowed = {name.strip() for name in answer.headers["allow"].split(",")}
                # Load balancers may ask for the health by HEAD, which is in no document.
                assert allowed - {"HEAD"} == methods, path
                assert answer.json()["error"]["code"] == "invalid-request"


def test_addresses_of_nothing_are_refused_in_the_one_form(contract: Contract) -> None:
    with httpx2.Client(base_url=contract.schema.get_base_url(), headers=contract.headers) as http:
        for path in ("/nothing", "/v1/nothing", "/v3/nothing", "/v3/sessions/a%2Fb", "/v1/chat/stream"):
            answer = http.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "invalid-request"), path
            assert answer.json()["error"]["request_id"] == answer.headers["x-request-id"]
