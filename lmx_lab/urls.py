"""Compute the addresses of a server on this machine from its host, its port and the environment variables.

The QR codes of addresses, for phones, require segno, which is optional (extra ``lan``).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import SplitResult, urlsplit

from lmx_lab.errors import MissingPackageError
from lmx_lab.extras import import_optional

LOOPBACK_FOR = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
DEFAULT_PORTS = {"http": 80, "https": 443}
OVERRIDE = "LMX_LAB_PROXY_URL"
# VS Code removes these variables from its terminals, so a process that has one is a kernel that VS Code started.
VSCODE = ("VSCODE_PID", "VSCODE_CWD", "VSCODE_IPC_HOOK")
COLAB = ("COLAB_RELEASE_TAG", "COLAB_BACKEND_VERSION")
BLOCKS = {(True, True): "█", (True, False): "▀", (False, True): "▄", (False, False): " "}
QUIET_ZONE = 2
"""Width of the border, in modules. The standard requires 4; scanners accept 2."""
_NAME = re.compile(r"[a-z0-9_][a-z0-9_.-]*|[0-9a-f:.]+", re.ASCII)


def local_url(host: str, port: int) -> str:
    """Return the address for programs on this machine. It is a loopback address if the server listens everywhere."""
    return f"http://{bracketed(LOOPBACK_FOR.get(host, host))}:{port}"


def lan_urls(addresses: Iterable[str], port: int) -> list[str]:
    """Return the addresses for programs on other machines, one for each network address of this machine."""
    return [f"http://{bracketed(address)}:{port}" for address in addresses]


def bracketed(host: str) -> str:
    """Return an IPv6 address in brackets and without its zone, as in URLs and Host headers. Keep other hosts."""
    return f"[{host.strip('[]').partition('%')[0]}]" if ":" in host else host


def jupyter_server_url(environ: Mapping[str, str], *, recorded_url: str | None = None) -> str | None:
    """Return the address of this notebook's Jupyter server in the browser, with a slash at the end.

    It is a path if JupyterHub does not name its public address, which works in links on the notebook's page.

    Args:
        recorded_url: The address that the Jupyter server which started this process has recorded, if it is known.
            Jupyter sets the address in the environment of its terminals, but not of its kernels.

    Returns:
        ``None`` if the address is not known.
    """
    url = _hub_url(environ) or recorded_url or _value(environ, "JUPYTER_SERVER_URL")
    return _with_slash(url) if url else None


def proxied_url(server: str, port: int) -> str:
    """Return the address at which jupyter-server-proxy serves this port, if it is installed in that Jupyter server."""
    return f"{_with_slash(server)}proxy/{port}/"


def proxy_url(port: int, environ: Mapping[str, str]) -> str | None:
    """Return the address behind the notebook's web server, for browsers that cannot reach this machine's ports.

    ``LMX_LAB_PROXY_URL`` takes precedence, with ``{port}`` replaced. Then follow JupyterHub and Binder (through
    jupyter-server-proxy), code-server and Codespaces.

    Returns:
        ``None`` if there is no such address, or if only the browser knows it; see ``browser_step``.

    Raises:
        ValueError: ``LMX_LAB_PROXY_URL`` is not a valid address.
    """
    if template := _value(environ, OVERRIDE):
        url = _with_slash(template.replace("{port}", str(port)))
        if not _is_address(url) or set("?#{}") & set(url) or not url.isprintable() or " " in url:
            raise ValueError(
                f"{OVERRIDE} is {template!r}; write https://name/path/ or /path/, with {{port}} in place of the port"
            )
        return url
    if server := _hub_url(environ):
        return proxied_url(server, port)
    if template := _value(environ, "VSCODE_PROXY_URI"):
        # A relative address does not work inside the frame of a notebook's output.
        url = _with_slash(template.replace("{{port}}", str(port)))
        return url if _is_address(url) else None
    domain, name = _value(environ, "GITHUB_CODESPACES_PORT_FORWARDING_DOMAIN"), _value(environ, "CODESPACE_NAME")
    return f"https://{name}-{port}.{domain}/" if domain and name else None


def proxy_path(port: int, environ: Mapping[str, str], *, recorded_url: str | None = None) -> str | None:
    """Return the path at which jupyter-server-proxy would serve this port, for pages of the Jupyter server.

    Only a request shows whether the proxy is installed: each response of this server has the header ``x-lmx-lab``.

    Args:
        recorded_url: See ``jupyter_server_url``.
    """
    server = jupyter_server_url(environ, recorded_url=recorded_url)
    if server is None or not _is_address(server):
        return None
    return urlsplit(proxied_url(server, port)).path


def browser_step(port: int, environ: Mapping[str, str]) -> str | None:
    """Return the step for the user if only the browser can create the address; None otherwise."""
    if proxy_url(port, environ) is not None:
        return None
    if any(_value(environ, name) for name in COLAB):
        return f"from google.colab import output; output.serve_kernel_port_as_window({port})"
    is_remote = any(_value(environ, name) for name in ("VSCODE_AGENT_FOLDER", "SSH_CONNECTION", "REMOTE_CONTAINERS"))
    return f"VS Code: forward port {port} in the Ports view" if is_vscode(environ) and is_remote else None


def is_vscode(environ: Mapping[str, str]) -> bool:
    """Whether VS Code started this kernel. It shows the notebook in a webview with a random origin."""
    return any(_value(environ, name) for name in VSCODE)


def notebook_origins(
    environ: Mapping[str, str], *, recorded_url: str | None = None, machine_names: Sequence[str] = ()
) -> list[str]:
    """Return the origins of the pages that show this process's notebook. These pages can already run any code here.

    Args:
        recorded_url: See ``jupyter_server_url``.
        machine_names: This machine's name, followed by its addresses. A Jupyter server with that name listens on all
            of these addresses.

    Returns:
        An empty list if only a path is known. VS Code's webviews have random origins; see ``is_vscode``.
    """
    url = jupyter_server_url(environ, recorded_url=recorded_url)
    parts = _split(url) if url else None
    if parts is None or parts.hostname is None:
        return []
    names: Iterable[str] = (parts.hostname,)
    if parts.hostname in LOOPBACK_NAMES:
        names = LOOPBACK_NAMES
    elif machine_names and parts.hostname == machine_names[0].lower():
        names = (parts.hostname, *LOOPBACK_NAMES, *machine_names[1:])
    return [_origin(parts, name) for name in names]


def origin_of(url: str) -> str | None:
    """Return the origin of an absolute web address in the form of browsers, and ``None`` for anything else."""
    parts = _split(url)
    return _origin(parts, parts.hostname or "") if parts else None


def host_of(origin: str) -> str:
    """Return the Host header that a browser sends to an origin. If it has no port, 80 is added, as HTTP servers do."""
    host = origin.partition("://")[2]
    return host if host.rpartition(":")[2].isdigit() else f"{host}:80"


def _hub_url(environ: Mapping[str, str]) -> str | None:
    # Not JUPYTERHUB_HOST, which is the name of the Hub: with subdomains each user's server has another name.
    if url := _value(environ, "JUPYTERHUB_PUBLIC_URL"):
        return _with_slash(url)
    callback = _value(environ, "JUPYTERHUB_OAUTH_CALLBACK_URL")
    if callback.endswith("/oauth_callback") and _split(callback):
        return callback.removesuffix("oauth_callback")
    prefix = _value(environ, "JUPYTERHUB_SERVICE_PREFIX")
    return _with_slash("/" + prefix.lstrip("/")) if prefix else None


def _is_address(url: str) -> bool:
    return _split(url) is not None or (url.startswith("/") and not url.startswith("//"))


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
    """Return the value of a variable, or an empty text if it is not set. JupyterHub sets unknown values empty."""
    return environ.get(name, "").strip()


def _with_slash(url: str) -> str:
    return url if url.endswith("/") else url + "/"


# QR codes


@functools.cache
def qr_data_uri(address: str) -> str:
    """Return the QR code of an address as an SVG image in a data URI; empty if segno is not installed.

    Its background is white.
    """
    code = _qr_code(address)
    return code.svg_data_uri(border=QUIET_ZONE, light="white", scale=4) if code is not None else ""


def qr_half_blocks(address: str) -> str:
    """Return the QR code of an address as text with two modules in each character; empty if segno is not installed.

    The blocks are the light modules, so the code is correct on a dark terminal. On a light one it is inverted, which
    scanners can also read.
    """
    code = _qr_code(address)
    if code is None:
        return ""
    rows = [[not dark for dark in row] for row in code.matrix_iter(border=QUIET_ZONE)]
    if len(rows) % 2:
        rows.append([False] * len(rows[0]))
    pairs = zip(rows[::2], rows[1::2], strict=True)
    return "\n".join("".join(BLOCKS[pair] for pair in zip(*rows, strict=True)) for rows in pairs)


def _qr_code(address: str) -> Any:
    try:
        segno = import_optional("segno", "a QR code")
    except MissingPackageError:
        return None
    return segno.make_qr(address, error="m")
