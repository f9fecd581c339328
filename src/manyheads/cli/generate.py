"""`manyheads generate`: text from a checkpoint."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from manyheads.cli.models import find
from manyheads.cli.output import Debug, Json, command, finish, note


@command
def generate(
    model: Annotated[
        str, typer.Argument(metavar="DIR", help="A checkpoint, the output of shrink, or any MODEL that shrink takes.")
    ],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What the text continues.")],
    tokens: Annotated[int, typer.Option(min=1, help="Write at most this many tokens.")] = 64,
    sample: Annotated[
        bool, typer.Option("--sample", help="Draw tokens instead of taking the most likely one.")
    ] = False,
    temperature: Annotated[float, typer.Option(min=1e-3, help="With --sample: above 1 is wilder.")] = 1.0,
    top_p: Annotated[
        float, typer.Option(min=1e-3, max=1.0, help="With --sample: draw from the likeliest tokens of this mass.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="With --sample: the same seed writes the same text.")] = 0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Continue a prompt; the text appears as it is written."""
    if not prompt.strip():
        raise ValueError("the prompt is empty")
    name = find(model)
    import torch
    from transformers import TextStreamer

    from manyheads.convert.source import SourceError, load_source

    source = load_source(name)
    tokenizer: Any = source.tokenizer
    if tokenizer is None:
        raise SourceError(f"{name} has no tokenizer, so no text can be read with it")
    inputs = tokenizer(prompt, return_tensors="pt")
    config = source.model.config.get_text_config()
    if (largest := int(inputs["input_ids"].max())) >= config.vocab_size:
        raise ValueError(f"token {largest} of the prompt is outside the model's vocabulary of {config.vocab_size}")
    count, limit = inputs["input_ids"].shape[1] + tokens, getattr(config, "max_position_embeddings", None)
    if limit is not None and count > limit:
        note(f"{count} tokens reach beyond the {limit} positions that the model was made for")
    sampling: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": 0}
    if not sample:
        sampling = dict.fromkeys(sampling)  # the checkpoint's own would be warned about
    torch.manual_seed(seed)
    typer.echo(prompt, nl=False)
    run: Any = source.model.generate
    start = time.perf_counter()
    ids = run(
        inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=tokens,
        do_sample=sample,
        pad_token_id=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        **sampling,
    )
    seconds = time.perf_counter() - start
    new = ids[0, inputs["input_ids"].shape[1] :]
    text = tokenizer.decode(new, skip_special_tokens=True)
    finish({"model": name, "prompt": prompt, "text": text, "tokens": len(new), "seconds": seconds}, as_json)
