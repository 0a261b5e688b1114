"""Define the properties of a lab that exist only if its server runs in this process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from lmx_lab.settings import Settings

if TYPE_CHECKING:
    from lmx_lab.engine import ModelManager
    from lmx_lab.notebook.local import LocalServer, LoopMode
    from lmx_lab.weights import Catalog


class LocalProperties(ABC):
    """Properties of the server of this process: its settings, engine, models on disk, and addresses."""

    @property
    @abstractmethod
    def server(self) -> LocalServer:
        """The server of this process.

        Raises:
            AttributeError: the server runs in another process.
        """

    @property
    def settings(self) -> Settings:
        return self.server.settings

    @property
    def mode(self) -> LoopMode:
        """``kernel`` if the kernel's event loop runs the server while it is free, ``thread`` if only a thread does."""
        return self.server.mode

    @property
    def engine(self) -> ModelManager:
        return self.server.engine

    @property
    def catalog(self) -> Catalog:
        """The models on this disk."""
        return self.server.catalog

    @property
    def port(self) -> int:
        return self.server.addresses.port

    @property
    def lan_url(self) -> str | None:
        """The address for other hosts; None if only this machine is served."""
        return next(iter(self.lan_urls), None)

    @property
    def lan_urls(self) -> list[str]:
        """All addresses for other hosts, the most likely one first."""
        return self.server.addresses.lan_urls

    @property
    def proxy_url(self) -> str | None:
        """The address through the proxy of JupyterHub, Binder, Colab or VS Code; None if there is no such proxy."""
        return self.server.addresses.proxy_url

    @property
    def proxy_path(self) -> str | None:
        """The path of this server on pages of the notebook's Jupyter server; None without jupyter-server-proxy."""
        return self.server.addresses.proxy_path
