"""Under which addresses a lab is reached, and which Host values and origins its guard therefore accepts."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from lmx_lab import urls
from lmx_lab.errors import InvalidRequestError
from lmx_lab.http.guard import GuardPolicy, LivePolicy, local_policy
from lmx_lab.notebook.jupyter_server import notebook_server
from lmx_lab.settings import Settings

EVERYWHERE = ("0.0.0.0", "::")
# Bridges of containers and virtual machines: addresses of this machine, but nobody's way to it.
VIRTUAL = ("docker", "br-", "veth", "virbr", "cni", "podman")


@dataclass(frozen=True, kw_only=True)
class Addresses:
    """Of a server with these settings on this port."""

    settings: Settings
    port: int

    @property
    def url(self) -> str:
        return urls.local_url(self.settings.host.strip("[]"), self.port)

    @property
    def lan_urls(self) -> list[str]:
        """For other hosts; the likeliest first, none when only this machine is served."""
        return urls.lan_urls(self._lan_names(), self.port)

    @property
    def proxy_url(self) -> str | None:
        return urls.proxy_url(self.port, os.environ)

    @property
    def proxy_path(self) -> str | None:
        """For pages of the Jupyter server above, if jupyter-server-proxy is installed in it."""
        above = notebook_server()
        return urls.proxy_path(self.port, os.environ, recorded_url=above.url if above else None)

    @property
    def browser_step(self) -> str | None:
        """What the reader does where only the browser knows an address."""
        return urls.browser_step(self.port, os.environ)

    def policy(self) -> GuardPolicy:
        """What the guard lets pass: this machine, what the settings name, and the notebook this process belongs to.

        Raises:
            InvalidRequestError: a setting (``allowed_hosts``, ``cors_origins``, ``api_key``) that could never match, or
                an ``LMX_LAB_PROXY_URL`` that is no address.
        """
        own = [f"{urls.bracketed(name)}:{self.port}" for name in self._own_names()]
        above = notebook_server()
        fronts = self._fronts(above.url if above else None)
        return local_policy(
            self.port,
            hosts=[*own, *map(urls.host_of, fronts), *self.settings.allowed_hosts],
            origins=[*fronts, *self.settings.cors_origins],
            webviews=urls.is_vscode(os.environ),
            passes_on=above.owns if above else None,
            key=self.settings.api_key,
        )

    def live_policy(self) -> Callable[[], GuardPolicy]:
        """The policy for each request: on all interfaces it follows this machine's names and addresses.

        Raises:
            InvalidRequestError: as ``policy``.
        """
        if self._is_everywhere:
            return LivePolicy(self.policy, self._own_names)
        policy = self.policy()
        return lambda: policy

    def _fronts(self, above: str | None) -> list[str]:
        """The origins of the notebook's pages, and of this server's own pages behind a proxy.

        The proxies between pass on the Host that the browser asked for.
        """
        try:
            proxy = urls.origin_of(self.proxy_url or "")
        except ValueError as error:
            raise InvalidRequestError(str(error), param=urls.OVERRIDE) from error
        machine = [socket.gethostname(), *lan_addresses()]
        return [
            *urls.notebook_origins(os.environ, recorded_url=above, machine_names=machine),
            *([proxy] if proxy else []),
        ]

    def _own_names(self) -> list[str]:
        if not self._is_everywhere:
            return self._lan_names()
        machine = socket.gethostname().lower()
        ipv6 = ipv6_addresses() if self.settings.host.strip("[]") == "::" else []
        return [*self._lan_names(), *ipv6, machine, f"{machine}.local"]

    @property
    def _is_everywhere(self) -> bool:
        return self.settings.host.strip("[]") in EVERYWHERE

    def _lan_names(self) -> list[str]:
        if not is_lan(self.settings.host):
            return []
        return lan_addresses() if self._is_everywhere else [self.settings.host.strip("[]")]


def is_lan(host: str) -> bool:
    """Whether a server that listens on ``host`` is there for other machines."""
    host = host.strip("[]")
    return host not in ("localhost", "::1") and not host.startswith("127.")


def lan_addresses() -> list[str]:
    """This machine's IPv4 addresses on its networks, virtual ones last, loopback and link-local left out."""
    found = _addresses(socket.AF_INET)
    return [address for address in found if not address.startswith(("127.", "169.254."))]


def ipv6_addresses() -> list[str]:
    """This machine's IPv6 addresses on its networks, virtual ones last, without zones, loopback left out."""
    return [address for address in (text.partition("%")[0] for text in _addresses(socket.AF_INET6)) if address != "::1"]


def _addresses(family: socket.AddressFamily) -> list[str]:
    found = [
        (name.startswith(VIRTUAL), address.address)
        for name, group in psutil.net_if_addrs().items()
        for address in group
        if address.family == family
    ]
    return [address for _, address in sorted(found)]
