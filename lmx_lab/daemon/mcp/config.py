"""Check, change and read the configurations of MCP servers, find their programs, and hide their secrets.

``McpFailure`` is how a server with a valid configuration fails.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import ValidationError

from lmx_lab.errors import InvalidRequestError
from lmx_lab.sanitize import UNSAFE
from lmx_lab.wire.mcp import REDACTED, ChangeMcpServer, ErrorKind, McpServerConfig

INHERITED = (
    *("PATH", "HOME", "LOGNAME", "USER", "SHELL", "TERM", "TMPDIR", "TZ"),
    *("LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE"),
)
"""The variables of the daemon's environment that a server inherits. It receives no others."""
NO_RESTART = frozenset({"name", "permission"})
"""Fields that can be changed while a server runs. A change of other fields restarts it."""
SERVERS = 64
"""Maximum number of configured servers."""
_VARIABLE_NAME = re.compile(r"[^=\0]{1,256}")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,256}")
_TRANSPORTS: dict[str, Literal["stdio", "http"]] = {
    "stdio": "stdio",
    **dict.fromkeys(("http", "streamable-http", "streamableHttp", "streamable_http"), "http"),
}
_VARIABLE = re.compile(r"\$\{[^}\"]*\}")
_FIELDS = {"command", "args", "env", "cwd", "url", "headers"}
_OTHER_FIELDS = {"type", "transport", "disabled", "timeout", "alwaysAllow", "autoApprove", "description", "$schema"}
"""Fields that other programs use. They are accepted; all but ``type``, ``transport`` and ``disabled`` are ignored."""


