"""Callers on other machines learn nothing about the requests of others but sums."""

import json
import random

import httpx2
import pytest

from lmx_lab.notebook.addresses import lan_addresses
from tests.support.asking import CHAT, CHAT_WAIT_S, refused
from tests.support.formats import Request, each_format
from tests.support.labs import events_of, serving

MALLORY, ANNA = ({"x-forwarded-for": f"192.168.1.{number}"} for number in (66, 7))
"""The header with which a proxy on this machine forwards the requests of two other machines."""
SECRET = "The code of the door on the third floor of the old house by the harbour is "


@pytest.fixture(scope="module")
def lab(echo_home):
    with serving(echo_home, "echo", slots=2, record="all") as lab:
        yield lab


def ask(http, text, headers=None, **fields):
    body = {"prompt": text, "max_tokens": 1, "temperature": 0, **fields}
    answer = http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def attack(http, code):
    """Guess a code digit by digit while its owner uses it, and return what the guesses show."""
    found, seen = "", []
    for _ in range(8):
        ask(http, SECRET + code)
        hits = []
        for digit in "0123456789":
            guess = ask(http, f"{SECRET}{found}{digit}", MALLORY)
            hits.append((cached(guess), guess["timings"]["cache_n"]))
        seen += hits
        found += str(max(range(10), key=lambda digit: hits[digit]))
    return found, seen


def test_a_thousand_guesses_show_nothing_of_a_prompt(http):
    codes = ["".join(random.Random(seed).choices("123456789", k=8)) for seed in range(13)]
    # What the first attack of a caller shows depends on its own earlier requests only, so all others show the same.
    attacks = [attack(http, code) for code in codes]
    assert all(seen == attacks[1][1] for _, seen in attacks[1:])
    assert all(found != code for (found, _), code in zip(attacks, codes, strict=True))


@each_format("http")
def test_no_format_counts_the_prompts_of_others(lab, form):
    request = Request(messages=[{"role": "user", "content": f"{SECRET}{form.name}"}], max_tokens=2)
    callers = [None, *({"x-forwarded-for": f"{form.name}.{number}.example"} for number in range(2))]
    bodies = [
        httpx2.post(lab.url + form.path, json=form.body(request, stream=False), headers=headers, timeout=CHAT_WAIT_S)
        for headers in callers
    ]
    # In llama.cpp's format, ``tokens_cached`` is the number of tokens of prompt and answer.
    counts = [
        number
        for body in bodies[1:]
        for name, number in numbers_of(body.json())
        if "cache" in name and name != "tokens_cached"
    ]
    assert not any(counts)


def test_each_caller_keeps_its_own_hits_and_those_of_a_shared_prompt(http):
    text = "You are a helpful librarian who answers in rhymes. "
    for headers in (None, MALLORY, ANNA):
        assert cached(ask(http, text, headers)) == 0
        first = ask(http, f"{text}And then?", headers)
        assert cached(first) >= len(text.split())
    shared = "You are a stern referee who answers with numbers only. "
    ask(http, shared, share_prefix=True)
    counts = [cached(ask(http, f"{shared}{number} apples?", headers)) for number, headers in enumerate((MALLORY, ANNA))]
    assert counts[0] == counts[1] >= len(shared.split())


def test_only_callers_on_this_machine_share_prompts(http):
    body = {"prompt": "a", "max_tokens": 1, "share_prefix": True}
    refused(http.post("/v1/completions", json=body, headers=MALLORY), 403, "admin-forbidden")
    messages = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "share_prefix": True}
    refused(http.post(CHAT, json=messages, headers=MALLORY), 403, "admin-forbidden")
    for number, forged in enumerate(("", "*", "192.168.1.7,", "client 127.0.0.1", "127.0.0.1")):
        text = f"{number} forged addresses have found nothing. "
        ask(http, text)
        assert cached(ask(http, f"{text}What now?", {"x-forwarded-for": forged})) == 0


def test_no_answer_for_another_machine_tells_of_single_requests_of_others(lab, http):
    with (
        events_of(lab, "models", "requests", "samples", "pressure", headers=MALLORY) as seen,
        events_of(lab, "requests") as owners,
    ):
        secret = http.post(
            CHAT,
            json={"messages": [{"role": "user", "content": "xyzzy-secret " * 137}], "max_tokens": 3},
            headers={"x-request-id": "victims-request-4711"},
        )
        id_ = secret.headers["x-request-id"]
        assert next(event for event in owners if event["type"] == "request")["request_id"] == id_
        own = ask(http, "mine", MALLORY)
        events = [next(seen)]
        while events[-1]["type"] != "request":
            events.append(next(seen))
    assert events[-1]["completion_tokens"] == own["usage"]["completion_tokens"] == 1
    pages = [json.dumps(events)]
    for path, methods in http.get("/openapi.json").json()["paths"].items():
        required = [each for each in methods.get("get", {}).get("parameters", ()) if each.get("required")]
        if "get" in methods and not required and path != "/admin/events":
            answer = http.get(path, headers=MALLORY)
            assert answer.status_code < 500, path
            pages.append(answer.text)
    assert len(pages) > 10
    for page in pages:
        assert "xyzzy" not in page
        assert id_ not in page


def test_a_timeline_has_the_requests_of_its_caller_and_the_owner_sees_all(http):
    counts = {}
    for name, headers in (("owner", None), ("anna", ANNA), ("mallory", MALLORY)):
        for _ in range(2):
            ask(http, f"{name} asks", headers)
    for name, headers in (("owner", None), ("anna", ANNA), ("mallory", MALLORY)):
        ids, before = [], None
        while not ids or before is not None:
            page = http.get(
                "/admin/timeline", params={"limit": 3} | ({"before": before} if before else {}), headers=headers
            )
            ids += [each["request_id"] for each in page.json()["requests"]]
            before = page.json()["before"]
        counts[name] = set(ids)
    assert not counts["anna"] & counts["mallory"]
    assert counts["anna"] | counts["mallory"] < counts["owner"]
    assert len(counts["anna"]) >= 2


def test_another_address_of_this_machine_is_another_caller(echo_home):
    addresses = [address for address in lan_addresses() if ":" not in address]
    if not addresses:
        pytest.skip("this machine has no address but those on loopback")
    with serving(echo_home, "echo", host="0.0.0.0") as lab:
        port = lab.server.port
        urls = [f"http://{address}:{port}" for address in ("127.0.0.1", addresses[0])]
        with httpx2.Client(base_url=urls[0]) as owner, httpx2.Client(base_url=urls[1]) as other:
            for number, client in enumerate((owner, other)):
                assert cached(ask(client, SECRET)) == 0
                assert cached(ask(client, f"{SECRET}{number}")) > 0
            assert len(other.get("/admin/timeline").json()["requests"]) == 2
            assert len(owner.get("/admin/timeline").json()["requests"]) == 4


def numbers_of(value, name=""):
    """Yield the numbers in a JSON value with their names."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from numbers_of(each, key)
    elif isinstance(value, list):
        for each in value:
            yield from numbers_of(each, name)
    elif isinstance(value, int | float):
        yield name, value
