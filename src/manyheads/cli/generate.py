"""`manyheads generate`: text from a checkpoint."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from manyheads.cli.models import find
from manyheads.cli.output import Debug, Json, command, finish, note, number


@command
def generate(
    model: Annotated[
        str, typer.Argument(metavar="DIR", help="A checkpoint, the output of shrink, or any MODEL that shrink takes.")
    ],
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT", help="What the text continues.")] = None,
    system: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --prompts: text that all of them begin with.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Prompts, one a line, answered together.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Write at most this many tokens.")] = 64,
    sample: Annotated[
        bool, typer.Option("--sample", help="Draw tokens instead of taking the most likely one.")
    ] = False,
    temperature: Annotated[
        float | None, typer.Option(min=1e-3, show_default="1.0", help="With --sample: above 1 is wilder.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            min=1e-3, max=1.0, show_default="1.0", help="With --sample: draw from the likeliest tokens of this mass."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="With --sample: the same seed writes the same text.")] = 0,
    chunk: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default="64",
            help="With --prompts: they share what they begin with in chunks of so many tokens.",
        ),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Several tokens a step, the same text: what decode train wrote, or lookup."),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Continue a prompt; the text appears as it is written.

    With --prompts, all prompts of a file: what they begin with is read and cached once.
    """
    if (prompt is None) == (prompts is None):
        raise ValueError("give a PROMPT, or a file of them with --prompts")
    if draft is not None and prompts is not None:
        raise ValueError("--draft goes with a single PROMPT")
    if system is not None and prompts is None:
        raise ValueError("--system goes with --prompts; put it in front of a single PROMPT")
    if chunk is not None and prompts is None:
        raise ValueError("--chunk goes with --prompts")
    if not sample and (temperature, top_p) != (None, None):
        raise ValueError("--temperature and --top-p go with --sample")
    sampling: dict[str, Any] = {
        "temperature": 1.0 if temperature is None else temperature, "top_p": 1.0 if top_p is None else top_p,
    }  # fmt: skip
    if prompts is not None:
        lines = _lines(prompts)
        start = "" if system is None else _text(system)
        result = _together(model, start, lines, tokens=tokens, chunk=chunk or 64, sample=sample, seed=seed, **sampling)
        return finish(result | {"system": system}, as_json)
    assert prompt is not None
    if not prompt.strip():
        raise ValueError("the prompt is empty")
    name, source, tokenizer = _load(model)
    import torch
    from transformers import TextStreamer

    inputs = tokenizer(prompt, return_tensors="pt")
    config = source.model.config.get_text_config()
    if (largest := int(inputs["input_ids"].max())) >= config.vocab_size:
        raise ValueError(f"token {largest} of the prompt is outside the model's vocabulary of {config.vocab_size}")
    _note_length(config, inputs["input_ids"].shape[1] + tokens)
    if draft is not None:
        return finish(
            {"model": name, "prompt": prompt}
            | _drafted(draft, source, inputs["input_ids"], prompt, tokens, sample=sample, seed=seed, **sampling),
            as_json,
        )
    sampling |= {"top_k": 0}
    if not sample:
        sampling = dict.fromkeys(sampling)  # the checkpoint's own would be warned about
    torch.manual_seed(seed)
    typer.echo(prompt, nl=False)
    run: Any = source.model.generate
    began = time.perf_counter()
    ids = run(
        inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=tokens,
        do_sample=sample,
        pad_token_id=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        **sampling,
    )
    seconds = time.perf_counter() - began
    new = ids[0, inputs["input_ids"].shape[1] :]
    text = tokenizer.decode(new, skip_special_tokens=True)
    finish({"model": name, "prompt": prompt, "text": text, "tokens": len(new), "seconds": seconds}, as_json)


def _load(model: str) -> tuple[str, Any, Any]:
    name = find(model)
    from manyheads.convert.source import load_source

    source = load_source(name)
    return name, source, source.reader(name)


def _drafted(draft: str, source: Any, ids: Any, prompt: str, tokens: int, **sampling: Any) -> dict[str, Any]:
    """Write a text by drafts; what was accepted is noted."""
    import warnings

    from transformers import TextStreamer

    from manyheads.convert.adopt import adopt
    from manyheads.decode import PromptLookup, SlowDraft, load
    from manyheads.decode import generate as decode

    model = adopt(source.model)
    drafter = PromptLookup() if draft == "lookup" else load(draft, model, source.tokenizer, source.name)
    typer.echo(prompt, nl=False)
    streamer = TextStreamer(source.tokenizer, skip_special_tokens=True)
    import torch

    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowDraft)  # noted below, once the text is there
        found = decode(
            model, ids, drafter, tokens, on_tokens=lambda _, new: streamer.put(torch.tensor(new)), **sampling
        )
    streamer.end()
    seconds = time.perf_counter() - began
    (new,) = found.tokens
    rates = ", ".join(number(100 * rate, 0) for rate in found.acceptance.by_depth if rate == rate)
    note(
        f"{number(found.tokens_per_step, 2)} tokens a step, {number(found.gain or 1.0, 2)} times as fast as one; "
        f"accepted by depth, %: {rates or 'nothing drafted'}"
    )
    if found.note:
        note(found.note)
    return {
        "text": source.tokenizer.decode(new, skip_special_tokens=True), "tokens": len(new), "seconds": seconds,
        "steps": found.steps, "tokens_per_step": found.tokens_per_step, "accepted": found.acceptance.by_depth,
        "gain": found.gain,
    }  # fmt: skip


def _note_length(config: Any, count: int) -> None:
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and count > limit:
        note(f"{count} tokens reach beyond the {limit} positions that the model was made for")


def _text(file: Path) -> str:
    from manyheads.convert.text import read_text

    return read_text([file])


def _lines(file: Path) -> list[str]:
    return [line for line in _text(file).splitlines() if line.strip()]


def _together(model: str, system: str, prompts: list[str], *, tokens: int, **options: Any) -> dict[str, Any]:
    """Answer all prompts in one batch; print each with its text."""
    name, source, tokenizer = _load(model)
    from manyheads.convert.adopt import adopt
    from manyheads.stack import ManyheadsForCausalLM
    from manyheads.stack.requests import answer

    ours = source.model if isinstance(source.model, ManyheadsForCausalLM) else adopt(source.model)
    ids = [tokenizer(system + prompt)["input_ids"] for prompt in prompts]
    began = time.perf_counter()
    found = answer(ours, ids, tokens=tokens, **options)
    seconds = time.perf_counter() - began
    _note_length(ours.config.get_text_config(), max(map(len, ids)) + tokens)
    texts = [tokenizer.decode(new, skip_special_tokens=True) for new in found.tokens]
    for prompt, text in zip(prompts, texts, strict=True):
        typer.echo(f"{prompt}{text}\n")
    note(
        f"{found.total:,} tokens of {len(prompts)} prompts, {found.stored:,} of them kept: a cache of "
        f"{number(found.bytes / 2**20, 1)} MB in place of {number(found.apart_bytes / 2**20, 1)}"
    )
    answers = [
        {"prompt": prompt, "text": text, "tokens": len(new)}
        for prompt, text, new in zip(prompts, texts, found.tokens, strict=True)
    ]
    return {
        "model": name, "answers": answers, "prompt_tokens": found.total, "stored_tokens": found.stored,
        "cache_bytes": found.bytes, "apart_bytes": found.apart_bytes, "seconds": seconds,
    }  # fmt: skip
