from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmx_lab.errors import HostForbiddenError, InvalidRequestError, OriginForbiddenError, UnauthorizedError
from lmx_lab.http.guard import (
    PASSED_POLICY,
    REFRESH_S,
    Guard,
    GuardPolicy,
    LivePolicy,
    allows_origin,
    check,
    is_local,
    local_policy,
    loopback_hosts,
)

POLICY = local_policy(8400, hosts=["MyBox", "lab.example:8400", "fe80::7"], origins=["http://localhost:3000/"])


def scope(host="localhost:8400", *, kind="http", path="/v1/models", method="GET", scheme="http", **more):
    hosts = [host] if isinstance(host, str) else host
    headers = [(b"host", value.encode("latin-1")) for value in hosts]
    for name, value in more.items():
        values = [value] if isinstance(value, str) else value
        headers += [(name.replace("_", "-").encode(), v.encode("latin-1")) for v in values]
    return {"type": kind, "path": path, "method": method, "scheme": scheme, "headers": headers}


@pytest.mark.parametrize(
    "host", ["localhost:8400", "LocalHost:8400", "127.0.0.1:8400", "[::1]:8400", "mybox", "mybox:1", "[fe80::7]:8400"]
)
def test_an_allowed_host_is_accepted(host):
    check(scope(host), POLICY)


FOREIGN_HOSTS = [
    *["evil.example:8400", "localhost", "localhost:8401", "localhost:", "localhost:08400", "localhost:8400:8400", ""],
    *["me@localhost:8400", "localhost:8400@evil.example", "localhost:8400/", "localhost:8400#", "localhost:8400, x"],
    *["localhost.:8400", "::1:8400", "[::1]", "[::1:8400", "127.0.0.1.evil.example:8400", "2130706433:8400"],
    *["localhost\x00:8400", "loc\u00e4lhost:8400", "localhost:٨٤٠٠".encode().decode("latin-1"), "*", "*:8400"],
    *[[], ["localhost:8400", "localhost:8400"], ["localhost:8400", "evil.example:8400"]],
]


@pytest.mark.parametrize("host", FOREIGN_HOSTS)
def test_any_other_host_is_rejected(host):
    with pytest.raises(HostForbiddenError):
        check(scope(host), POLICY)


def test_the_error_names_the_value_the_allowed_hosts_and_the_setting():
    with pytest.raises(HostForbiddenError) as caught:
        check(scope("evil.example:8400"), POLICY)
    for part in ("evil.example:8400", "localhost:8400", "mybox", "--allow-host", "allowed_hosts"):
        assert part in caught.value.message


@pytest.mark.parametrize(("scheme", "port"), [("http", 80), ("ws", 80), ("https", 443), ("wss", 443)])
def test_a_host_without_port_means_the_port_of_the_scheme(scheme, port):
    policy = GuardPolicy(hosts=frozenset({f"lab.example:{port}"}))
    check(scope("lab.example", scheme=scheme), policy)
    with pytest.raises(HostForbiddenError):
        check(scope("lab.example", scheme=scheme), GuardPolicy(hosts=frozenset({f"lab.example:{523 - port}"})))


def test_a_loopback_name_without_a_port_is_allowed_only_on_port_80():
    assert "localhost" in loopback_hosts(80)
    assert "localhost" not in loopback_hosts(8400)


@given(st.text(alphabet=st.characters(max_codepoint=255), max_size=40))
def test_no_other_text_is_accepted_as_host(text):
    allowed = POLICY.hosts | {"mybox"}
    lowered = text.encode("latin-1").decode("latin-1").lower()
    if lowered not in allowed and not lowered.startswith(("mybox:", "[fe80::7]")):
        with pytest.raises(HostForbiddenError):
            check(scope(text), POLICY)


@given(
    st.sampled_from(["http", "https", "ws", "file", "HTTP"]),
    st.sampled_from(
        ["localhost", "127.0.0.1", "[::1]", "mybox", "evil.example", "localhost.evil.example", "x@localhost"]
    ),
    st.sampled_from(["", ":8400", ":3000", ":80", ":443", ":8400/", ":8400.evil.example"]),
)
def test_no_other_origin_is_accepted(scheme, name, port):
    origin = f"{scheme}://{name}{port}"
    own = scheme.lower() in ("http", "https") and name in ("localhost", "127.0.0.1", "[::1]") and port == ":8400"
    if own or origin.lower() == "http://localhost:3000":
        check(scope(origin=origin), POLICY)
    else:
        with pytest.raises(OriginForbiddenError):
            check(scope(origin=origin), POLICY)


LISTED = GuardPolicy(hosts=loopback_hosts(8400), origins=frozenset({"null", "http://localhost:3000"}))


