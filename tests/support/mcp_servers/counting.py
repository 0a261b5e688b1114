"""An MCP server without the package ``mcp``, which starts quickly. Its tool records each call before it answers.

python counting.py FILE SECONDS [stubborn]

A stubborn server ignores SIGTERM and the end of its input, and has a child outside its session that does too.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

TOOL = {
    "name": "count",
    "description": "Writes its note down.",
    "inputSchema": {"type": "object", "properties": {"note": {"type": "string"}}, "required": ["note"]},
}


def answer(request: dict[str, Any], file: Path, pause_s: float) -> dict[str, Any] | None:
    match request["method"]:
        case "initialize":
            version = request["params"]["protocolVersion"]
            return {
                "protocolVersion": version,
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "counting", "version": "1"},
            }
        case "tools/list":
            return {"tools": [TOOL]}
        case "tools/call":
            with file.open("a", encoding="utf-8") as notes:
                notes.write(request["params"]["arguments"]["note"] + "\n")
            time.sleep(pause_s)
            return {"content": [{"type": "text", "text": "noted"}]}
    return None


def start_child() -> None:
    """Start a process without a parent, in a session of its own, that runs for a minute and ignores SIGTERM."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor in range(3):
                os.dup2(null, descriptor)
            time.sleep(60)
        os._exit(0)


def main() -> None:
    is_stubborn = "stubborn" in sys.argv[3:]
    if is_stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        start_child()
    file, pause_s = Path(sys.argv[1]), float(sys.argv[2])
    for line in sys.stdin:
        request = json.loads(line)
        if "id" not in request:
            continue
        result = answer(request, file, pause_s)
        reply = {"result": result} if result is not None else {"error": {"code": -32601, "message": "no such method"}}
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **reply}), flush=True)
    if is_stubborn:
        time.sleep(60)


if __name__ == "__main__":
    main()
