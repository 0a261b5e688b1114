"""Access to the daemon over HTTP and WebSocket."""

import httpx2
import pytest
from websockets.exceptions import InvalidStatus

from tests.support.daemons import WAIT_S, frames_until, serving

pytestmark = pytest.mark.anyio
ALLOWED = "http://localhost:3000"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    with serving(home, cors_origins=(ALLOWED,), allowed_hosts=("friend.example",)) as daemon:
        yield daemon


def get(daemon, path="/v3/daemon", **headers):
    return httpx2.get(daemon.url + path, headers=headers, timeout=WAIT_S, trust_env=False)


async def handshake(daemon, query="", **headers):
    """Return the status of a WebSocket handshake, without a token unless the headers contain one."""
    import websockets

    host = headers.pop("host", None)
    where = {"host": "127.0.0.1", "port": daemon.port} if host else {}
    address = f"ws://{host or f'127.0.0.1:{daemon.port}'}/v3/events{query}"
    try:
        connecting = websockets.connect(address, additional_headers=headers, proxy=None, open_timeout=WAIT_S, **where)
        async with connecting as open_one:
            await frames_until(open_one, "stream.hello")
            return 101
    except InvalidStatus as refused:
        return refused.response.status_code


def test_only_health_needs_no_token_and_it_reveals_nothing_else(daemon):
    assert get(daemon, "/v3/health").json() == {
        "status": "ok",
        "name": "lmx-lab-daemon",
        "api_version": 3,
        "daemon_id": daemon.daemon_id,
    }
    for path in ("/v3/daemon", "/v3/sessions", "/v3/openapi.json", "/docs", "/v3/nothing", "/v3/health/", "/"):
        assert get(daemon, path).status_code == 401, path
    # A token in the query is for WebSockets only.
    error = get(daemon, f"/v3/daemon?token={daemon.token}").json()["error"]
    assert (error["code"], "state.json" in error["message"]) == ("unauthorized", True)


# All combinations of hosts, origins and tokens are in ``tests/security/test_access.py``. The places where the token
# must not appear are in ``tests/security/test_secrets.py``.


async def test_an_allowed_host_may_have_any_port(daemon):
    right = f"Bearer {daemon.token}"
    assert get(daemon, host="friend.example:1234", authorization=right).status_code == 200
    assert await handshake(daemon, host="friend.example:1234", Authorization=right) == 101
    assert get(daemon, "/v3/health", host="evil.example").status_code == 421


async def test_an_allowed_origin_may_use_all_methods(daemon):
    for method in ("GET", "POST", "PATCH", "DELETE"):
        asked = {"origin": ALLOWED, "access-control-request-method": method}
        asked["access-control-request-headers"] = "authorization, content-type"
        answer = httpx2.options(f"{daemon.url}/v3/sessions", headers=asked, timeout=WAIT_S, trust_env=False)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, ALLOWED)
        assert method in answer.headers["access-control-allow-methods"]
    right = f"Bearer {daemon.token}"
    assert get(daemon, origin=ALLOWED, authorization=right).headers["access-control-allow-origin"] == ALLOWED
    assert await handshake(daemon, f"?token={daemon.token}", Origin=ALLOWED) == 101