class McpFailure(Exception):
    """A connection to an MCP server could not be opened, or has ended.

    It never leaves the daemon: it becomes the state of a server, the result of a test or the text of a call.
    """

    def __init__(self, kind: ErrorKind, message: str, *, is_final: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.is_final = is_final or kind in ("command-not-found", "invalid")
        """Whether a restart does not help, because the configuration has to be changed first."""


def check(config: McpServerConfig) -> None:
    """Refuse a configuration that can never start. Blocking.

    A program that does not exist is accepted, since it may be installed later. Starting it then fails.

    Raises:
        InvalidRequestError: The configuration is invalid. The message names the field.
    """
    if config.transport == "http":
        url = config.url or ""
        try:
            parts = urlsplit(url)
            _ = parts.port
        except ValueError as exc:
            raise InvalidRequestError(f"url is not a valid address: {exc}", param="url") from None
        has_blank = any(character.isspace() or ord(character) < 32 for character in url)
        if parts.scheme not in ("http", "https") or not parts.hostname or has_blank:
            raise InvalidRequestError(
                f"url is {url!r:.200}; it must begin with http:// or https:// and contain a host", param="url"
            )
        if parts.username is not None or parts.password is not None:
            raise InvalidRequestError(
                "url contains a user name or password, which would be displayed; use an Authorization header in "
                "headers",
                param="url",
            )
        _check_entries("headers", config.headers, _HEADER_NAME)
        return
    for field, text in (("command", config.command or ""), *(("args", arg) for arg in config.args)):
        if "\0" in text:
            raise InvalidRequestError(f"{field} contains a null character; remove it", param=field)
    if config.cwd is not None:
        try:
            is_folder = Path(config.cwd).is_dir()
        except (OSError, ValueError):
            is_folder = False
        if not is_folder:
            raise InvalidRequestError(
                f"cwd is {config.cwd!r:.200}, which is not an existing folder; create it or correct cwd", param="cwd"
            )
    _check_entries("env", config.env, _VARIABLE_NAME)
    try:
        find_program(config)
    except McpFailure as failure:
        if failure.kind == "invalid":
            raise InvalidRequestError(failure.message, param="command") from failure


def restore_secrets(config: McpServerConfig, previous: McpServerConfig | None) -> McpServerConfig:
    """Replace the redacted values of a configuration by those of the previous one.

    Raises:
        InvalidRequestError: A value is redacted, and the previous configuration has none of that name.
    """
    env, headers = (previous.env, previous.headers) if previous is not None else ({}, {})
    changes = {"env": _restore("env", config.env, env), "headers": _restore("headers", config.headers, headers)}
    return config.model_copy(update=changes)


def apply_change(config: McpServerConfig, change: ChangeMcpServer) -> McpServerConfig:
    """Return the configuration with the fields that the change contains.

    Raises:
        InvalidRequestError: The result is not a valid configuration, or has a redacted value without a previous one.
    """
    fields = {name: getattr(change, name) for name in change.model_fields_set}
    # Null leaves a field unchanged, except for cwd, which can be null.
    fields = {name: value for name, value in fields.items() if value is not None or name == "cwd"}
    try:
        changed = McpServerConfig.model_validate({**config.model_dump(), **fields})
    except ValidationError as exc:
        raise InvalidRequestError(describe_error(exc)) from None
    return restore_secrets(changed, config)


def describe_error(exc: ValidationError) -> str:
    """Return field and message of the first error, without the input, which may contain secrets."""
    error = exc.errors(include_input=False, include_url=False)[0]
    field = ".".join(map(str, error["loc"]))
    message = error["msg"].removeprefix("Value error, ")
    return f"{field}: {message}" if field else message


def _restore(field: str, values: dict[str, str], previous: dict[str, str]) -> dict[str, str]:
    for name, value in values.items():
        if value == REDACTED and name not in previous:
            raise InvalidRequestError(
                f"{field} has {REDACTED!r} for {name!r:.80}, which keeps the previous value, but there is none; send "
                "the value",
                param=field,
            )
    return {name: previous[name] if value == REDACTED else value for name, value in values.items()}


def _check_entries(field: str, values: dict[str, str], names: re.Pattern[str]) -> None:
    if len(values) > (limit := 256):
        raise InvalidRequestError(f"{field} has {len(values)} entries, the limit is {limit}", param=field)
    for name, value in values.items():
        if not names.fullmatch(name):
            raise InvalidRequestError(f"{field} has the invalid name {name!r:.80}; correct it", param=field)
        forbidden = "\0" if field == "env" else "\0\r\n"
        if len(value) > 32_768 or any(character in value for character in forbidden):
            raise InvalidRequestError(
                f"the value of {name!r:.80} in {field} contains a line break or null character, or has more than "
                "32,768 characters; correct it",
                param=field,
            )
        if field == "headers" and not value.isascii():
            raise InvalidRequestError(
                f"the value of {name!r:.80} in headers contains characters that are not ASCII; encode it", param=field
            )


# The program


def environment(config: McpServerConfig) -> dict[str, str]:
    """Return the environment of a server's process."""
    inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
    return {"PATH": os.defpath, **inherited, **config.env}


def find_program(config: McpServerConfig) -> str:
    """Return the path of a server's program. Blocking.

    Raises:
        McpFailure: The program was not found or is not executable.
    """
    command = config.command or ""
    if os.sep in command:
        path = Path(config.cwd or ".", command)
        if not os.path.exists(path):  # Path.exists would raise if a name is too long.
            raise McpFailure(
                "command-not-found", f"the file {command!r:.200} does not exist; check the path in command"
            )
        if path.is_dir() or not os.access(path, os.X_OK):
            raise McpFailure("invalid", f"{command!r:.200} is not an executable program; check command")
        return str(path.absolute())
    search_path = environment(config)["PATH"]
    # A kernel's PATH often lacks the folder with the programs of its own environment.
    own_programs = os.path.dirname(sys.executable)
    if (program := shutil.which(command, path=f"{search_path}{os.pathsep}{own_programs}")) is None:
        searched = one_line(SecretRedactor.of(config).redact(search_path))
        raise McpFailure(
            "command-not-found",
            f"the program {command!r:.200} was not found in PATH, {searched!r}; install it, use its full path as "
            "command, or set PATH in env",
        )
    return program


# A project's .mcp.json


def read_mcp_file(path: Path) -> list[McpServerConfig]:
    """Return the servers that a ``.mcp.json`` lists. Their ``cwd`` is the folder of the file by default.

    Raises:
        InvalidRequestError: The file cannot be read or is invalid. The message names the server and the field.
    """
    limit_bytes = 2**20
    try:
        with path.open("rb") as file:
            data = file.read(limit_bytes + 1)
    except OSError as exc:
        raise InvalidRequestError(f"{path} cannot be read: {exc.strerror or exc}") from exc
    if len(data) > limit_bytes:
        raise InvalidRequestError(f"{path} has more than {limit_bytes:,} bytes, so it is not a list of MCP servers")
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise InvalidRequestError(f"{path} is not valid JSON: {exc}") from exc
    servers = content.get("mcpServers", content.get("servers")) if isinstance(content, dict) else None
    if not isinstance(servers, dict):
        raise InvalidRequestError(f'{path} has no object "mcpServers" with servers by name')
    if len(servers) > SERVERS:
        raise InvalidRequestError(f"{path} has {len(servers)} servers, the limit is {SERVERS}")
    return [_server_config(path, name, entry) for name, entry in servers.items()]


def _server_config(path: Path, name: str, entry: Any) -> McpServerConfig:
    where = f"{path}, server {name!r:.80}"
    if not isinstance(entry, dict):
        raise InvalidRequestError(f'{where}: must be an object with "command" or "url"')
    if unknown := sorted(set(entry) - _FIELDS - _OTHER_FIELDS):
        raise InvalidRequestError(
            f"{where}: unknown field {unknown[0]!r:.80}; the fields are {', '.join(sorted(_FIELDS))}"
        )
    transport = entry.get("type", entry.get("transport", "http" if "url" in entry else "stdio"))
    if not isinstance(transport, str) or transport not in _TRANSPORTS:
        raise InvalidRequestError(f"{where}: type is {transport!r:.80}; use stdio or http (SSE is not supported)")
    if variable := _VARIABLE.search(json.dumps(entry)):
        # Substituting it would give a value from this computer to the author of the file.
        raise InvalidRequestError(f"{where}: the variable {variable[0]:.80} is not substituted; write the value itself")
    fields = {field: entry[field] for field in _FIELDS & set(entry)}
    if _TRANSPORTS[transport] == "stdio":
        folder = fields.get("cwd", ".")
        fields["cwd"] = str(path.parent.absolute() / folder) if isinstance(folder, str) else folder
    # Keep only the characters that the daemon accepts, because projects also use spaces and dots.
    cleaned = re.sub(r"[-_]{2,}", "-", re.sub(r"[^A-Za-z0-9_-]", "-", name)).strip("-_")[:32].rstrip("-_")
    try:
        return McpServerConfig(
            name=cleaned,
            transport=_TRANSPORTS[transport],
            enabled=not entry.get("disabled", False),
            **fields,
        )
    except ValidationError as exc:
        raise InvalidRequestError(f"{where}: {describe_error(exc)}") from None
    except TypeError as exc:
        raise InvalidRequestError(f"{where}: {exc}") from None


# Text that is safe to display


class SecretRedactor:
    """Replaces secrets in text: the values of ``env`` and ``headers`` of a configuration. Its ``repr`` shows none."""

    def __init__(self, values: Iterable[str]) -> None:
        secrets: set[str] = set()
        for value in values:
            secrets |= {part.strip() for part in (value, *value.splitlines())}
            scheme, _, credentials = value.partition(" ")
            if scheme.lower() in ("bearer", "basic", "token"):
                # The value of an Authorization header.
                secrets.add(credentials.strip())
        # Longest first, because a secret can be a part of another one. Values of up to three characters are not
        # redacted, since they occur in much text that is not secret.
        self._secrets = sorted((secret for secret in secrets if len(secret) > 3), key=len, reverse=True)
        self._longest_bytes = max((len(secret.encode()) for secret in self._secrets), default=0)

    @classmethod
    def of(cls, config: McpServerConfig) -> Self:
        """Return a redactor of the secrets in a configuration."""
        return cls([*config.env.values(), *config.headers.values()])

    def redact(self, text: str) -> str:
        """Replace each secret in the text by ``***``."""
        for secret in self._secrets:
            text = text.replace(secret, REDACTED)
        return text

    def redact_bytes(self, data: bytes) -> bytes:
        """Replace each secret in text that is not decoded yet."""
        for secret in self._secrets:
            data = data.replace(secret.encode(), REDACTED.encode())
        return data

    def redact_tail(self, text: str) -> str:
        """Replace each secret in a text whose beginning was cut off.

        The first characters are removed, since they may be the end of a secret that was cut in two.
        """
        return self.redact(text)[self._longest_bytes :]


def last_lines(text: str) -> str:
    """Return the last lines of a text, at most 50 lines and 16 KiB, without control characters and with long lines cut.

    Empty lines are omitted.
    """
    limit_bytes = 16_384
    text = _replace_unprintable(text)[-limit_bytes:]
    lines = [line[:2000] for line in text.split("\n") if line.strip()]
    # Cut again as bytes, because a character can take more than one.
    return "\n".join(lines[-50:]).encode()[-limit_bytes:].decode("utf-8", "ignore")


def one_line(text: str, limit: int = 300) -> str:
    """Return a text as one line of at most ``limit`` characters, for use in a sentence."""
    return " ".join(_replace_unprintable(text[: 4 * limit]).split())[:limit]


def _replace_unprintable(text: str) -> str:
    return UNSAFE.sub("\ufffd", text.replace("\r\n", "\n").replace("\r", "\n"))
