"""The addresses under which a server on this machine is reached: pure functions over an environment mapping."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import SplitResult, urlsplit

LOOPBACK_FOR = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
DEFAULT_PORTS = {"http": 80, "https": 443}
OVERRIDE = "LMX_LAB_PROXY_URL"
# VS Code takes these out of the environment of its terminals: who has one was started by it, as its kernels are.
VSCODE = ("VSCODE_PID", "VSCODE_CWD", "VSCODE_IPC_HOOK")
COLAB = ("COLAB_RELEASE_TAG", "COLAB_BACKEND_VERSION")
_NAME = re.compile(r"[a-z0-9_][a-z0-9_.-]*|[0-9a-f:.]+", re.ASCII)


def local_url(host: str, port: int) -> str:
    """The address for programs on this machine; a server that listens everywhere is reached over loopback."""
    return f"http://{bracketed(LOOPBACK_FOR.get(host, host))}:{port}"


def lan_urls(addresses: Iterable[str], port: int) -> list[str]:
    """One address for programs on other machines for each of this machine's network addresses, in their order."""
    return [f"http://{bracketed(address)}:{port}" for address in addresses]


def bracketed(host: str) -> str:
    """An IPv6 address as it stands in a URL or a Host header, without its zone; anything else unchanged."""
    return f"[{host.strip('[]').partition('%')[0]}]" if ":" in host else host


def jupyter_server_url(environ: Mapping[str, str], *, above: str | None = None) -> str | None:
    """Where the browser sees this notebook's Jupyter server, with a slash at the end; ``None`` if nothing says so.

    ``above`` is the address of the Jupyter server that started this process, where that is known: kernels are not told
    it in their environment, only terminals are. On a Hub that does not tell its public address it is a path, right in
    any link of the page.
    """
    url = _hub_url(environ) or above or _value(environ, "JUPYTER_SERVER_URL")
    return _with_slash(url) if url else None


def proxied_url(server: str, port: int) -> str:
    """Where jupyter-server-proxy shows this port, if it is installed beside the Jupyter server of that address."""
    return f"{_with_slash(server)}proxy/{port}/"


def proxy_url(port: int, environ: Mapping[str, str]) -> str | None:
    """The address through the notebook's own web front, for a browser that cannot reach this machine's ports.

    ``LMX_LAB_PROXY_URL`` wins (``{port}`` in it is filled in); then a Hub or Binder (through jupyter-server-proxy),
    code-server and Codespaces. ``None`` where there is none, and where only the browser knows it: see `browser_step`.

    Raises:
        ValueError: ``LMX_LAB_PROXY_URL`` is no address.
    """
    if template := _value(environ, OVERRIDE):
        return _override(template, port)
    if server := _hub_url(environ):
        return proxied_url(server, port)
    if template := _value(environ, "VSCODE_PROXY_URI"):
        # A relative one leads nowhere from inside a notebook's frame.
        url = _with_slash(template.replace("{{port}}", str(port)))
        return url if _is_address(url) else None
    domain, name = _value(environ, "GITHUB_CODESPACES_PORT_FORWARDING_DOMAIN"), _value(environ, "CODESPACE_NAME")
    return f"https://{name}-{port}.{domain}/" if domain and name else None


def proxy_path(port: int, environ: Mapping[str, str], *, above: str | None = None) -> str | None:
    """Where jupyter-server-proxy would show this port, as a path for the Jupyter server's own pages.

    ``above`` as in `jupyter_server_url`. Only asking tells whether it is installed: each answer of this server has the
    header ``x-lmx-lab``.
    """
    server = jupyter_server_url(environ, above=above)
    if server is None or not _is_address(server):
        return None
    return urlsplit(proxied_url(server, port)).path


