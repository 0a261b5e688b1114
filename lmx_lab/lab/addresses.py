"""Under which addresses a lab is reached, and which Host values its guard therefore accepts."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

import psutil

from lmx_lab import links
from lmx_lab.guard import GuardPolicy, local_policy
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
        return links.local_url(self.settings.host.strip("[]"), self.port)

    @property
    def lan_urls(self) -> list[str]:
        """For other hosts; the likeliest first, none when only this machine is served."""
        return links.lan_urls(self._lan_names(), self.port)

    @property
    def proxy_url(self) -> str | None:
        return links.proxy_url(self.port, os.environ)

    def policy(self) -> GuardPolicy:
        """What the guard lets pass.

        Raises:
            InvalidRequestError: a setting (``allowed_hosts``, ``cors_origins``, ``api_key``) that could never match.
        """
        machine = socket.gethostname().lower()
        names = [*self._lan_names(), *([machine, f"{machine}.local"] if self._is_everywhere else [])]
        hosts = [f"{links.bracketed(name)}:{self.port}" for name in names]
        return local_policy(
            self.port,
            hosts=[*hosts, *self.settings.allowed_hosts],
            origins=self.settings.cors_origins,
            key=self.settings.api_key,
        )

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
    found = [
        (name.startswith(VIRTUAL), address.address)
        for name, group in psutil.net_if_addrs().items()
        for address in group
        if address.family == socket.AF_INET and not address.address.startswith(("127.", "169.254."))
    ]
    return [address for _, address in sorted(found)]
