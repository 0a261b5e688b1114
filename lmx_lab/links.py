"""The addresses under which a server on this machine is reached: pure functions over an environment mapping."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

LOOPBACK_FOR = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}


def local_url(host: str, port: int) -> str:
    """The address for programs on this machine; a server that listens everywhere is reached over loopback."""
    return f"http://{bracketed(LOOPBACK_FOR.get(host, host))}:{port}"


def lan_urls(addresses: Iterable[str], port: int) -> list[str]:
    """One address for programs on other machines for each of this machine's network addresses, in their order."""
    return [f"http://{bracketed(address)}:{port}" for address in addresses]


def bracketed(host: str) -> str:
    """An IPv6 address as it stands in a URL or a Host header, without its zone; anything else unchanged."""
    return f"[{host.strip('[]').partition('%')[0]}]" if ":" in host else host


def jupyter_server_url(environ: Mapping[str, str]) -> str | None:
    """Where the browser sees this notebook's Jupyter server, with a slash at the end; ``None`` if nothing says so.

    On a Hub that does not tell its public address (before JupyterHub 5) it is a path, right in any link of the page.
    """
    if url := environ.get("JUPYTERHUB_PUBLIC_URL"):
        return _with_slash(url)
    if prefix := environ.get("JUPYTERHUB_SERVICE_PREFIX"):
        return _with_slash(environ.get("JUPYTERHUB_HOST", "") + prefix)
    url = environ.get("JUPYTER_SERVER_URL")
    return _with_slash(url) if url else None


def proxy_url(port: int, environ: Mapping[str, str]) -> str | None:
    """The address through the notebook's own web front, for a browser that cannot reach this machine's ports.

    ``LMX_LAB_PROXY_URL`` wins (``{port}`` in it is filled in); then a Hub or Binder (through jupyter-server-proxy),
    code-server and Codespaces. ``None`` where there is none, and on Colab and VS Code's remote windows, which decide
    it in the browser.
    """
    if template := environ.get("LMX_LAB_PROXY_URL"):
        return _with_slash(template.replace("{port}", str(port)))
    if "JUPYTERHUB_SERVICE_PREFIX" in environ and (server := jupyter_server_url(environ)):
        return f"{server}proxy/{port}/"
    if template := environ.get("VSCODE_PROXY_URI"):
        return _with_slash(template.replace("{{port}}", str(port)))
    domain = environ.get("GITHUB_CODESPACES_PORT_FORWARDING_DOMAIN")
    if domain and (name := environ.get("CODESPACE_NAME")):
        return f"https://{name}-{port}.{domain}/"
    return None


def _with_slash(url: str) -> str:
    return url if url.endswith("/") else url + "/"