def browser_step(port: int, environ: Mapping[str, str]) -> str | None:
    """What the reader does where the address is decided in the browser; ``None`` where an address is known or plain."""
    if proxy_url(port, environ) is not None:
        return None
    if any(_value(environ, name) for name in COLAB):
        return f"from google.colab import output; output.serve_kernel_port_as_window({port})"
    return f"VS Code: forward port {port} in the Ports view" if is_vscode(environ) and _is_remote(environ) else None


def is_vscode(environ: Mapping[str, str]) -> bool:
    """Whether VS Code started this kernel, and shows its notebook in a webview whose origin is drawn by lot."""
    return any(_value(environ, name) for name in VSCODE)


def notebook_origins(environ: Mapping[str, str], *, above: str | None = None, machine: Sequence[str] = ()) -> list[str]:
    """The origins of the pages that show this process's notebook; ``above`` as in `jupyter_server_url`.

    ``machine`` is this machine's name and then its addresses: a Jupyter server under that name listens on all of them.
    Such a page can already run any code here. Empty where only a path is known; VS Code's webviews, whose origins are
    drawn by lot, are `is_vscode`.
    """
    url = jupyter_server_url(environ, above=above)
    parts = _split(url) if url else None
    if parts is None or parts.hostname is None:
        return []
    names: Iterable[str] = (parts.hostname,)
    if parts.hostname in LOOPBACK_NAMES:
        names = LOOPBACK_NAMES
    elif machine and parts.hostname == machine[0].lower():
        names = (parts.hostname, *LOOPBACK_NAMES, *machine[1:])
    return [_origin(parts, name) for name in names]


def origin_of(url: str) -> str | None:
    """The origin of an absolute web address as browsers write it; ``None`` for anything else."""
    parts = _split(url)
    return _origin(parts, parts.hostname or "") if parts else None


def host_of(origin: str) -> str:
    """The Host that a browser sends to an origin, always with a port: 80 for none, as a plain server reads it."""
    host = origin.partition("://")[2]
    return host if host.rpartition(":")[2].isdigit() else f"{host}:80"


def _hub_url(environ: Mapping[str, str]) -> str | None:
    # Not JUPYTERHUB_HOST: that is the Hub's own name, and with subdomains each user's server has another one.
    if url := _value(environ, "JUPYTERHUB_PUBLIC_URL"):
        return _with_slash(url)
    callback = _value(environ, "JUPYTERHUB_OAUTH_CALLBACK_URL")
    if callback.endswith("/oauth_callback") and _split(callback):
        return callback.removesuffix("oauth_callback")
    prefix = _value(environ, "JUPYTERHUB_SERVICE_PREFIX")
    return _with_slash("/" + prefix.lstrip("/")) if prefix else None


def _override(template: str, port: int) -> str:
    url = _with_slash(template.replace("{port}", str(port)))
    if not _is_address(url) or set("?#{}") & set(url) or not url.isprintable() or " " in url:
        raise ValueError(
            f"{OVERRIDE} is {template!r}; write https://name/path/ or /path/, with {{port}} where the port belongs"
        )
    return url


def _is_address(url: str) -> bool:
    return _split(url) is not None or (url.startswith("/") and not url.startswith("//"))


def _is_remote(environ: Mapping[str, str]) -> bool:
    return any(_value(environ, name) for name in ("VSCODE_AGENT_FOLDER", "SSH_CONNECTION", "REMOTE_CONTAINERS"))


def _split(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        known = parts.scheme in DEFAULT_PORTS and parts.port != 0 and "@" not in parts.netloc
    except ValueError:
        return None
    return parts if known and _NAME.fullmatch((parts.hostname or "").partition("%")[0]) else None


def _origin(parts: SplitResult, name: str) -> str:
    port = "" if parts.port in (None, DEFAULT_PORTS[parts.scheme]) else f":{parts.port}"
    return f"{parts.scheme}://{bracketed(name)}{port}"


def _value(environ: Mapping[str, str], name: str) -> str:
    """Set but empty is not set: JupyterHub does so."""
    return environ.get(name, "").strip()


def _with_slash(url: str) -> str:
    return url if url.endswith("/") else url + "/"
