"""Tests of the addresses of a server: local, LAN, proxies and origins, and of their QR codes."""

import sys

import pytest
import segno
from hypothesis import given
from hypothesis import strategies as st

from lmx_lab.urls import (
    browser_step,
    host_of,
    is_vscode,
    jupyter_server_url,
    lan_urls,
    local_url,
    notebook_origins,
    origin_of,
    proxied_url,
    proxy_path,
    proxy_url,
    qr_data_uri,
    qr_half_blocks,
)

CODED = "http://192.168.1.20:8400"
HUB = {"JUPYTERHUB_SERVICE_PREFIX": "/user/ada/"}
SUBDOMAIN = {
    **HUB,
    "JUPYTERHUB_HOST": "https://hub.example",
    "JUPYTERHUB_PUBLIC_URL": "https://ada.hub.example/user/ada/",
}
BEFORE_5 = {
    **HUB,
    "JUPYTERHUB_HOST": "https://hub.example",
    "JUPYTERHUB_OAUTH_CALLBACK_URL": "https://ada.hub.example/user/ada/oauth_callback",
}
CODESPACE = {"CODESPACE_NAME": "big-fish", "GITHUB_CODESPACES_PORT_FORWARDING_DOMAIN": "app.github.dev"}


@pytest.mark.parametrize(
    ("host", "url"),
    [
        *((host, "http://127.0.0.1:8400") for host in ("127.0.0.1", "0.0.0.0", "")),
        *((host, "http://[::1]:8400") for host in ("::", "::1", "[::1]")),
        ("mybox", "http://mybox:8400"),
    ],
)
def test_the_local_address_can_be_opened_on_this_machine(host, url):
    assert local_url(host, 8400) == url


def test_lan_addresses_keep_their_order_and_have_no_zone():
    assert lan_urls(["192.168.1.5", "fe80::1%eth0"], 8400) == ["http://192.168.1.5:8400", "http://[fe80::1]:8400"]


@pytest.mark.parametrize(
    ("environ", "url"),
    [
        ({}, None),
        ({"COLAB_RELEASE_TAG": "x"}, None),
        # The environment does not show whether jupyter-server-proxy is installed.
        ({"JUPYTER_SERVER_URL": "http://localhost:8888/"}, None),
        (HUB, "/user/ada/proxy/8400/"),
        ({"JUPYTERHUB_SERVICE_PREFIX": "/user/ada"}, "/user/ada/proxy/8400/"),
        ({"JUPYTERHUB_SERVICE_PREFIX": "user/ada"}, "/user/ada/proxy/8400/"),
        ({"JUPYTERHUB_SERVICE_PREFIX": "//user/ada"}, "/user/ada/proxy/8400/"),
        ({"JUPYTERHUB_SERVICE_PREFIX": "/user/a%40b/"}, "/user/a%40b/proxy/8400/"),
        ({"JUPYTERHUB_SERVICE_PREFIX": "/"}, "/proxy/8400/"),
        ({"JUPYTERHUB_SERVICE_PREFIX": "", "JUPYTER_SERVER_URL": "http://localhost:8888/"}, None),
        # JupyterHub sets unknown values empty.
        ({**HUB, "JUPYTERHUB_PUBLIC_URL": "", "JUPYTERHUB_HOST": ""}, "/user/ada/proxy/8400/"),
        ({**HUB, "JUPYTERHUB_OAUTH_CALLBACK_URL": "/user/ada/oauth_callback"}, "/user/ada/proxy/8400/"),
        # With subdomains, the user's server has another host than the Hub.
        ({**HUB, "JUPYTERHUB_HOST": "https://hub.example"}, "/user/ada/proxy/8400/"),
        (SUBDOMAIN, "https://ada.hub.example/user/ada/proxy/8400/"),
        (BEFORE_5, "https://ada.hub.example/user/ada/proxy/8400/"),
        ({"VSCODE_PROXY_URI": "https://{{port}}.code.example"}, "https://8400.code.example/"),
        ({"VSCODE_PROXY_URI": "https://code.example/proxy/{{port}}/"}, "https://code.example/proxy/8400/"),
        ({"VSCODE_PROXY_URI": "./proxy/{{port}}/"}, None),
        ({"VSCODE_PROXY_URI": " "}, None),
        (CODESPACE, "https://big-fish-8400.app.github.dev/"),
        ({**CODESPACE, "CODESPACE_NAME": ""}, None),
        ({**HUB, "LMX_LAB_PROXY_URL": "https://p.example/{port}"}, "https://p.example/8400/"),
        ({**HUB, "LMX_LAB_PROXY_URL": ""}, "/user/ada/proxy/8400/"),
        ({"LMX_LAB_PROXY_URL": "https://lab.example/"}, "https://lab.example/"),
        ({"LMX_LAB_PROXY_URL": " https://lab.example:8443/a%20b "}, "https://lab.example:8443/a%20b/"),
        ({"LMX_LAB_PROXY_URL": "https://{port}.lab.example"}, "https://8400.lab.example/"),
        ({"LMX_LAB_PROXY_URL": "http://[::1]:{port}"}, "http://[::1]:8400/"),
        ({"LMX_LAB_PROXY_URL": "/lab/{port}"}, "/lab/8400/"),
    ],
)
def test_the_proxy_address_comes_from_the_environment(environ, url):
    assert proxy_url(8400, environ) == url