@pytest.mark.parametrize(
    ("origin", "policy"),
    [
        *((origin, POLICY) for origin in ("null", "", "*", "http://")),
        ("null", LISTED),
        (["http://localhost:3000", "http://localhost:3000"], LISTED),
    ],
)
def test_an_invalid_origin_is_rejected(origin, policy):
    with pytest.raises(OriginForbiddenError):
        check(scope(origin=origin), policy)


def test_the_origin_of_an_any_port_name_must_have_the_same_port():
    check(scope("mybox:8400", origin="http://mybox:8400"), POLICY)
    check(scope("mybox", origin="https://mybox"), POLICY)
    with pytest.raises(OriginForbiddenError, match="--cors-origin"):
        check(scope("mybox:8400", origin="http://mybox:9999"), POLICY)


KEYED = local_policy(8400, origins=["http://localhost:3000"], key="s3cret")


@pytest.mark.parametrize("header", ["Bearer s3cret", "bearer s3cret", "Bearer  s3cret"])
def test_the_key_is_accepted(header):
    check(scope(authorization=header), KEYED)


@pytest.mark.parametrize("name", ["x_api_key", "api_key"])
def test_the_key_is_accepted_in_the_headers_of_other_services(name):
    check(scope(**{name: "s3cret"}), KEYED)
    for wrong in ({name: "wrong"}, {"api_key": "s3cret", "x_api_key": "s3cret"}):
        with pytest.raises(UnauthorizedError):
            check(scope(**wrong), KEYED)


@pytest.mark.parametrize(
    "header",
    [
        *("", "Bearer", "Bearer ", "Bearer wrong", "s3cret", "Basic s3cret", "Bearer s3cret x", "Bearer \xff"),
        ["Bearer s3cret", "Bearer s3cret"],
    ],
)
def test_everything_but_the_key_is_rejected_with_the_same_error(header):
    with pytest.raises(UnauthorizedError) as caught:
        check(scope(authorization=header), KEYED)
    with pytest.raises(UnauthorizedError) as missing:
        check(scope(), KEYED)
    assert caught.value.message == missing.value.message


IN_QUERY = replace(KEYED, query_key_paths=frozenset({"/events"}), key_hint="look in the drawer")


def asking(query="", kind="websocket", path="/events", **more):
    return {**scope(kind=kind, path=path, scheme="ws", **more), "query_string": query.encode()}


@pytest.mark.parametrize("query", ["token=s3cret", "a=1&token=s3cret&b=", "t%6Fken=s3cre%74"])
def test_a_websocket_can_have_the_key_in_its_query_if_the_policy_allows_it(query):
    check(asking(query), IN_QUERY)
    check(asking(query, authorization="Bearer s3cret"), IN_QUERY)
    for request, policy in (
        (asking(query), KEYED),
        (asking(query, kind="http"), IN_QUERY),
        (asking(query, path="/events/"), IN_QUERY),
        (asking(query, path="/other"), IN_QUERY),
        (asking(query, authorization="Bearer wrong"), IN_QUERY),
        (asking(query, authorization="Basic s3cret"), IN_QUERY),
    ):
        with pytest.raises(UnauthorizedError):
            check(request, policy)


@pytest.mark.parametrize(
    "query",
    [
        *("", "token=", "token", "Token=s3cret", "token=s3cret ", "token=s3cret&token=s3cret", "token=wrong"),
        *("token=%FF", "?"),
    ],
)
def test_any_other_query_is_rejected_even_with_the_right_header(query):
    with pytest.raises(UnauthorizedError, match="look in the drawer"):
        check(asking(query), IN_QUERY)
    if "oken" in query and "Token" not in query:
        with pytest.raises(UnauthorizedError):
            check(asking(query, authorization="Bearer s3cret"), IN_QUERY)


@given(st.text(max_size=20))
def test_no_other_text_is_accepted_as_key(text):
    if text.strip() != "s3cret":
        request = scope()
        request["headers"].append((b"authorization", b"Bearer " + text.encode("utf-8", "surrogatepass")))
        with pytest.raises(UnauthorizedError):
            check(request, KEYED)


def test_probes_and_preflights_need_no_key_but_an_allowed_host():
    check(scope(path="/healthz"), KEYED)
    check(scope(path="/readyz"), KEYED)
    origin = "http://localhost:3000"
    check(scope(method="OPTIONS", origin=origin, access_control_request_method="POST"), KEYED)
    with pytest.raises(UnauthorizedError):
        check(scope(method="OPTIONS", origin=origin), KEYED)
    with pytest.raises(UnauthorizedError):
        check(scope(path="/healthz/"), KEYED)
    with pytest.raises(HostForbiddenError):
        check(scope("evil.example:8400", path="/healthz"), KEYED)


