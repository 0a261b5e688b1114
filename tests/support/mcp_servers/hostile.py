"""An MCP server that misbehaves on request: at its start by its arguments, in a call by the tool's name.

Written without large imports, so that it starts in milliseconds: ``python -I hostile.py MODE...``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

MEGABYTE = 2**20
CACHING = {"resultType": "complete", "ttlMs": 0, "cacheScope": "public"}
"""Fields of answers in the protocol of 2026."""
TOOLS = [
    *("echo", "progress", "secrets", "fail", "structured", "image", "deaf", "die", "close", "flood", "long_line"),
    *("bad_utf8", "garbage", "noisy_error", "grow", "pid", "family", "hang_up", "two_answers", "not_an_object"),
]
SLEEPER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
extra: list[str] = []


def send(message: object) -> None:
    write(json.dumps(message).encode() + b"\n")


def write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def answer(request: dict, result: object) -> None:
    send({"jsonrpc": "2.0", "id": request["id"], "result": result})


def text(request: dict, content: str, *, is_error: bool = False) -> None:
    caching = {"resultType": "complete"} if "modern" in MODES else {}
    answer(request, {"content": [{"type": "text", "text": content}], "isError": is_error, **caching})


def tool(name: str) -> dict:
    schema = {"type": "object", "properties": {"text": {"type": "string"}}}
    return {
        "name": name,
        "description": f"Does {name}.",
        "inputSchema": schema,
        "annotations": {"readOnlyHint": name == "echo"},
    }


def list_tools(request: dict) -> None:
    """List the tools in pages of ten."""
    if "endless" in MODES:
        answer(request, {"tools": [tool(f"tool{i}-{request['id']}") for i in range(10)], "nextCursor": "again"})
        return
    names = TOOLS + extra
    start = int((request.get("params") or {}).get("cursor", "0"))
    more: dict = {"nextCursor": str(start + 10)} if start + 10 < len(names) else {}
    caching = CACHING if "modern" in MODES else {}
    answer(request, {"tools": [tool(name) for name in names[start : start + 10]], **more, **caching})


def spawn(*, leave: bool) -> int:
    """Start a grandchild that ignores SIGTERM. One that leaves has a session of its own and no parent."""
    if not leave:
        return subprocess.Popen([sys.executable, "-I", "-c", SLEEPER], stdin=subprocess.DEVNULL).pid
    nowhere = "stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL"
    command = f"[sys.executable, '-I', '-c', {SLEEPER!r}], start_new_session=True, {nowhere}"
    starter = f"import subprocess, sys; print(subprocess.Popen({command}).pid)"
    return int(subprocess.run([sys.executable, "-I", "-c", starter], capture_output=True, check=True).stdout)


def call(request: dict) -> None:  # noqa: PLR0912, PLR0915
    params = request["params"]
    name, arguments = params["name"], params.get("arguments") or {}
    token = (params.get("_meta") or {}).get("progressToken")
    match name:
        case "echo":
            text(request, arguments.get("text", ""))
        case "progress":
            note = {"progressToken": token, "progress": 1, "total": 2, "message": "half\x1b[31m way"}
            send({"jsonrpc": "2.0", "method": "notifications/progress", "params": note})
            text(request, "done")
        case "secrets":
            print(f"key is {os.environ['API_KEY']}", file=sys.stderr, flush=True)
            text(request, json.dumps(sorted(os.environ)))
        case "fail":
            text(request, "it went wrong", is_error=True)
        case "structured":
            answer(request, {"content": [], "structuredContent": {"answer": 42}})
        case "image":
            image = {"type": "image", "data": "QUJD" * 1000, "mimeType": "image/png"}
            answer(request, {"content": [{"type": "text", "text": "look:"}, image]})
        case "deaf":
            print("deaf begun", file=sys.stderr, flush=True)
        case "die":
            print("I have had enough", file=sys.stderr, flush=True)
            os._exit(3)
        case "close":
            os.close(1)
        case "flood":
            for _ in range(100):
                write(b"x" * (MEGABYTE - 1) + b"\n")
                sys.stderr.write("e" * 1000 + "\n")
            text(request, "after the flood")
        case "long_line":
            write(b'{"jsonrpc": "2.0", "id": 1, "result": "')
            for _ in range(50):
                write(b"x" * MEGABYTE)
            write(b'"}\n')
        case "bad_utf8":
            write(
                b'{"jsonrpc": "2.0", "id": %d, "result": {"content": [{"type": "text", "text": "\xff\xfe"}]}}\n'
                % request["id"]
            )
        case "garbage":
            write(b"this is no message\n{\n\x00\x01\n[]\n42\n\n")
            text(request, "after garbage")
        case "not_an_object":
            answer(request, {"content": "no list"})
        case "two_answers":
            text(request, "first")
            text(request, "second")
        case "noisy_error":
            error = {"code": -32603, "message": f"no {os.environ.get('API_KEY')} \x1b[2J"}
            send({"jsonrpc": "2.0", "id": request["id"], "error": error})
        case "grow":
            extra.append("grown tool/ü")
            send({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"})
            text(request, "grown")
        case "pid":
            text(request, str(os.getpid()))
        case "family":
            text(request, json.dumps([spawn(leave=False), spawn(leave=True)]))
        case "hang_up":
            os.close(0)
            text(request, "hung up")


def handle(request: dict) -> None:
    match request.get("method"):
        case "initialize" if "modern" in MODES and "newer" not in MODES:
            data = {"supported": ["2026-07-28"], "requested": "2025-11-25"}
            error = {"code": -32022, "message": "too old", "data": data}
            send({"jsonrpc": "2.0", "id": request["id"], "error": error})
        case "server/discover" if "modern" in MODES:
            answer(request, {"supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}}, **CACHING})
        case "initialize":
            version = "2026-07-28" if "newer" in MODES else request["params"]["protocolVersion"]
            info = {"name": "hostile", "version": "0"}
            answer(request, {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info})
        case "tools/list":
            list_tools(request)
        case "tools/call":
            call(request)
        case "notifications/cancelled":
            print("was cancelled", file=sys.stderr, flush=True)


def babble() -> None:
    while True:
        write(b"blah blah\n" * 1000)


def start() -> None:
    if "ignore_term" in MODES:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "prints" in MODES:
        print("Welcome to the server!", flush=True)
    if "exits" in MODES:
        print("no license", file=sys.stderr, flush=True)
        sys.exit(4)
    if "mute" in MODES:
        time.sleep(600)
    if "babble" in MODES:
        babble()
    if "floods_stderr" in MODES:
        for _ in range(100):
            sys.stderr.write("e" * MEGABYTE)
        print("flooded", file=sys.stderr, flush=True)


MODES = sys.argv[1:]
if __name__ == "__main__":
    start()
    for line in sys.stdin:
        if "late_babble" in MODES and '"tools/call"' in line:
            babble()
        handle(json.loads(line))
    if "ignore_term" in MODES:
        # Nothing reads the output of a server whose daemon was killed.
        with contextlib.suppress(OSError):
            print("end of input", file=sys.stderr, flush=True)
        time.sleep(600)
