"""Settings of the engines under test."""

from dataclasses import replace

from lmx_lab.settings import Settings

CONTEXT = 8192
SETTINGS = Settings(slots=8, queue_limit=8, threads=1, memory_limit_bytes=2**30, echo_tokens_per_s=20_000)
FEW = replace(SETTINGS, slots=2, queue_limit=2, echo_tokens_per_s=2000)