def test_the_key_is_in_no_repr():
    assert "s3cret" not in repr(KEYED)


@pytest.mark.parametrize(
    ("setting", "values", "named"),
    [
        ("hosts", ["*", "*:8400", "http://mybox", "a b", "", "mybox:", "mybox:port"], "allowed_hosts"),
        ("origins", ["*", "http://*", "localhost:3000", "http://a/b", "null", ""], "cors_origins"),
        ("key", ["", " ", "a b", "schlüssel", "a\n"], "api_key"),
    ],
)
def test_a_configured_value_that_no_request_can_match_is_an_error_without_the_key(setting, values, named):
    for value in values:
        with pytest.raises(InvalidRequestError, match=named) as caught:
            local_policy(8400, **{setting: value if setting == "key" else [value]})
        assert "schl" not in caught.value.message


def test_configured_origins_match_what_browsers_send():
    policy = local_policy(8400, origins=["HTTPS://App.Example:443/", "chrome-extension://abc"])
    assert policy.origins == {"https://app.example", "chrome-extension://abc"}


HERE = ("127.0.0.1", 8400)


def behind(*peers):
    return local_policy(8400, hosts=["mybox"], is_trusted_proxy=lambda peer, here: peer in peers and here == HERE)


def from_peer(port, host="hub.example", **more):
    return {**scope(host, **more), "client": ("127.0.0.1", port), "server": HERE}


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_a_trusted_proxy_can_send_any_host_and_its_own_origin(kind):
    policy = behind(("127.0.0.1", 5000))
    check(from_peer(5000, kind=kind), policy)
    check(from_peer(5000, kind=kind, origin="https://hub.example"), policy)
    check(from_peer(5000, "hub.example:8443", kind=kind, origin="https://hub.example:8443"), policy)
    for host, origin in [("hub.example", "https://evil.example"), ("hub.example", "https://hub.example:1")]:
        with pytest.raises(OriginForbiddenError):
            check(from_peer(5000, host, kind=kind, origin=origin), policy)


def test_the_same_host_from_other_clients_is_rejected():
    policy = behind(("127.0.0.1", 5000))
    elsewhere = {**from_peer(5000), "server": ("127.0.0.1", 8401)}
    for request in (from_peer(5001), elsewhere, scope("hub.example"), {**scope("hub.example"), "client": None}):
        with pytest.raises(HostForbiddenError):
            check(request, policy)


@pytest.mark.parametrize("host", ["", "hub.example/", "a@b", ["hub.example", "hub.example"], []])
def test_a_trusted_proxy_must_send_exactly_one_host(host):
    with pytest.raises(HostForbiddenError):
        check(from_peer(5000, host), behind(("127.0.0.1", 5000)))


def test_the_proxy_is_checked_only_if_no_other_rule_allows_the_request():
    asked = []
    policy = local_policy(8400, hosts=["mybox"], is_trusted_proxy=lambda *ends: asked.append(ends))
    check(from_peer(5000, "localhost:8400"), policy)
    check(from_peer(5000, "mybox:1"), policy)
    assert asked == []


EVERYWHERE = local_policy(8400, hosts=["mybox:8400", "192.168.1.5:8400", "127.0.0.1"])


def local(client, policy=EVERYWHERE, host="localhost:8400", **more):
    """Return whether an allowed request has the rights of a local caller."""
    request = {**scope(host, **more), "client": (client, 5000), "server": HERE}
    check(request, policy)
    return is_local({**request, PASSED_POLICY: policy})


@pytest.mark.parametrize("client", ["127.0.0.1", "127.3.2.1", "::1", "::ffff:127.0.0.1"])
@pytest.mark.parametrize("host", ["localhost:8400", "LOCALHOST:8400", "127.0.0.1:8400", "[::1]:8400"])
def test_a_caller_on_loopback_with_a_loopback_host_is_local(client, host):
    assert local(client, host=host)


@pytest.mark.parametrize("host", ["mybox:8400", "192.168.1.5:8400", "127.0.0.1", "127.0.0.1:8888"])
def test_a_caller_on_loopback_with_another_host_or_port_is_not_local(host):
    assert not local("127.0.0.1", host=host)
    # No key is configured.
    assert not local("127.0.0.1", host=host, authorization="Bearer ")


@pytest.mark.parametrize("client", ["192.168.1.5", "10.0.0.1", "::ffff:192.168.1.5", "fe80::1%eth0", "not an address"])
def test_a_caller_on_another_machine_is_never_local(client):
    assert not local(client)
    assert not local(client, replace(EVERYWHERE, key="s3cret"), authorization="Bearer s3cret")
    assert not local(client, replace(EVERYWHERE, is_trusted_proxy=lambda peer, here: True))


