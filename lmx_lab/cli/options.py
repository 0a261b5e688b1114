"""Parse command-line options: help texts, errors in one line, and options and checks that several commands share.

By default, typer reports a mistake in a box of several lines. In the help, it shows ``<bool>`` for a switch, which
takes no value, and ``<list[str]>`` for an option that can be repeated. Its tables for rich have six columns, which
leaves 18 characters for the texts on a terminal of 80, so the help is plain text in two columns.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from lmx_lab.cli.completion import complete_model
from lmx_lab.cli.terminal import print_note
from lmx_lab.errors import InvalidRequestError
from lmx_lab.sanitize import single_line
from lmx_lab.settings import Settings
from lmx_lab.values.models import EngineChoice, KvCacheDtype

if TYPE_CHECKING:
    from lmx_lab.client import DaemonClient

NUMBERS = {"int_parsing": "a whole number", "int_parsing_size": "a smaller number", "float_parsing": "a number"}
"""The expected value of an option, by the type of pydantic's error."""
USUAL_NUMBER = re.compile(r"[0-9]{1,9}")
OTHER_COMMANDS = {
    "run": "chat -m MODEL",
    "list": "models",
    "ls": "models",
    "download": "pull",
    "show": "plan",
    "start": "serve",
    "delete": "rm",
    "remove": "rm",
}
"""Names of commands in other programs, with the ones here."""
STATUS = "0 on success, 1 on failure, 2 if an argument or a setting is not valid, 130 after Ctrl-C"


def epilog(*examples: str, needs: str = "", status: str = STATUS) -> str:
    """Return the text below a command's options: what the command needs, examples, and its exit statuses."""
    # Lines of a paragraph that begins with this character are not joined.
    lines = [f"Needs {needs}.\n"] if needs else []
    lines += ["\b\nExamples:", *(f"  {example}" for example in examples), f"\nExit status: {status}."]
    return "\n".join(lines)


# Parsing


class Command(TyperCommand):
    """A command whose help shows options in the way they are typed, in sections."""

    sections: ClassVar[Mapping[str, Sequence[str]]] = {}
    """The parameters of each section. Others are in the section ``Options``."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _adapted(super().get_params(ctx), ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        section_of = {name: title for title, names in self.sections.items() for name in names}
        found: dict[str, list[Any]] = {title: [] for title in ("Arguments", *self.sections, "Options")}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is None:
                continue
            if isinstance(param, TyperOption):
                found[section_of.get(param.name, "Options")].append(record)
            else:
                # An argument is shown without its type.
                found["Arguments"].append((param.name, record[1]))
        for title, rows in found.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.TyperException as exc:
            # If the value of an option is missing, the parser's error does not refer to the command.
            if getattr(exc, "ctx", None) is None:
                exc.ctx = ctx  # type: ignore[attr-defined]
            raise


class CommandGroup(TyperGroup):
    """All commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _adapted(super().get_params(ctx), ctx)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        # typer would cut each text to one line.
        with formatter.section("Commands"):
            formatter.write_dl([(name, each.get_short_help_str(400)) for name, each in self.commands.items()])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if (other := OTHER_COMMANDS.get(args[0])) is not None:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {f'{ctx.command_path} {other}'!r}?")
        return super().resolve_command(ctx, args)

    def main(self, *args: Any, **named: Any) -> Any:
        """Run the command that the arguments name, and end with ``SystemExit``.

        Raises:
            InvalidRequestError: a command, an option or a value is not valid; the message is one line with the next
                step.
        """
        try:
            sys.exit(super().main(*args, **{**named, "standalone_mode": False}))
        except typer.TyperException as exc:
            if not (text := exc.format_message()) or "\n" in text:
                # There were no arguments, and the text is the help.
                print(text)
                sys.exit(exc.exit_code)
            message = exc.format_message().rstrip(".")
            mistakes = getattr(exc.__cause__, "errors", None)
            # For invalid numbers, typer's message does not contain the given value.
            if isinstance(exc, typer.BadParameter) and exc.param is not None and mistakes is not None:
                first = mistakes()[0]
                if (expected := NUMBERS.get(first["type"])) is not None:
                    message = f"{exc.param.opts[0]} is {first['input']!r:.80}; it must be {expected}"
            message = single_line(message[:1].lower() + message[1:], most=400)
            end = "" if message.endswith(("?", "…")) else "."
            ctx: typer.Context | None = getattr(exc, "ctx", None)
            raise InvalidRequestError(f"{message}{end} See {ctx.command_path if ctx else 'lmx-lab'} --help") from None


def _adapted(params: list[Any], ctx: Any) -> list[Any]:
    """Let the help show how options are typed, and convert only values that have to be converted."""
    for param in params:
        if isinstance(param, TyperOption) and param.metavar is None:
            param.metavar = "" if param.is_flag else re.sub(r"list\[(\w+)\]", r"\1", param.display_type(ctx)).lower()
            param.process_value = functools.partial(_process_value, param)  # type: ignore[method-assign]
    return params


