"""Kill downloads and conversions, and repeat them; let two processes download the same model at once."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lmx_lab.weights.starters import Starter
from soak.chat_requests import TIMEOUT_S, ReferenceChat, record_reference
from soak.models import is_installed, tiny
from soak.programs import Command, Home, Server, end_and_check, end_program, record_leftovers, wait_until
from soak.report import Row, Soak
from soak.slow_hub import SlowHub
from tests.support.hub import REPO, write_starter

KILLS, QUICK_KILLS = 10, 1
"""Kills for each kind of download."""
RACES, QUICK_RACES = 5, 1
PULL_S = 120.0
FILE_S = 1.5
"""Duration of the download of the largest file."""
FIRST_S = 10.0
STARTER = "soak-tiny"
REGISTER = """
import json
from lmx_lab.weights.starters import STARTERS, Starter
STARTERS["{id}"] = Starter(**json.loads('''{fields}'''))
"""


@dataclass(frozen=True, kw_only=True)
class Pull:
    """One way to get a model onto the disk."""

    part: str
    arguments: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    code: str = ""
    expected: dict[str, str] | None = None
    """SHA-256 hashes of the model's files by name; None if the files are generated, and the first pull defines them."""


def run(soak: Soak) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="lmx-soak-") as name:
        starter, wheels = build_wheel(soak.folder, Path(name) / "wheels")
        with SlowHub(soak.folder, wheels=wheels, whole_s=FILE_S) as hub:
            rows = [killed(soak, pull) for pull in pulls(soak, hub, starter)]
            return [*rows, two_servers_one_model(soak, hub)]


def pulls(soak: Soak, hub: SlowHub, starter: Starter) -> Iterator[Pull]:
    files = {name: hashlib.sha256(data).hexdigest() for name, data in hub.files.items()}
    yield Pull(
        part="kills: SIGKILL in downloads from the hub",
        arguments=("pull", REPO),
        environment=hub.hub_environment,
        expected=files,
    )
    yield Pull(
        part="kills: SIGKILL in downloads of a starter",
        arguments=("pull", STARTER),
        environment=hub.index_environment,
        code=REGISTER.format(id=STARTER, fields=json.dumps(asdict(starter))),
        expected=files,
    )
    if is_installed("llama.cpp"):
        yield Pull(part="kills: SIGKILL in conversions", arguments=("pull", str(tiny(soak, "llama.cpp")), "--mlx"))


def build_wheel(folder: Path, target: Path) -> tuple[Starter, Path]:
    """Write the tiny model as a wheel; return its entry for the table of starters, and the wheel's folder."""
    target.mkdir()
    files = {f"tiny/{path.name}": path.read_bytes() for path in folder.iterdir() if path.is_file()}
    return write_starter(target, STARTER, files), target


# Kills


def killed(soak: Soak, pull: Pull) -> Row:
    """Kill a pull at random moments; the next pull must succeed, and leave only the model's files."""
    row, chance = Row(part=pull.part), random.Random(soak.seed)
    with tempfile.TemporaryDirectory(prefix="lmx-soak-") as name:
        home = Home(Path(name))
        began = time.monotonic()
        expected = pull.expected or _pull(home, pull, None, row)
        if pull.expected is not None:
            _pull(home, pull, expected, row)
        took_s = time.monotonic() - began
        for _ in range(QUICK_KILLS if soak.quick else KILLS):
            _delete_models(home)
            with _command(home, pull) as command:
                time.sleep(chance.uniform(0.15, 0.8) * took_s)
                row.faults += command.running
                command.kill()
            _pull(home, pull, expected, row)
            record_leftovers(home, row)
    row.notes = f"{took_s:.1f} s for a complete pull"
    return row


def _command(home: Home, pull: Pull) -> Command:
    return Command(home, *pull.arguments, code=pull.code, **pull.environment)


def _pull(home: Home, pull: Pull, expected: dict[str, str] | None, row: Row) -> dict[str, str]:
    """Run a pull to its end and return the hashes of the files; record whether they are not as expected."""
    row.requests += 1
    with _command(home, pull) as command:
        status = command.wait(PULL_S)
        if status is None:
            row.hung += 1
        elif status != 0:
            row.lost += 1
            row.wrong.append(f"a pull ended with {status}: {command.output[-300:]}")
    files = _files(home)
    if expected is not None and files != expected:
        row.lost += 1
        row.wrong.append(f"a pull did not leave exactly the model's files: {sorted(files)}")
    row.wrong += [f"a killed pull has left {path}" for path in _partial_files(home)]
    return files


def _files(home: Home) -> dict[str, str]:
    """Return the hash of each file of the only model in the store or the hub's cache, by name."""
    folders = [*home.folder.glob("models/[!.]*"), *home.hub_cache.glob("models--*/snapshots/*")]
    paths = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def _partial_files(home: Home) -> list[str]:
    """Return the files of incomplete downloads."""
    parts = [*home.folder.glob("models/.tmp/*")]
    parts += [*home.hub_cache.rglob("*.incomplete"), *home.hub_cache.rglob(".unverified-*")]
    return [str(path.relative_to(home.folder)) for path in parts]


def _delete_models(home: Home) -> None:
    for folder in (home.folder / "models", home.hub_cache):
        shutil.rmtree(folder, ignore_errors=True)


# Two processes on one home


def two_servers_one_model(soak: Soak, hub: SlowHub) -> Row:
    """Start two servers that download the same model; in every other race the first of them is killed."""
    row, chance = Row(part="kills: two servers, one home, one model"), random.Random(soak.seed)
    with tempfile.TemporaryDirectory(prefix="lmx-soak-") as name:
        home = Home(Path(name))
        with Server(home, soak.folder) as server:
            reference = asyncio.run(ReferenceChat.record(server.url))
            end_and_check(server, row)
        for number in range(1 + (QUICK_RACES if soak.quick else RACES)):
            _delete_models(home)
            hub.requests.clear()
            with _serve_from_hub(home, hub) as first, _serve_from_hub(home, hub) as second:
                killed = number % 2 == 1
                if killed:
                    wait_until(lambda: "model.safetensors" in hub.sent, PULL_S)
                    time.sleep(chance.uniform(0.0, FILE_S / 2))
                    first.kill()
                    row.faults += 1
                for server in [second] if killed else [first, second]:
                    row.requests += 1
                    record_reference(row, asyncio.run(reference.repeat(server.url, limit_s=TIMEOUT_S)), bound_s=FIRST_S)
                    end_program(server, row)
            fetched = hub.sent.count("model.safetensors")
            row.doubled += max(0, fetched - (2 if killed else 1))
            row.wrong += [f"a killed pull has left {path}" for path in _partial_files(home)]
            record_leftovers(home, row)
    return row


@contextmanager
def _serve_from_hub(home: Home, hub: SlowHub) -> Iterator[Server]:
    with Server(home, REPO, environment=hub.hub_environment) as server:
        yield server
