import pytest

from lmx_lab.links import jupyter_server_url, lan_urls, local_url, proxy_url


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8400"),
        ("0.0.0.0", "http://127.0.0.1:8400"),
        ("", "http://127.0.0.1:8400"),
        ("::", "http://[::1]:8400"),
        ("::1", "http://[::1]:8400"),
        ("[::1]", "http://[::1]:8400"),
        ("mybox", "http://mybox:8400"),
    ],
)
def test_the_local_address_can_be_opened_as_it_stands(host, url):
    assert local_url(host, 8400) == url


def test_lan_addresses_keep_their_order_and_lose_the_zone():
    assert lan_urls(["192.168.1.5", "fe80::1%eth0"], 8400) == ["http://192.168.1.5:8400", "http://[fe80::1]:8400"]


@pytest.mark.parametrize(
    ("environ", "url"),
    [
        ({}, None),
        ({"COLAB_RELEASE_TAG": "x"}, None),
        ({"JUPYTER_SERVER_URL": "http://localhost:8888/"}, None),
        ({"JUPYTERHUB_SERVICE_PREFIX": "/user/ada/"}, "/user/ada/proxy/8400/"),
        ({"JUPYTERHUB_SERVICE_PREFIX": "/user/ada"}, "/user/ada/proxy/8400/"),
        (
            {"JUPYTERHUB_SERVICE_PREFIX": "/user/ada/", "JUPYTERHUB_HOST": "https://hub.example"},
            "https://hub.example/user/ada/proxy/8400/",
        ),
        (
            {"JUPYTERHUB_SERVICE_PREFIX": "/user/ada/", "JUPYTERHUB_PUBLIC_URL": "https://ada.hub.example/user/ada/"},
            "https://ada.hub.example/user/ada/proxy/8400/",
        ),
        ({"VSCODE_PROXY_URI": "https://{{port}}.code.example"}, "https://8400.code.example/"),
        ({"VSCODE_PROXY_URI": "./proxy/{{port}}/"}, "./proxy/8400/"),
        (
            {"CODESPACE_NAME": "big-fish", "GITHUB_CODESPACES_PORT_FORWARDING_DOMAIN": "app.github.dev"},
            "https://big-fish-8400.app.github.dev/",
        ),
        (
            {"JUPYTERHUB_SERVICE_PREFIX": "/user/ada/", "LMX_LAB_PROXY_URL": "https://p.example/{port}"},
            "https://p.example/8400/",
        ),
        ({"LMX_LAB_PROXY_URL": "https://lab.example/"}, "https://lab.example/"),
    ],
)
def test_the_proxy_address_follows_the_environment(environ, url):
    assert proxy_url(8400, environ) == url


def test_the_jupyter_server_is_where_the_most_specific_variable_says():
    environ = {"JUPYTER_SERVER_URL": "http://localhost:8888/tree"}
    assert jupyter_server_url(environ) == "http://localhost:8888/tree/"
    assert jupyter_server_url({**environ, "JUPYTERHUB_SERVICE_PREFIX": "/user/ada/"}) == "/user/ada/"
    assert jupyter_server_url({}) is None
