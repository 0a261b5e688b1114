"""Child process: our engine with an embedding model. Replies to a line with texts with the time they took."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from benchmarks.paths import BUILD
from benchmarks.processes import Reply, child_settings, serve_lines, take_channel
from lmx_lab.engine import EmbeddingRequest, ModelManager
from lmx_lab.settings import Settings
from lmx_lab.weights.catalog import Catalog
from tests.support.engines import load_entry


def main() -> None:
    channel = take_channel()
    options = child_settings()
    settings = Settings(home=BUILD / "home", blas=options["blas"])
    with asyncio.Runner() as runner:
        manager = runner.run(_start(settings, Path(options["model"])))

        def run(question: Reply) -> Reply:
            return runner.run(_embed(manager, question["texts"]))

        run({"texts": ["a warm-up"]})
        serve_lines(channel, {}, run)
        manager.stop()


async def _start(settings: Settings, model: Path) -> ModelManager:
    manager = ModelManager(settings)
    await asyncio.to_thread(manager.start)
    await load_entry(manager, Catalog(settings).resolve(str(model)))
    return manager


async def _embed(manager: ModelManager, texts: list[str]) -> Reply:
    started = time.perf_counter()
    embeddings = await manager.embed(EmbeddingRequest(inputs=tuple(texts)))
    return {"seconds": time.perf_counter() - started, "tokens": embeddings.report.tokens}


if __name__ == "__main__":
    main()
