"""Llama, and families with its attention (SmolLM2 among them)."""

from manyheads.convert.adopt.family import Family

LLAMA = Family(("llama",))