def _process_value(option: TyperOption, ctx: Any, value: Any) -> Any:
    """Convert the value of an option as typer does.

    For every option, typer imports pydantic and builds a schema, which takes most of the time of parsing. Values that
    are not given, texts and usual whole numbers need no schema.
    """
    kind = option.type_descriptor.annotation
    if type(value) is str and kind is int and not option.type_descriptor.is_ranged and USUAL_NUMBER.fullmatch(value):
        value = int(value)
    elif option.required or not (value is None or (type(value) is str and kind is str)):
        return TyperOption.process_value(option, ctx, value)
    elif value is None and option.multiple:
        value = ()
    return value if option.callback is None else option.callback(ctx, option, value)


# Servers


def check_host(host: str | None) -> None:
    """Check the value of ``--host``. For a URL or an address with a port, the system's own error would only state that
    the name is unknown.

    Raises:
        InvalidRequestError: the value is not an address without a port.
    """
    if host is not None and (re.search(r"[\s/]", host) or host.count(":") == 1):
        raise InvalidRequestError(
            f"--host is {host!r:.80}; give an address of this machine without a port, such as 127.0.0.1 or 0.0.0.0, "
            "and the port with --port",
            param="host",
        )


def settings_with_folders(**overrides: Any) -> Settings:
    """Read the settings for a command that looks for models, and check that additional folders with models exist.

    The lab's own folder is not checked, because it is created when it is needed.

    Raises:
        InvalidRequestError: a setting is not valid, or a folder does not exist.
    """
    settings = Settings.read(**overrides)
    for folder in settings.model_folders:
        if not os.path.isdir(folder):
            raise InvalidRequestError(
                f"model_folders: {folder} is not a folder that can be read; create it, or change --models or "
                "LMX_LAB_MODEL_FOLDERS",
                param="model_folders",
            )
    return settings


# Loads

LOAD_OPTIONS: Mapping[str, Any] = {
    "engine": Annotated[
        EngineChoice | None,
        typer.Option("--engine", help="Engine that must run the model. By default the fastest one that can."),
    ],
    "context_length": Annotated[
        int | None,
        typer.Option(min=1, help="Maximum tokens of a request, prompt and answer. By default as memory allows."),
    ],
    "deterministic": Annotated[
        bool | None,
        typer.Option("--deterministic", help="Compute answers that do not depend on other requests; llama.cpp only."),
    ],
    "prompt_lookup": Annotated[
        bool | None,
        typer.Option(
            "--prompt-lookup/--no-prompt-lookup",
            help="Decode answers that repeat earlier text several tokens at a time. By default only on MLX.",
        ),
    ],
    "kv_cache_dtype": Annotated[
        KvCacheDtype | None,
        typer.Option("--kv-cache-dtype", help="Quantize the KV cache, for a longer context; llama.cpp only."),
    ],
    "draft": Annotated[
        str | None,
        typer.Option(
            help="Smaller model with the same vocabulary, which drafts tokens.", autocompletion=complete_model
        ),
    ],
}
"""The options of a load that commands have, by the fields of ``LoadSpec``."""


def with_load_options(function: Callable[..., None]) -> Callable[..., None]:
    """Let a command have ``LOAD_OPTIONS`` after its parameter ``model``. The function gets those that were given as
    ``options``.
    """
    signature = inspect.signature(function, eval_str=True)
    parameters = [each for each in signature.parameters.values() if each.name != "options"]
    at = 1 + next(at for at, each in enumerate(parameters) if each.name == "model")
    kind = inspect.Parameter.KEYWORD_ONLY
    added = [inspect.Parameter(name, kind, default=None, annotation=each) for name, each in LOAD_OPTIONS.items()]

    @functools.wraps(function)
    def command(**given: Any) -> None:
        options = {name: value for name in LOAD_OPTIONS if (value := given.pop(name)) is not None}
        function(**given, options=options)

    shown = signature.replace(parameters=[*parameters[:at], *added, *parameters[at:]])
    command.__signature__ = shown  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in shown.parameters.values()}
    return command


# The daemon that a command connects to

TOKEN = "LMX_LAB_DAEMON_TOKEN"
NEEDS_DAEMON = "a daemon: lmx-lab daemon, or launch(daemon=True) in a notebook"
DaemonUrl = Annotated[str | None, typer.Option("--url", help="Address of another daemon. By default this user's own.")]
DaemonToken = Annotated[
    str | None,
    typer.Option(
        "--token",
        envvar=TOKEN,
        show_envvar=True,
        help="Token of the daemon at --url. Other users can read arguments, so prefer the variable.",
    ),
]


def daemon_client(url: str | None, token: str | None) -> DaemonClient:
    """Return a client of the daemon at ``url``, by default of this user's own daemon.

    Raises:
        LabError: no daemon of this user is running, or only one of address and token was given.
    """
    if url is None and token is not None:
        if token != os.environ.get(TOKEN):
            raise InvalidRequestError(
                "--token is for the daemon at --url; give --url as well, or omit --token, because the token of this "
                "user's own daemon is read from its state file",
                param="token",
            )
        print_note(
            f"{TOKEN} is not used: without --url, the command connects to this user's own daemon, whose token is read "
            "from its state file"
        )
    if url is not None and token is None:
        raise InvalidRequestError(f"--url needs the daemon's token: set {TOKEN}", param="token")
    from lmx_lab.client import DaemonClient

    return DaemonClient.discover() if url is None else DaemonClient(url, token=token or "")
