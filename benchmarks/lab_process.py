"""Child process: the lab's server on a loopback port. Replies to any line with the engine's figures."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from benchmarks.paths import BUILD
from benchmarks.processes import Reply, child_settings, serve_lines, take_channel
from lmx_lab.notebook.lab import Lab
from lmx_lab.settings import Settings


def main() -> None:
    channel = take_channel()
    settings = child_settings()
    model, options = Path(settings.pop("model")), settings.pop("options")
    with Lab(Settings.read({}, home=BUILD / "home", port=0, **settings), loop="thread") as lab:
        lab.load(model, **options)

        def snapshot(_: Reply) -> Reply:
            now = lab.server.engine.snapshot
            return asdict(now.totals) | {
                "active_requests": now.active_requests,
                "queued_requests": now.queued_requests,
                "prefix_cache_bytes": now.prefix_cache_bytes,
            }

        serve_lines(channel, {"url": lab.url}, snapshot)


if __name__ == "__main__":
    main()
