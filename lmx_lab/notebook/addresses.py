"""Compute the addresses of a server, and the hosts and origins that its guard accepts.

A kernel does not know the address of its Jupyter server. But the Jupyter server is an ancestor of the kernel's process,
and writes its address to a file in Jupyter's runtime folder, which is named after its process id. jupyter-server-proxy
runs inside the Jupyter server, authenticates every caller, and forwards the Host header unchanged. Therefore
connections from the Jupyter server are accepted with any Host header. The rules for admin routes treat these callers as
callers on this machine, because every user whom the Jupyter server accepts can run code in its kernels.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import psutil

from lmx_lab import urls
from lmx_lab.errors import InvalidRequestError
from lmx_lab.http.guard import PAGE_PATHS, GuardPolicy, local_policy
from lmx_lab.settings import Settings

ALL_INTERFACES = ("0.0.0.0", "::")
VIRTUAL = ("docker", "br-", "veth", "virbr", "cni", "podman")
"""Prefixes of the names of network interfaces for containers and virtual machines. Other hosts cannot reach this
machine through them."""


@dataclass(frozen=True, kw_only=True)
class NotebookServer:
    """A running Jupyter server."""

    process: psutil.Process
    url: str
    """The address that the server has written, with its base path; the host is the machine's name if the server
    listens on all interfaces."""

    def owns(self, peer: tuple[str, int], here: tuple[str, int]) -> bool:
        """Return whether this Jupyter server has opened the connection from ``peer`` to ``here``.

        Takes a few milliseconds, and is therefore called only for connections that would be refused. Both ends are
        compared, because another process may use the same local port for a connection to another address.
        """
        try:
            connections = self.process.net_connections("tcp")
        except psutil.Error:
            return False
        return any((connection.laddr, connection.raddr) == (peer, here) for connection in connections)


def find_notebook_server() -> NotebookServer | None:
    """Return the nearest ancestor that is a Jupyter server; None if there is none, or processes cannot be listed."""
    try:
        # Imported here, because it is optional: it is installed with a kernel, not with the lab.
        from jupyter_core.paths import jupyter_runtime_dir

        ancestors = psutil.Process().parents()
    except (ImportError, psutil.Error):
        return None
    folder = Path(jupyter_runtime_dir())
    for process in ancestors:
        try:
            content = json.loads((folder / f"jpserver-{process.pid}.json").read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(content, dict) and content.get("pid") == process.pid and isinstance(content.get("url"), str):
            return NotebookServer(process=process, url=content["url"])
    return None


@dataclass(frozen=True, kw_only=True)
class Addresses:
    """The addresses of a server with these settings on this port."""

    settings: Settings
    port: int

    @cached_property
    def url(self) -> str:
        """The address for programs on this machine."""
        return urls.local_url(self.settings.host.strip("[]"), self.port)

    @property
    def lan_urls(self) -> list[str]:
        """Addresses for other hosts, the most likely one first; empty if only this machine is served."""
        return urls.lan_urls(self.lan_names, self.port)

    @property
    def proxy_url(self) -> str | None:
        """The address through the proxy of JupyterHub, Binder, Colab or VS Code; None if there is no such proxy."""
        return urls.proxy_url(self.port, os.environ)

    @cached_property
    def proxy_path(self) -> str | None:
        """The path of this server on pages of this process's Jupyter server; None without jupyter-server-proxy."""
        jupyter = find_notebook_server()
        return urls.proxy_path(self.port, os.environ, recorded_url=jupyter.url if jupyter else None)

    @property
    def browser_step(self) -> str | None:
        """The step for the user if only the browser knows the address; None otherwise."""
        return urls.browser_step(self.port, os.environ)

    def policy(self) -> GuardPolicy:
        """Return what the guard accepts: this machine, the hosts and origins in the settings, and this notebook.

        Raises:
            InvalidRequestError: a setting (``allowed_hosts``, ``cors_origins``, ``api_key``) can never match, or
                ``LMX_LAB_PROXY_URL`` is not an address.
        """
        own = [f"{urls.bracketed(name)}:{self.port}" for name in self.own_names()]
        jupyter = find_notebook_server()
        # The origins of the notebook's pages, and of this server's own pages behind a proxy. The proxies forward the
        # Host that the browser has sent.
        try:
            proxy = urls.origin_of(self.proxy_url or "")
        except ValueError as error:
            raise InvalidRequestError(str(error), param=urls.OVERRIDE) from error
        machine, recorded_url = [socket.gethostname(), *lan_addresses()], jupyter.url if jupyter else None
        fronts = [
            *urls.notebook_origins(os.environ, recorded_url=recorded_url, machine_names=machine),
            *([proxy] if proxy else []),
        ]
        return local_policy(
            self.port,
            hosts=[*own, *map(urls.host_of, fronts), *self.settings.allowed_hosts],
            origins=[*fronts, *self.settings.cors_origins],
            webviews=urls.is_vscode(os.environ),
            is_trusted_proxy=jupyter.owns if jupyter else None,
            key=self.settings.api_key,
            open_paths=PAGE_PATHS if self.settings.page else (),
        )

    def own_names(self) -> list[str]:
        """Return the names and addresses of this machine that are a part of the policy. They may change."""
        if not self._uses_all_interfaces:
            return self.lan_names
        machine = socket.gethostname().lower()
        ipv6 = _addresses(socket.AF_INET6) if self.settings.host.strip("[]") == "::" else []
        # Zone identifiers are removed.
        names = [address.partition("%")[0] for address in ipv6]
        return [*self.lan_names, *(name for name in names if name != "::1"), machine, f"{machine}.local"]

    @property
    def _uses_all_interfaces(self) -> bool:
        return self.settings.host.strip("[]") in ALL_INTERFACES

    @property
    def lan_names(self) -> list[str]:
        """The host names or addresses of this machine that ``lan_urls`` contains."""
        if not is_lan(self.settings.host):
            return []
        return lan_addresses() if self._uses_all_interfaces else [self.settings.host.strip("[]")]


def is_lan(host: str) -> bool:
    """Return whether a server that listens on ``host`` can be reached from other machines."""
    host = host.strip("[]")
    return host not in ("localhost", "::1") and not host.startswith("127.")


def lan_addresses() -> list[str]:
    """Return the IPv4 addresses of this machine without loopback and link-local ones. Addresses of virtual interfaces
    are last."""
    addresses = _addresses(socket.AF_INET)
    return [address for address in addresses if not address.startswith(("127.", "169.254."))]


def _addresses(family: socket.AddressFamily) -> list[str]:
    """Return the addresses of this machine, those of virtual interfaces last."""
    addresses = [
        (name.startswith(VIRTUAL), address.address)
        for name, group in psutil.net_if_addrs().items()
        for address in group
        if address.family == family
    ]
    return [address for _, address in sorted(addresses)]
