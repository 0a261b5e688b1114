"""Access to the daemon over HTTP and WebSocket, and where its token must not appear."""

import logging

import httpx2
import pytest
from websockets.exceptions import InvalidStatus

from lmx_lab.http.uvicorn_server import recent_logs
from tests.support.daemons import WAIT_S, client, frames_until, serving

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


# All combinations of hosts, origins and tokens are in ``tests/security/test_access.py``.


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


@pytest.mark.slow
async def test_the_token_is_in_no_log_repr_or_answer(daemon, caplog):
    token = daemon.token
    seen = []

    class Everything(logging.Handler):
        def emit(self, record):
            seen.append(self.format(record) + repr(record.args) + str(record.msg))

    handler, logger = Everything(), logging.getLogger("uvicorn.error")
    level = logger.level
    logger.addHandler(handler)
    # At the level DEBUG, the library of the protocol logs each header.
    logger.setLevel(logging.DEBUG)
    try:
        assert await handshake(daemon, f"?token={token}") == 101
        assert await handshake(daemon, f"?a=%22&%74oken={token}") == 400
        assert await handshake(daemon, f"?token={token}x") == 401
        assert await handshake(daemon, f"?token={token}", Origin="http://evil.example") == 403
        assert await handshake(daemon, Authorization=f"Bearer {token}") == 101
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
    assert any('"WebSocket /v3/events?' in line for line in seen), "the handshake was logged"
    told = [*seen, *recent_logs(), *caplog.messages, repr(daemon), repr(vars(daemon)), repr(daemon.settings)]
    told += [path.read_text(errors="replace") for path in daemon.folder.glob("daemon.log*")]
    with client(daemon) as http:
        told += [http.get(path).text for path in ("/v3/daemon", "/v3/openapi.json", "/v3/events?after=0")]
    assert not [text[:200] for text in told if token in text]


def test_only_the_user_can_read_the_daemons_files(daemon):
    assert daemon.folder.stat().st_mode & 0o777 == 0o700
    for name in ("state.json", "daemon.lock", "daemon.db", "daemon.log"):
        assert (daemon.folder / name).stat().st_mode & 0o077 == 0, name
