"""Convert texts and chats to tokens with the process of a model, and check what llama.cpp does not support.

Chat templates are rendered in the sandbox, and never in the process of the model, where an endless one could be stopped
only by ending the process with all other requests.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import functools
import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from types import ModuleType
from typing import Any

from llguidance import LLMatcher
from tokenizers import AddedToken

from lmx_lab.engine.grammar.worker import TokenTable
from lmx_lab.engine.llama_cpp.completion import AnswerReader, LlamaGeneration, TokenIndex
from lmx_lab.engine.llama_cpp.connection import LlamaConnection, RefusedError
from lmx_lab.engine.llama_cpp.grammar import GrammarChecker, read_token_table
from lmx_lab.engine.llama_cpp.process import LlamaProcess
from lmx_lab.engine.preparer import ends_answer, render_chat_template
from lmx_lab.engine.requests import ChatPrompt, GenerationRequest
from lmx_lab.engine.text.chat_format_detection import ChatFormat, ReasoningState
from lmx_lab.engine.text.splitter import Decode
from lmx_lab.engine.tokenizing.encoder import LIMIT_S, SHORT_CHARACTERS
from lmx_lab.engine.validation import (
    CHARACTERS_PER_TOKEN,
    MAX_CHARACTERS_PER_TOKEN,
    check_size,
    no_steering_error,
    readable_tokens,
    too_long,
)
from lmx_lab.errors import EngineError, InvalidRequestError, QueueFullError, UnusableModelError
from lmx_lab.values.models import ModelEntry
from lmx_lab.weights.files import in_thread
from lmx_lab.weights.gguf.header import GgufHeader, read_header
from lmx_lab.weights.gguf.tokenizer import CONTROL, USER_DEFINED, eos_ids, read_vocabulary
from lmx_lab.weights.tokenizer_files import InfillTokens, gguf_infill_tokens

GROWTH = 4
"""Factor by which more of a text is tokenized if its beginning does not show that it is too long."""
REASONING_TOKENS = (
    ("<think>", "</think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
)
"""Markers that mlx-lm detects if both are tokens."""
HEADER_TOKENS = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
"""The tokens of Kimi K3, whose headers end with ``<|sep|>``."""
CALL_PARSERS = (
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("gemma4", ("<|tool_call>", "<tool_call|>")),
    ("function_gemma", ("<start_function_call>",)),
    ("longcat", ("<longcat_tool_call>",)),
    ("glm47", ("<arg_key>",)),
    ("pythonic", ("<|tool_list_start|>",)),
    ("pythonic", ("<|tool_call_start|>",)),
    ("qwen3_coder", ("<tool_call>\\n<function=",)),
    ("qwen3_coder", ("<tool_call>\n<function=",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("minicpm5", ('<function name="', '<param name="')),
    ("mistral", ("[TOOL_CALLS]",)),
    ("muse_spark", ("<atem:function_calls>",)),
)
"""The parsers of mlx-lm, and the strings that a template contains whose calls they parse. The first match counts. The
generic format needs no parser."""
PARSER_PACKAGE = "lmx_lab_tool_parsers"


class LlamaTokenizer:
    """The ``Tokenizer`` of a model in its process, and its vocabulary. Belongs to the manager's loop.

    Raises, in all methods that ask the process:
        EngineError: it refuses, or does not answer.
    """

    bytes_of = None

    def __init__(
        self,
        entry: ModelEntry,
        header: GgufHeader,
        process: LlamaProcess,
        connection: LlamaConnection,
        *,
        file: GgufTokenizer,
        chat_format: ChatFormat,
        context_length: int,
        vocabulary_size: int,
    ) -> None:
        self.entry = entry
        self.header = header
        self.process = process
        self.connection = connection
        self.context_length = context_length
        self.vocabulary_size = vocabulary_size
        self.chat_format = chat_format
        self._file = file
        self._token_table: TokenTable | None = None
        self._token_index: TokenIndex | None = None
        self._infill: tuple[InfillTokens | None] | None = None
        """The tokens with which the model fills a gap; None until the first request needs them."""
        self._grammars: GrammarChecker | None = None
        """Created with the first grammar."""
        self._long_texts = asyncio.Lock()
        """Locked while a long text is tokenized, so that this keeps one core busy at most."""

    def close(self) -> None:
        """End the process of the grammars, which would otherwise live until the next garbage collection."""
        self._grammars = None

    # Vocabulary

    async def load_token_table(self) -> TokenTable:
        """Return the vocabulary for grammars. It is read when it is first needed."""
        if self._token_table is None:
            read = functools.partial(read_header, self.entry.path, arrays=True)
            self._token_table = await asyncio.to_thread(lambda: read_token_table(read()))
        return self._token_table

    async def load_token_index(self) -> TokenIndex:
        """Return the vocabulary by its bytes. It is created when it is first needed."""
        if self._token_index is None:
            self._token_index = TokenIndex((await self.load_token_table()).tokens)
        return self._token_index

    async def infill_tokens(self) -> InfillTokens | None:
        if self._infill is None:
            self._infill = (await in_thread(functools.partial(gguf_infill_tokens, self.entry)),)
        return self._infill[0]

    # Texts

    async def _ask(self, path: str, body: Mapping[str, Any]) -> Any:
        try:
            return await self.connection.post(path, body)
        except RefusedError as exc:
            raise EngineError(f"llama.cpp could not prepare this request: {exc.message}") from exc

    async def tokenize(self, text: str, *, at_most: int, parse_special: bool, add_special: bool = True) -> list[int]:
        """Return the token ids of a text.

        Args:
            add_special: Whether to add special tokens at its ends, if the model has any.
            at_most: Number of tokens that the caller needs. A longer text is tokenized only far enough to show that
                it has more tokens, because megabytes would take seconds.
            parse_special: Whether the text of a special token becomes that token.

        Raises:
            QueueFullError: other long texts were tokenized for ``LIMIT_S``.
        """
        characters = at_most * CHARACTERS_PER_TOKEN
        deadline = time.monotonic() + LIMIT_S
        while True:
            body = {"content": text[:characters], "add_special": add_special, "parse_special": parse_special}
            if min(len(text), characters) <= SHORT_CHARACTERS:
                answer = await self._ask("/tokenize", body)
            else:
                try:
                    await asyncio.wait_for(self._long_texts.acquire(), max(0.0, deadline - time.monotonic()))
                except TimeoutError:
                    raise QueueFullError(
                        f"the text was not tokenized within {LIMIT_S:g} s, because other texts were; try again in 2 s, "
                        "or send less",
                        retry_after_s=2,
                    ) from None
                # A task, because llama.cpp tokenizes the text to its end even if the caller is cancelled.
                task = asyncio.create_task(self._ask("/tokenize", body))
                task.add_done_callback(self._end_long_text)
                answer = await asyncio.shield(task)
            tokens = [int(token) for token in answer["tokens"]]
            if len(tokens) > at_most or characters >= len(text):
                return tokens
            characters *= GROWTH

    def _end_long_text(self, task: asyncio.Task[Any]) -> None:
        self._long_texts.release()
        if not task.cancelled():
            task.exception()  # retrieved, because the caller may have been cancelled

    def check(self, request: GenerationRequest) -> None:
        if request.thinking_budget is not None:
            raise InvalidRequestError(
                'llama.cpp does not support thinking_budget; leave it out, or load the model with engine="mlx"',
                param="thinking_budget",
            )
        if request.steer:
            raise no_steering_error("llama.cpp")

    async def encode(self, request: GenerationRequest, text: str, *, special: bool, param: str) -> list[int]:
        context = readable_tokens(request, self.context_length)
        longest = context * CHARACTERS_PER_TOKEN
        given = text if len(text) <= context * MAX_CHARACTERS_PER_TOKEN else text[:longest]
        tokens = await self.tokenize(given, at_most=context, parse_special=True, add_special=special)
        if len(tokens) > context and len(text) > longest:
            raise too_long(request, f"more than {len(tokens) - 1}", self.entry, context)
        check_size(text, context, self.entry.id, param)
        return tokens

    async def encode_chat(self, request: GenerationRequest, chat: ChatPrompt) -> tuple[list[int], str]:
        text = await self.render(request, chat)
        return await self.encode(request, text, special=True, param="messages"), text

    async def encode_name(self, text: str, param: str) -> list[int]:
        body = {"content": text, "add_special": False, "parse_special": True}
        return [int(token) for token in (await self._ask("/tokenize", body))["tokens"]]

    async def decoded(self, tokens: Sequence[int]) -> str:
        return str((await self._ask("/detokenize", {"tokens": list(tokens)}))["content"])

    async def token_bytes(self, tokens: Sequence[int]) -> list[bytes]:
        known = (await self.load_token_table()).tokens
        return [known[token] for token in tokens]

    async def show(self, tokens: Sequence[int]) -> str:
        return (await self.load_token_table()).show(tokens)

    def reasoning(self, request: GenerationRequest, tail: str) -> ReasoningState:
        return self.chat_format.reasoning_state(tail)

    async def enforce(self, request: GenerationRequest, grammar: str, count: int) -> tuple[list[LLMatcher], str | None]:
        """See ``Tokenizer``. Returns the grammar also in llama.cpp's syntax."""
        if request.start is not None:
            raise InvalidRequestError(
                "llama.cpp enforces the format of an answer from its beginning, and cannot continue this answer; load "
                'the model with engine="mlx"',
                param="token",
            )
        if self._grammars is None:
            token_table = await self.load_token_table()
            self._grammars = self._grammars or GrammarChecker(token_table, self.connection)
        tools = request.prompt.tools if isinstance(request.prompt, ChatPrompt) else None
        enforced = await self._grammars.check(grammar, tools, count)
        if request.min_tokens:
            raise InvalidRequestError(
                "llama.cpp does not support min_tokens together with a format of the answer, or with tools whose calls "
                'have an enforced format; leave one of them out, or load the model with engine="mlx"',
                param="min_tokens",
            )
        return enforced

    @property
    def decode(self) -> Decode:
        """See ``Tokenizer``. The process decodes the tokens; only special ones, which have no text, are added by id."""
        return join_texts

    def row(self, request: GenerationRequest, prompt: list[int], choice: int) -> AnswerReader:
        return AnswerReader(self._token_table)

    async def begin(self, generation: LlamaGeneration) -> None:
        """See ``Tokenizer``. Reads what llama.cpp would stream: the texts of ordinary tokens and markers, and the
        ids of other special tokens.

        Raises:
            InvalidRequestError: the answer cannot begin with these tokens.
        """
        table = await self.load_token_table()
        special = set(table.special_token_ids) - self.chat_format.marker_tokens
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        tokens = [token if token in special else decoder.decode(table.tokens[token]) for token in generation.start]
        if decoder.getstate()[0]:
            raise InvalidRequestError(
                "the chosen token is only a part of a character, after which llama.cpp cannot continue; choose another "
                'token, or load the model with engine="mlx"',
                param="token",
            )
        generation.read_start(ends=ends_answer(generation, table.eos_tokens), tokens=tokens)

    async def render(self, request: GenerationRequest, chat: ChatPrompt) -> str:
        """See ``Tokenizer``. Leaves out the token that ``encode`` adds before each prompt."""
        text = await render_chat_template(self._file, self.chat_format, self.entry, request, chat)
        return text.removeprefix(self._file.bos)


