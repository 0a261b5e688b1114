"""Serve a hub and a page of wheels on this machine, slowly enough that downloads can be interrupted."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tests.support.hub import PIECE_BYTES, Handler, Hub, whole

LINKS = "/links/"


class SlowHub(Hub):
    """A hub with the files of a folder as the model ``org/tiny``, and wheels at ``/links/``, as a context manager."""

    block_on_close = False

    def __init__(self, folder: Path, *, wheels: Path | None = None, whole_s: float = 1.0) -> None:
        """
        Args:
            whole_s: Duration of the download of the largest file.
        """
        super().__init__({path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}, _Handler)
        self.wheels = {path.name: path.read_bytes() for path in wheels.iterdir()} if wheels is not None else {}
        largest = max(map(len, (*self.files.values(), *self.wheels.values())))
        self.send = partial(whole, pause_s=whole_s * PIECE_BYTES / largest)
        self.faults = dict.fromkeys(self.files, self.send)

    @property
    def hub_environment(self) -> dict[str, str]:
        return {"HF_ENDPOINT": self.url, "HF_HUB_OFFLINE": "0"}

    @property
    def index_environment(self) -> dict[str, str]:
        return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": f"{self.url}{LINKS}"}


class _Handler(Handler):
    server: SlowHub

    def answer(self) -> None:
        path, wheels = self.path.partition("?")[0], self.server.wheels
        if path == LINKS:
            links = "".join(f'<a href="{name}">{name}</a>' for name in wheels)
            page = f"<!DOCTYPE html><html><body>{links}</body></html>"
            self.reply(page.encode(), headers={"Content-Type": "text/html"})
        elif (name := path.removeprefix(LINKS)) in wheels:
            self.server.send(self, wheels[name])
        else:
            super().answer()
