"""An MCP server with one tool, whose result contains a picture. It starts quickly, because it needs no package.

``python picture_server.py NAME FILE`` offers the tool ``NAME`` and appends the name of each called tool to ``FILE``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PICTURE = "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAEklEQVR4nGP4z8CAFWEXHbQSACj/P8Fu7N9hAAAAAElFTkSuQmCC"
"""A red square of 8 by 8 pixels, as PNG in base64."""


def answer(request: dict[str, Any], name: str, file: Path) -> dict[str, Any]:
    match request["method"]:
        case "initialize":
            return {
                "protocolVersion": request["params"]["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "pictures", "version": "1"},
            }
        case "tools/list":
            schema = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
            return {"tools": [{"name": name, "description": "Paints a picture.", "inputSchema": schema}]}
        case "tools/call":
            with file.open("a", encoding="utf-8") as calls:
                calls.write(f"{request['params']['name']}\n")
            image = {"type": "image", "data": PICTURE, "mimeType": "image/png"}
            return {"content": [{"type": "text", "text": "painted"}, image]}
    return {}


def main(name: str, file: Path) -> None:
    for line in sys.stdin:
        request = json.loads(line)
        # Notifications have no id.
        if "id" in request:
            result = answer(request, name, file)
            print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
