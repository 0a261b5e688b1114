"""The client of the model server: the choice of the model, and the state of the server."""

import pytest

from lmx_lab import errors
from lmx_lab.daemon.turns.model_client import ModelClient
from tests.support.model_server import Scripted, json_answer, refuses, says

pytestmark = pytest.mark.anyio
BODY = {"messages": [{"role": "user", "content": "hello"}]}


async def text(upstream, model=None):
    return "".join([piece.text async for piece in upstream.call(BODY, model=model)])


@pytest.mark.parametrize(
    ("lab", "models", "asked", "sent"),
    [
        (False, ("a", "b"), None, "a"),
        (False, ("a", "b"), "b", "b"),
        (True, ("a", "b"), None, "default"),
        (True, ("a", "b"), "b", "b"),
        (False, json_answer({"detail": "no such route"}, status=404), None, "default"),
    ],
)
async def test_the_model_is_chosen_by_the_kind_of_server(lab, models, asked, sent):
    with Scripted(says("hi"), lab=lab, models=models) as server:
        upstream = ModelClient(server.url)
        assert await text(upstream, asked) == "hi"
        await upstream.aclose()
        assert [body["model"] for body in server.bodies] == [sent]


async def test_the_list_of_models_is_cached():
    with Scripted(says("hi")) as server:
        upstream = ModelClient(server.url)
        for _ in range(3):
            await text(upstream)
        await upstream.aclose()
        assert server.paths.count("/v1/models") == 1


async def test_a_model_that_no_longer_exists_is_chosen_again():
    with Scripted(refuses(404, "model-not-found"), says("hi"), models=["a"]) as server:
        upstream = ModelClient(server.url)
        with pytest.raises(errors.ModelNotFoundError):
            await text(upstream)
        server.models = ["b"]
        assert await text(upstream) == "hi"
        await upstream.aclose()
        assert [body["model"] for body in server.bodies] == ["a", "b"]


async def test_a_server_without_models_is_an_error():
    with Scripted(says("hi"), models=()) as server:
        upstream = ModelClient(server.url)
        with pytest.raises(errors.NotLoadedError, match="lists no models"):
            await text(upstream)
        state = upstream.state()
        await upstream.aclose()
        assert (state.reachable, state.model) == (True, None)


async def test_the_state_follows_the_results_of_the_calls():
    with Scripted(
        says("hi"), refuses(503, "no-model-loaded", "none"), refuses(400, "invalid-request"), says("hi")
    ) as server:
        upstream = ModelClient(server.url)
        assert upstream.state().reachable is None
        await text(upstream)
        known = [upstream.state()]
        for error in (errors.NotLoadedError, errors.InvalidRequestError):
            with pytest.raises(error):
                await text(upstream)
            known.append(upstream.state())
        await text(upstream)
        known.append(upstream.state())
    with pytest.raises(errors.UpstreamUnreachableError):
        await text(upstream)
    known.append(upstream.state())
    await upstream.aclose()
    assert [(state.reachable, state.model) for state in known] == [
        (True, "scripted"),
        (True, None),
        (True, None),
        (True, "scripted"),
        (False, None),
    ]
    assert known[1].error == "none"
    assert "nothing answers" in (known[4].error or "")
