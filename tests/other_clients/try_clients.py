"""Run the code of ``docs/clients.md`` for clients that have an environment of their own: ``make clients``.

``python -m tests.other_clients.try_clients FOLDER`` starts a server with the starter models, runs each section's code
with the Python of its environment in ``FOLDER``, and prints the output. The AI SDK is run if ``FOLDER/agents`` has its
packages. LangChain's own tests of a chat model run against the same server if they depend on the model. The others run
on the echo engine, as do aider and the tool loops of LiteLLM, whose answers are scripted. The exit status is 1 if a
section does not print what is expected, or a test fails. With the environment variable ``RECORD``, the requests of the
clients are stored in this folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.other_clients.clients_page import run_section, serve_arguments
from tests.other_clients.request_recorder import recording
from tests.support.commands import Serving, serving
from tests.support.docs import ROOT

EXPECTED: Mapping[str, tuple[str, str, Sequence[str]]] = {
    "anthropic-python": ("clients", "anthropic", ("Paris", "end_turn", "tokens")),
    "ollama-python": (
        "clients",
        "ollama",
        ("Paris", " stop", "name='", "4 tokens", "2 vectors", "smollm2-135m:latest"),
    ),
    "LangChain": (
        "clients",
        "langchain-openai",
        ("Paris", "name='", "City ['inhabitants', 'name']", "384 numbers", "from ChatAnthropic", "from ChatOllama"),
    ),
    "LlamaIndex": ("clients", "llama-index-llms-openai-like", ("Paris", "name='", "384 numbers")),
    "DSPy": ("clients", "dspy", ("Paris", "city=")),
    "pydantic-ai": ("clients", "pydantic-ai-slim", ("Paris", "City(name='")),
    "llm": ("clients", "llm", ("Paris", '"inhabitants"')),
    "LiteLLM": (
        "clients",
        "litellm",
        (
            "Paris",
            "2 vectors of 384 numbers",
            "from ollama_chat City(name='",
            "anthropic called describe",
            "infinity Sea water is salty.",
        ),
    ),
    "smolagents": ("clients", "smolagents", ("Paris", "City(name='", "['population', 'population']")),
    "instructor": ("clients", "instructor", ("JSON_SCHEMA City(name='", "TOOLS City(name='")),
    "Haystack": ("clients", "haystack-ai", ("City(name='", "[('population', '2,100,000')]", "384 numbers")),
    "OpenAI Agents SDK": (
        "openai3",
        "openai-agents",
        ("tool_call_item tool_call_output_item message_output_item", "City(name='"),
    ),
    "Semantic Kernel": ("openai3", "semantic-kernel", ("City(name='", "called with", "answer:", "2 vectors of 384")),
}
"""The environment of each section, the package of its client, and texts that the output must contain."""
AIDER_ANSWER = "The sum is wrong.\n\nadd.py\n```\ndef add(a, b):\n    return a + b\n```\n"
"""Answer to aider, which needs a better model than the starter."""
JOKE = '{"setup": "Where do cats sit?", "punchline": "On the mat."}'
CITY = {"name": "population", "arguments": {"city": "Paris"}}
LARGE = "2,100,000 people."
SCRIPT = (
    AIDER_ANSWER,
    *({"tool_calls": [CITY]}, LARGE) * 2,
    # The provider ``ollama`` describes the tools in its prompt, and always requires JSON.
    *(json.dumps(CITY), json.dumps({"answer": LARGE})) * 2,
    *({"tool_calls": [CITY]}, LARGE) * 2,
    *[JOKE] * 4,
    *({"tool_calls": [{"name": "get_weather", "arguments": {"location": "San Francisco"}}]}, "It is sunny.") * 2,
)
"""Answers of the echo engine to aider, to the tool loops of LiteLLM, and to the scripted tests of LangChain."""
LANGCHAIN_ON_STARTER = "test_tool or test_bind or test_unicode"
LANGCHAIN_SCRIPTED = "test_json_mode or test_agent_loop"
HERE = Path(__file__).parent


def main(folder: Path) -> int:
    home = Path(os.environ.get("LMX_LAB_TEST_HOME", ROOT / ".cache" / "test-home")).absolute()
    failed, has_npm = 0, (folder / "agents" / "installed").exists()
    with serving(home, *serve_arguments(None), "--port", "0") as server:
        for title, (environment, package, texts) in EXPECTED.items():
            failed += not _try_section(title, package, texts, server, folder / environment / "bin")
        failed += not _run_langchain_tests(LANGCHAIN_ON_STARTER, server, folder / "clients" / "bin")
        failed += has_npm and not _try_ai_sdk(server, folder / "agents")
    with tempfile.TemporaryDirectory(prefix="lmx-lab-clients-") as place:
        script = Path(place) / "script.jsonl"
        script.write_text(json.dumps(SCRIPT))
        before = ("env", f"LMX_LAB_ECHO_SCRIPT={script}")
        with serving(Path(place), "--model", "echo", "--port", "0", before=before) as server:
            failed += not _try_section("aider", "aider-chat", ("return a + b",), server, folder / "aider" / "bin")
            programs = folder / "clients" / "bin"
            failed += not _run_litellm_tool_loop(server, programs)
            failed += not _run_langchain_tests(LANGCHAIN_SCRIPTED, server, programs)
            rest = f"not ({LANGCHAIN_ON_STARTER} or {LANGCHAIN_SCRIPTED})"
            failed += not _run_langchain_tests(rest, server, programs)
    count = len(EXPECTED) + 5 + has_npm
    print(f"{count - failed} of {count} clients work as docs/clients.md shows")
    return int(failed > 0)


def _try_section(title: str, package: str, texts: Sequence[str], server: Serving, programs: Path) -> bool:
    """Run a section, print the result, and return whether the section works."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    version = subprocess.run([programs / "python", "-c", code], capture_output=True, text=True, check=True).stdout
    client = f"{title} {version.strip()}"
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="lmx-lab-clients-"))
        port = server.port
        if record := os.environ.get("RECORD"):
            port = stack.enter_context(recording(client, Path(record), port))
        try:
            addresses = {"127.0.0.1:8400": f"127.0.0.1:{port}"}
            output = run_section(title, addresses, Path(folder), programs=programs)
            missing = [text for text in texts if text not in output]
            problem = f"does not print {', '.join(missing)}" if missing else ""
        except AssertionError as exc:
            problem, output = "fails", str(exc)
    print(f"\n--- {client}: {problem or 'works'}\n{output}", flush=True)
    return not problem