@pytest.mark.parametrize(
    "template",
    [
        *["lab.example", "lab.example/{port}/", "ftp://lab.example/", "javascript:alert(1)//", "https://"],
        "//evil.example",
        *["https://lab.example:99999/", "https://lab.example:x/", "http://[::1/", "https://me:secret@lab.example/"],
        *["https://lab.example/?port={port}", "https://lab.example/#{port}", "https://lab.example/{Port}/", "./lab/"],
        *["https://lab .example/", "https://lab.example/a b/", "https://lab.example/\x00", "https://läb.example/"],
    ],
)
def test_the_error_about_an_invalid_override_shows_the_valid_forms(template):
    with pytest.raises(ValueError, match=r"LMX_LAB_PROXY_URL is .*; write https://name/path/ or /path/"):
        proxy_url(8400, {"LMX_LAB_PROXY_URL": template})


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from([*SUBDOMAIN, *BEFORE_5, *CODESPACE, "VSCODE_PROXY_URI"]), st.text(max_size=30)))
def test_arbitrary_variables_give_a_valid_address_or_none(environ):
    url = proxy_url(8400, environ)
    assert url is None or url.endswith("/")
    assert all(origin == origin_of(origin) for origin in notebook_origins(environ))


def test_the_most_specific_variable_names_the_jupyter_server():
    environ = {"JUPYTER_SERVER_URL": "http://localhost:8888/tree"}
    assert jupyter_server_url({}) is None
    assert jupyter_server_url(environ) == "http://localhost:8888/tree/"
    assert jupyter_server_url(environ, recorded_url="http://localhost:9999/b") == "http://localhost:9999/b/"
    assert jupyter_server_url({**environ, **HUB}, recorded_url="http://localhost:9999/b") == "/user/ada/"
    assert jupyter_server_url({"JUPYTER_SERVER_URL": ""}) is None


@pytest.mark.parametrize("server", ["http://localhost:8888", "http://localhost:8888/"])
def test_the_address_of_a_proxied_port_is_below_that_of_the_jupyter_server(server):
    assert proxied_url(server, 8400) == "http://localhost:8888/proxy/8400/"


@pytest.mark.parametrize(
    ("environ", "recorded_url", "path"),
    [
        ({}, None, None),
        (HUB, "http://127.0.0.1:8888/user/ada/", "/user/ada/proxy/8400/"),
        (SUBDOMAIN, None, "/user/ada/proxy/8400/"),
        ({}, "http://localhost:8888/", "/proxy/8400/"),
        ({}, "http://localhost:8888/a%20b", "/a%20b/proxy/8400/"),
        ({"JUPYTER_SERVER_URL": "http://[::1/"}, None, None),
        ({"JUPYTER_SERVER_URL": "nonsense"}, None, None),
    ],
)
def test_the_proxy_path_is_the_path_of_the_jupyter_server(environ, recorded_url, path):
    assert proxy_path(8400, environ, recorded_url=recorded_url) == path