class GgufTokenizer:
    """The template and the added tokens of a GGUF file, with the names of mlx-lm's ``TokenizerWrapper``.

    Args:
        header: The header of the file, including its arrays.
    """

    _tokenizer = _chat_template = None
    structural_markers: Sequence[str] = ()
    response_transitions: Mapping[str, Sequence[tuple[str, str]]] = {}
    response_initial_state = None

    def __init__(self, header: GgufHeader) -> None:
        self._template = header.text("tokenizer.chat_template")
        self._tool_template = header.text("tokenizer.chat_template.tool_use")
        self.chat_template = "\n".join(filter(None, [self._template, self._tool_template]))
        self.has_chat_template = bool(self.chat_template)
        self._special_tokens: dict[str, str] = {}
        self.added_tokens_decoder: dict[int, AddedToken] = {}
        self.eos_token_ids: Collection[int] = ()
        self.bos = ""
        """The text of the token that llama.cpp adds before each prompt; empty if it adds none."""
        # A vocabulary that is not usable otherwise, because it contains a token twice, has no added tokens here.
        with contextlib.suppress(UnusableModelError):
            vocabulary = read_vocabulary(header)
            bos, eos = (vocabulary.token(token) or "" for token in (vocabulary.bos, vocabulary.eos))
            self._special_tokens = {"bos_token": bos, "eos_token": eos}
            self.added_tokens_decoder = {
                at: AddedToken(vocabulary.tokens[at], special=kind == CONTROL)
                for at, kind in enumerate(vocabulary.types)
                if kind in (CONTROL, USER_DEFINED)
            }
            self.eos_token_ids = eos_ids(vocabulary)
            self.bos = bos if vocabulary.add_bos else ""
        self._ids = {str(token): at for at, token in self.added_tokens_decoder.items()}
        has_headers = set(HEADER_TOKENS) <= self._ids.keys()
        if has_headers:
            named_parts = (("open", "response"), ("close", "response"), ("close", "message"))
            self.structural_markers = [f"<|{kind}|>{name}<|sep|>" for kind, name in named_parts]
        markers = [pair for pair in REASONING_TOKENS if set(pair) <= self._ids.keys()]
        if {"<|channel>", "<channel|>"} <= self._ids.keys():
            markers.append(("<|channel>thought", "<channel|>"))
        if has_headers:
            markers.append(("<|open|>think<|sep|>", "<|close|>think<|sep|>"))
        self.has_thinking = bool(markers)
        self.think_start, self.think_end = markers[0] if markers else ("", "")
        parsers = [name for name, parts in CALL_PARSERS if all(part in self.chat_template for part in parts)]
        if has_headers:
            parsers.append("kimi_k3")
        if {"<|tool_call_start|>", "<|tool_call_end|>"} <= self._ids.keys():
            parsers.append("pythonic")
        self.has_tool_calling = bool(parsers)
        self.tool_parser: Callable[[str, Any], Any] | None = None
        self.tool_call_start = self.tool_call_end = ""
        if parsers:
            module = _import_parser(parsers[0])
            self.tool_parser = module.parse_tool_call
            self.tool_call_start, self.tool_call_end = module.tool_call_start, module.tool_call_end

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """The special tokens and the date, as llama.cpp passes them to a template."""
        now = datetime.now()
        return {**self._special_tokens, "datetime": f"{now:%b %d %Y}", "date_string": f"{now:%d %b %Y}"}

    def get_vocab(self) -> Mapping[str, int]:
        """Return the added tokens."""
        return self._ids

    def get_chat_template(self, *, tools: Sequence[Mapping[str, Any]] | None) -> str:
        """Return the template for a chat with or without tools."""
        tool_template = self._tool_template if tools else None
        return tool_template or self._template or self.chat_template

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the id of an added token; nothing for another text, which only the process of the model encodes."""
        return [self._ids[text]] if text in self._ids else []


def _import_parser(name: str) -> ModuleType:
    """Import a parser of mlx-lm without mlx-lm itself, which would take a second and import MLX."""
    if PARSER_PACKAGE not in sys.modules:
        spec = importlib.util.find_spec("mlx_lm")
        package = ModuleType(PARSER_PACKAGE)
        assert spec is not None
        package.__path__ = [f"{folder}/tool_parsers" for folder in spec.submodule_search_locations or ()]
        sys.modules[PARSER_PACKAGE] = package
    return importlib.import_module(f"{PARSER_PACKAGE}.{name}")


def join_texts(pieces: Sequence[int | str]) -> str:
    return "".join(piece for piece in pieces if isinstance(piece, str))