def _try_ai_sdk(server: Serving, npm: Path) -> bool:
    with tempfile.TemporaryDirectory(prefix="lmx-lab-clients-") as folder:
        (Path(folder) / "node_modules").symlink_to(npm / "node_modules")
        try:
            output = run_section("AI SDK", {"127.0.0.1:8400": f"127.0.0.1:{server.port}"}, Path(folder))
            works = all(text in output for text in ("Paris", "parsed [ 'name', 'inhabitants' ]", "2 steps, 2,100,000"))
        except AssertionError as exc:
            works, output = False, str(exc)
    print(f"\n--- AI SDK: {'works' if works else 'fails'}\n{output}", flush=True)
    return works


def _run_litellm_tool_loop(server: Serving, programs: Path) -> bool:
    print("\n--- LiteLLM, tool loops of ollama, ollama_chat and cohere", flush=True)
    environ = {**os.environ, "LAB": f"http://127.0.0.1:{server.port}"}
    command = [programs / "python", HERE / "litellm_tool_loop.py"]
    output = subprocess.run(command, env=environ, check=False, stdout=subprocess.PIPE, text=True).stdout
    print(output)
    return output.count('population {"city": "Paris"}') == output.count(LARGE) == 6


def _run_langchain_tests(selected: str, server: Serving, programs: Path) -> bool:
    print(f"\n--- langchain-tests: {selected}", flush=True)
    with tempfile.TemporaryDirectory(prefix="lmx-lab-clients-") as folder:
        # A copy, because pytest would import the fixtures of this project, which is not installed there.
        tests = shutil.copy(HERE / "langchain_chat_model.py", Path(folder) / "test_lab.py")
        # One event loop, because LangChain keeps the connections of a client for all tests.
        options = ["-q", "-o", "asyncio_mode=auto", "-o", "asyncio_default_test_loop_scope=session", "-k", selected]
        command = [programs / "python", "-m", "pytest", *options, tests]
        environ = {**os.environ, "LAB": f"http://127.0.0.1:{server.port}/v1"}
        return subprocess.run(command, cwd=folder, env=environ, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute()))