@pytest.mark.parametrize("name", ["x_forwarded_for", "x_forwarded_host", "forwarded", "x_real_ip", "via"])
def test_a_request_that_a_proxy_forwarded_is_not_local(name):
    assert not local("127.0.0.1", **{name: "127.0.0.1"})
    assert not local("127.0.0.1", **{name: ""})


def test_a_caller_on_loopback_with_the_key_is_local_for_any_allowed_host():
    keyed = replace(EVERYWHERE, key="s3cret")
    right = {"authorization": "Bearer s3cret"}
    assert local("127.0.0.1", keyed, host="mybox:8400", **right)
    assert local("::ffff:127.0.0.1", keyed, host="mybox:8400", x_forwarded_for="10.0.0.1", **right)
    # Probes are accepted without a key.
    assert not local("127.0.0.1", keyed, host="mybox:8400", path="/readyz")
    assert not local("127.0.0.1", keyed, host="mybox:8400", path="/readyz", authorization="Bearer wrong")


def test_callers_through_the_jupyter_server_of_the_notebook_are_local():
    """Also on a dual-stack socket, which reports IPv4 addresses in another form. The proxy is checked once."""
    asked = []

    def is_trusted_proxy(peer, here):
        asked.append((peer, here))
        return (peer, here) == (("127.0.0.1", 5000), HERE)

    policy = local_policy(8400, is_trusted_proxy=is_trusted_proxy)
    ends = {"client": ("::ffff:127.0.0.1", 5000), "server": ("::ffff:127.0.0.1", 8400), PASSED_POLICY: policy}
    request = {**scope("hub.example", x_forwarded_for="10.0.0.1"), **ends}
    check(request, policy)
    assert is_local(request)
    assert len(asked) == 1


def test_without_a_guard_no_caller_is_local():
    assert not is_local({**scope(), "client": ("127.0.0.1", 5000), "server": HERE})


def test_a_live_policy_is_created_again_only_after_a_change(monkeypatch):
    now, names, made = 0.0, ["192.0.2.1"], []

    def make():
        made.append(list(names))
        return local_policy(8400, hosts=[f"{name}:8400" for name in names])

    monkeypatch.setattr("lmx_lab.http.guard.time.monotonic", lambda: now)
    policy = LivePolicy(make, lambda: list(names))
    names.append("192.0.2.2")
    assert "192.0.2.2:8400" not in policy().hosts, "it was read a moment ago"
    now = REFRESH_S
    assert {"192.0.2.1:8400", "192.0.2.2:8400"} <= policy().hosts
    names.remove("192.0.2.1")
    now = 2 * REFRESH_S
    assert "192.0.2.1:8400" not in policy().hosts
    now = 10 * REFRESH_S
    assert policy() is policy()
    assert len(made) == 3
    policy.replace(lambda: local_policy(8500), lambda: None)
    assert "127.0.0.1:8500" in policy().hosts, "another port is used at once"


def test_webviews_are_accepted_only_if_the_policy_allows_them():
    expecting = local_policy(8400, webviews=True)
    page = "vscode-webview://0k3l9c2m"
    check(scope(origin=page), expecting)
    assert allows_origin(page, expecting)
    assert not allows_origin(page, POLICY)
    for origin in ("vscode-webview://", "vscode-webview:", f"https://x/{page}", f"{page} x", "null", "vscode://a"):
        assert not allows_origin(origin, expecting)
        with pytest.raises(OriginForbiddenError):
            check(scope(origin=origin), expecting)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("extensions", "expected"),
    [
        (None, [{"type": "websocket.close", "code": 1008}]),
        (
            {"websocket.http.response": {}},
            [
                {"type": "websocket.http.response.start", "status": 421, "headers": []},
                {"type": "websocket.http.response.body", "body": b""},
            ],
        ),
    ],
)
async def test_a_refused_handshake_is_answered_if_the_server_has_the_extension_and_closed_otherwise(
    extensions, expected
):
    received, sent = [], []

    async def receive():
        received.append("websocket.connect")
        return {"type": "websocket.connect"}

    async def send(message):
        sent.append(message)

    async def refuse(scope, receive, send):
        await send({"type": "http.response.start", "status": 421, "headers": []})
        await send({"type": "http.response.body"})

    guard = Guard(None, policy=POLICY, respond=lambda scope, error: refuse)
    await guard({**scope("evil.example", kind="websocket"), "extensions": extensions}, receive, send)
    assert (received, sent) == (["websocket.connect"], expected)