@pytest.mark.parametrize(
    ("environ", "recorded_url", "origins"),
    [
        ({}, None, []),
        (HUB, None, []),
        (HUB, "http://127.0.0.1:8888/user/ada/", []),
        (SUBDOMAIN, None, ["https://ada.hub.example"]),
        (BEFORE_5, None, ["https://ada.hub.example"]),
        (
            {"JUPYTER_SERVER_URL": "http://localhost:8888/b/"},
            None,
            ["http://localhost:8888", "http://127.0.0.1:8888", "http://[::1]:8888"],
        ),
        # Kernels of a server that was started in another server's terminal inherit the other server's address.
        ({"JUPYTER_SERVER_URL": "http://other:8888/"}, "http://gpubox:9000/", ["http://gpubox:9000"]),
        ({}, "https://MyBox:443/", ["https://mybox"]),
        ({}, "http://[fe80::1%25eth0]:8888/", ["http://[fe80::1]:8888"]),
        ({"JUPYTER_SERVER_URL": "http+unix://%2Ftmp%2Fsock/"}, None, []),
        ({"JUPYTER_SERVER_URL": "http://ha ha/"}, None, []),
        ({"JUPYTER_SERVER_URL": "http://*:8888/"}, None, []),
        ({"JUPYTER_SERVER_URL": "localhost:8888"}, None, []),
        ({"JUPYTER_SERVER_URL": "http://localhost:0/"}, None, []),
    ],
)
def test_the_notebooks_pages_have_the_origin_of_the_jupyter_server(environ, recorded_url, origins):
    assert notebook_origins(environ, recorded_url=recorded_url) == origins


def test_a_jupyter_server_on_all_interfaces_has_an_origin_for_each_address():
    machine = ["MyBox", "192.168.1.5"]
    everywhere = notebook_origins({}, recorded_url="http://mybox:8888/", machine_names=machine)
    assert set(everywhere) >= {"http://mybox:8888", "http://localhost:8888", "http://192.168.1.5:8888"}
    assert notebook_origins({}, recorded_url="http://192.168.1.5:8888/", machine_names=machine) == [
        "http://192.168.1.5:8888"
    ]


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("https://hub.example", "hub.example:80"),
        ("http://localhost:8888", "localhost:8888"),
        ("http://[::1]", "[::1]:80"),
        ("http://[::1]:8888", "[::1]:8888"),
    ],
)
def test_host_of_returns_the_host_header_of_an_origin(origin, host):
    assert host_of(origin) == host


@pytest.mark.parametrize("name", ["VSCODE_PID", "VSCODE_CWD", "VSCODE_IPC_HOOK"])
def test_variables_that_vs_code_hides_from_its_terminals_identify_its_kernels(name):
    assert is_vscode({name: "1"})
    assert not is_vscode({name: ""})


def test_a_terminal_of_vs_code_is_not_a_kernel():
    assert not is_vscode({"TERM_PROGRAM": "vscode", "VSCODE_IPC_HOOK_CLI": "/x", "VSCODE_GIT_IPC_HANDLE": "/y"})


@pytest.mark.parametrize(
    ("environ", "step"),
    [
        ({}, None),
        ({"COLAB_RELEASE_TAG": "x"}, "serve_kernel_port_as_window(8400)"),
        ({"COLAB_RELEASE_TAG": "x", "LMX_LAB_PROXY_URL": "https://p.example"}, None),
        ({"VSCODE_PID": "1"}, None),
        ({"VSCODE_CWD": "/", "SSH_CONNECTION": "1"}, "port 8400"),
        ({"VSCODE_CWD": "/", "SSH_CONNECTION": "1", **CODESPACE}, None),
    ],
)
def test_the_step_in_the_browser_is_given_if_only_the_browser_knows_the_address(environ, step):
    found = browser_step(8400, environ)
    assert found is None if step is None else step in (found or "")


def test_the_text_of_a_qr_code_has_its_modules():
    lines = qr_half_blocks(CODED).splitlines()
    light = [[block in half for block in line] for line in lines for half in ("█▀", "█▄")]
    expected = [[not dark for dark in row] for row in segno.make_qr(CODED, error="m").matrix_iter(border=2)]
    assert light[: len(expected)] == expected


def test_the_image_of_a_qr_code_is_a_data_uri_without_other_addresses():
    image = qr_data_uri(CODED)
    assert image.startswith("data:image/svg+xml")
    assert "script" not in image


def test_without_segno_there_is_no_qr_code(monkeypatch):
    monkeypatch.setitem(sys.modules, "segno", None)
    qr_data_uri.cache_clear()
    assert (qr_data_uri(CODED), qr_half_blocks(CODED)) == ("", "")
    qr_data_uri.cache_clear()
