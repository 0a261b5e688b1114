"""Child process: our engine with an embedding model. Replies to a line with texts with the time they took."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from benchmarks.paths import BUILD
from benchmarks.processes import Reply, child_settings, serve_lines, take_channel
from lmx_lab.engine import EmbeddingRequest, Engine
from lmx_lab.settings import Settings
from lmx_lab.weights import Catalog


def main() -> None:
    channel = take_channel()
    options = child_settings()
    settings = Settings(home=BUILD / "home", blas=options["blas"])
    with asyncio.Runner() as runner:
        engine = runner.run(_start(settings, Path(options["model"])))

        def run(question: Reply) -> Reply:
            return runner.run(_embed(engine, question["texts"]))

        run({"texts": ["a warm-up"]})
        serve_lines(channel, {}, run)
        engine.stop()


async def _start(settings: Settings, model: Path) -> Engine:
    engine = Engine(settings)
    await asyncio.to_thread(engine.start)
    await engine.load(Catalog(settings).resolve(str(model)))
    return engine


async def _embed(engine: Engine, texts: list[str]) -> Reply:
    started = time.perf_counter()
    embeddings = await engine.embed(EmbeddingRequest(inputs=tuple(texts)))
    return {"seconds": time.perf_counter() - started, "tokens": embeddings.report.tokens}


if __name__ == "__main__":
    main()
