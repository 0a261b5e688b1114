"""Run attacks one by one and then all at once, while another client sends health requests and short chats."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self

import httpx2
import psutil

from soak.bodies import GROWTH, HEALTH_S, SETTLED_S, Probe, p99
from soak.hostile.attacks import ATTACKS, BUSY, LOAD, Attack, loads
from soak.hostile.models import EMBEDDER, NORMALIZER, VALID, write_hostile_models
from soak.hostile.senders import CHAT, Answer, chat_of, describe, together
from soak.programs import SMALL_CACHE, Daemon, Home, Server, end_and_check, wait_until
from soak.report import Row, Soak, SoakError, print_columns, print_line

ALONE_S, QUICK_ALONE_S = 3.0, 1.0
"""Duration for which chats and health requests are measured before an attack."""
AFTER_S = 1.0
"""Duration for which they are measured after the last answer to an attack."""
PAUSE_S = 0.05
"""Pause between two chats."""
CHAT_FACTOR, CHAT_S = 2.0, 1.0
"""During an attack, a chat may take its normal time multiplied by the first value, plus the second in seconds."""
TIMEOUT_S = 120.0
WAITS_S = 5.0
"""Time that an answer may take longer if all attacks run at once: the time limits of the steps of a request add up."""
DATABASE = Path("daemon", "daemon.db")
HELLO = chat_of("hi", max_tokens=8, temperature=0, ignore_eos=True)


def run(soak: Soak) -> list[Row]:
    figures: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory(prefix="lmx-soak-") as name:
        models = write_hostile_models(Path(name, "models"), soak)
        attacks = [attack for attack in (*ATTACKS, *loads(models)) if attack.in_quick or not soak.quick]
        with AttackedServer(soak, Path(name), models, figures) as target:
            rows = [target.run(attack.name, [attack], attack.model) for attack in attacks]
            # The slow pre-tokenizer is an attack only on its own model.
            at_once = [attack for attack in attacks if attack.model in (VALID, NORMALIZER)]
            rows.append(target.run("all at once", at_once, VALID if soak.quick else NORMALIZER))
            end_and_check(target.server, rows[-1])
        rows.append(empty_database(Home(Path(name, "d"))))
    print_columns(figures)
    return rows


def empty_database(home: Home) -> Row:
    """Start a daemon whose database is an empty file; it must refuse it."""
    row = Row(part="hostile: a database of zero bytes", requests=1, faults=1)
    file = home.folder / DATABASE
    file.parent.mkdir(mode=0o700)
    file.touch(mode=0o600)
    with Daemon(home, "http://127.0.0.1:1") as daemon:
        try:
            state = daemon.state
        except SoakError:
            row.notes = daemon.output[-300:].strip()
            if str(file) not in daemon.output:
                row.wrong.append(f"the message does not name the file: {row.notes}")
        else:
            row.lost += 1
            row.wrong.append(f"the daemon has started at {state.url}")
    return row


@dataclass(frozen=True, kw_only=True)
class _ChatTime:
    began: float
    seconds: float
    problem: str


class _OtherClient:
    """Sends short chats one after the other, as a context manager."""

    def __init__(self, url: str) -> None:
        # Linux accepts every address of 127.0.0.0/8 as its own, so this is another client than the attacking one.
        transport = httpx2.HTTPTransport(local_address="127.0.0.2")
        self._http = httpx2.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False, transport=transport)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._times: list[_ChatTime] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *how: object) -> None:
        self._ended.set()
        self._thread.join()
        self._http.close()

    def since(self, began: float) -> list[_ChatTime]:
        """Return the chats that were sent after a time, or had no answer by then. Wait for a chat that begins now."""
        now = time.monotonic()
        if not wait_until(lambda: self._times[-1:] != [] and self._times[-1].began >= now, 2 * TIMEOUT_S):
            raise SoakError("the chats of the other client have no end")
        return [chat for chat in self._times if chat.began + chat.seconds >= began]

    def _run(self) -> None:
        while not self._ended.wait(PAUSE_S):
            began, problem = time.monotonic(), ""
            try:
                answer = self._http.post(CHAT, json=HELLO)
                problem = "" if answer.status_code == 200 else describe(answer.status_code, answer.content)
            except httpx2.HTTPError as exc:
                problem = repr(exc)
            self._times.append(_ChatTime(began=began, seconds=time.monotonic() - began, problem=problem))


class AttackedServer:
    """The server under attack, as a context manager. A server that can no longer load a model is replaced."""

    def __init__(self, soak: Soak, folder: Path, models: dict[str, Path], figures: list[dict[str, str]]) -> None:
        self._folder, self._models, self._figures = folder, models, figures
        self._alone_s = QUICK_ALONE_S if soak.quick else ALONE_S
        self._starts = 0
        self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *how: object) -> None:
        self._http.close()
        self.server.kill()

    def _start(self) -> None:
        self._starts += 1
        options = ["--embedder", str(self._models[EMBEDDER]), *SMALL_CACHE]
        self.server = Server(Home(self._folder / f"s{self._starts}"), self._models[VALID], *options)
        self._http = httpx2.Client(base_url=self.server.url, timeout=TIMEOUT_S, trust_env=False)
        self._warm_up()
        self._own_before = self._memory_bytes()[0]

    def _load(self, model: str) -> None:
        loaded = self._http.post(LOAD, json={"model": str(self._models[model])})
        if loaded.status_code != 200:
            print_line(f"the server is replaced: {model} cannot be loaded: {loaded.text[:300]}")
            self.__exit__()
            self._start()
            self._http.post(LOAD, json={"model": str(self._models[model])}).raise_for_status()

    def _warm_up(self) -> None:
        """Start the processes that the server keeps. An attack may have ended them."""
        for body in (HELLO, chat_of("hi", response_format={"type": "json_object"})):
            self._http.post(CHAT, json=body).raise_for_status()

    def _memory_bytes(self) -> tuple[int, int]:
        """Return the resident memory of the server, and that of its processes."""
        main = psutil.Process(self.server.pid)
        processes = 0
        for process in main.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                processes += process.memory_info().rss
        return main.memory_info().rss, processes

    def run(self, name: str, attacks: Sequence[Attack], model: str) -> Row:
        """Run attacks at once. Records the answers, and the effects on health requests, chats and memory."""
        row = Row(part=f"hostile: {name}")
        self._load(model)
        self._warm_up()
        with Probe(self.server.url, "/healthz") as probe, _OtherClient(self.server.url) as client:
            client.since(time.monotonic())
            began = time.monotonic()
            time.sleep(self._alone_s)
            chats_alone, health_alone = client.since(began), probe.seconds(began)
            # Some models need a process for their tokenizer, so the processes are compared with those of this model.
            before = self._own_before + self._memory_bytes()[1]
            began = time.monotonic()
            answers = together([partial(attack.send, self.server.url) for attack in attacks])
            took_s = time.monotonic() - began
            time.sleep(AFTER_S)
            chats, health = client.since(began), probe.seconds(began)
        for attack, each in zip(attacks, answers, strict=True):
            beside = replace(attack, answers=attack.answers | BUSY, limit_s=attack.limit_s + WAITS_S)
            _check_answers(attack if len(attacks) == 1 else beside, each, row)
        effects = _Effects(chats=chats, chats_alone=chats_alone, health=health, health_alone=health_alone)
        effects.check(row)
        wait_until(lambda: sum(self._memory_bytes()) <= GROWTH * before, SETTLED_S, every_s=0.2)
        after = sum(self._memory_bytes())
        row.leaked_mb = round(max(0.0, after - GROWTH * before) / 1e6, 1)
        counts = Counter(answer.text for each in answers for answer in each)
        figures = {
            "attack": name,
            "answer": ", ".join(f"{count} x {text[:60]}" for text, count in counts.most_common()),
            "answered s": f"{took_s:.2f}",
            **effects.figures(),
            "RSS MB, before": f"{after / 1e6:.0f}, {before / 1e6:.0f}",
            "result": "passed" if row.passed else "FAILED",
        }
        self._figures.append(figures)
        row.detail["figures"] = figures
        row.notes = "; ".join(f"{key}: {value}" for key, value in figures.items() if key not in ("attack", "result"))
        print_line(" | ".join(figures.values()))
        return row


@dataclass(frozen=True, kw_only=True)
class _Effects:
    """What another client measured during an attack, and before it."""

    chats: Sequence[_ChatTime]
    chats_alone: Sequence[_ChatTime]
    health: Sequence[float]
    """Durations of health requests in ascending order."""
    health_alone: Sequence[float]

    @property
    def worst_s(self) -> float:
        return max(chat.seconds for chat in self.chats)

    @property
    def alone_s(self) -> float:
        return max(chat.seconds for chat in self.chats_alone)

    def check(self, row: Row) -> None:
        failed = [chat.problem for chat in self.chats if chat.problem]
        row.lost += len(failed)
        row.wrong += [f"{count} chats of another client fail: {text}" for text, count in Counter(failed).items()]
        row.requests += len(self.chats) + len(self.chats_alone)
        row.slowest_s = self.worst_s
        if self.worst_s > CHAT_FACTOR * self.alone_s + CHAT_S:
            row.hung += 1
            row.wrong.append(f"a chat of another client took {self.worst_s:.2f} s, and {self.alone_s:.2f} s alone")
        # The time without an attack is added, because on a busy machine it alone exceeds the limit.
        if p99(self.health) > HEALTH_S + p99(self.health_alone):
            row.hung += 1
            row.wrong.append(f"p99 of health is {_ms(p99(self.health))}, and {_ms(p99(self.health_alone))} alone")

    def figures(self) -> dict[str, str]:
        return {
            "health p99": _ms(p99(self.health)),
            "worst": _ms(self.health[-1]),
            "p99 alone": _ms(p99(self.health_alone)),
            "worst chat": f"{self.worst_s:.2f} s",
            "alone": f"{self.alone_s:.2f} s",
        }


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"


def _check_answers(attack: Attack, answers: Sequence[Answer], row: Row) -> None:
    row.requests += len(answers)
    row.faults += len(answers)
    wrong: Counter[str] = Counter()
    for answer in answers:
        if answer.text not in attack.answers:
            row.lost += 1
            wrong[f"{answer.text}, not one of {', '.join(sorted(attack.answers))}"] += 1
        if answer.seconds > attack.limit_s:
            row.hung += 1
            wrong[f"{answer.text} later than {attack.limit_s:g} s"] += 1
    slowest_s = max(answer.seconds for answer in answers)
    row.wrong += [f"{attack.name}: {count} x {text} (after up to {slowest_s:.1f} s)" for text, count in wrong.items()]
