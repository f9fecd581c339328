"""The whole of `manyheads prune` and `manyheads mask` as functions: a model and text in, figures out."""

from __future__ import annotations

import datetime
import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from manyheads.bench.figures import LARGEST_DIFFERENCE, CheckError, examine
from manyheads.bench.folders import check_folders, partial_folder
from manyheads.bench.job import cut_texts
from manyheads.bench.timing import decoder, interleaved, machine
from manyheads.convert.adopt import adopt
from manyheads.convert.export.native import save as save_checkpoint
from manyheads.convert.resume import ResumeError, check_resume, write_text
from manyheads.convert.source import Source, load_source
from manyheads.convert.text import Texts, read_text
from manyheads.convert.verify import Quality, Reference, decode_equals_forward, quality
from manyheads.edit.groups import Heads, Regroup, named
from manyheads.edit.mask import load_heads, mask, save_heads, write_heads
from manyheads.edit.prune import parameters, prune
from manyheads.edit.select import Choice, Of, Step, select
from manyheads.edit.slices import EditError
from manyheads.stack.pretrained import ManyheadsForCausalLM

Progress = Callable[[str, int, int], object]
CALIBRATION, EVALUATION = (8, 512), (5, 2048)
ROUNDS = 7
"""Times that a decoding step of each model is timed."""


def prune_model(
    model: str | Path, out: str | Path, *, heads: Heads | None = None, keep: float | None = None, of: Of = "heads",
    by: str = "gradient", limit: float | None = None, regroup: Regroup = "refuse", at_least: int = 1,
    again: int | None = None, tries: int | None = 16, texts: Sequence[str | Path] = (),
    calibration: tuple[int, int] = CALIBRATION, evaluation: tuple[int, int] = EVALUATION, context: int = 128,
    seed: int = 0, resume: bool = False, progress: Progress = lambda stage, done, total: None,
) -> dict[str, Any]:  # fmt: skip
    """Take heads out of a model, measure what that cost, and write it.

    Args:
        model: a hub name, a folder, a GGUF file, or `smollm2`.
        out: a new folder for the checkpoint.
        heads: those to take out, by layer; or else chosen as `select` does, by keep, of, by, limit, at_least, again,
            tries and seed.
        texts: files, the first 80 % to choose by and the rest to evaluate on, instead of Python's help topics.
        calibration, evaluation: (windows, tokens in each).
        context: tokens in the cache when a decoding step is timed; 0: it is not.
        resume: go on with what an interrupted choice in rounds (`greedy`, `again`) left in `<out>.partial`.

    Returns:
        What `manyheads prune --json` prints: `model`, `date`, `text`, `heads_out`, `heads` and `key_heads` left by
        layer, `plan` (by, of, kept, stopped, steps), `rows` (figures before and after), `difference`, `seconds`,
        `notes`, `out`.

    Raises:
        FileExistsError: `out` exists, or an unfinished job of that name and `resume` is not set.
        SourceError, AdoptError, EditError, ValueError: a model, heads, target or text that does not fit; nothing is
            written. ResumeError: the unfinished job had other options. OSError: the disk is full.
    """
    if (heads is None) == (keep is None and limit is None):
        raise EditError("say which heads to take out, or to which share or limit they are chosen, and not both")
    out = Path(out).expanduser()
    work = partial_folder(out)
    check_folders(out, work, resume)
    clock, began = {}, time.perf_counter()

    def lap(name: str) -> None:
        nonlocal began
        clock[name], began = round(time.perf_counter() - began, 3), time.perf_counter()

    progress("load", 0, 1)
    source, cut, told, notes = _opened(model, texts, calibration, evaluation)
    ours = adopt(source.model)
    progress("load", 1, 1)
    lap("load")
    choice: Choice | None = None
    if heads is None:
        rounds = again is not None or by == "greedy"
        options = {
            "model": str(model), "keep": keep, "of": of, "by": by, "limit": limit, "regroup": regroup, "seed": seed,
            "at_least": at_least, "again": again, "tries": tries, "texts": [*map(str, texts)],
            "calibration": list(cut.calibration.shape),
        }  # fmt: skip
        choice = select(
            ours, cut.calibration, keep, of=of, by=by, limit=limit, again=again, tries=tries, at_least=at_least,
            regroup=regroup, seed=seed, begun=_begun(work, options) if rounds else (), progress=progress,
            after_round=lambda steps: _keep(work, options, steps) if rounds else None,
        )  # fmt: skip
        if not choice and choice.stopped == "keep":
            raise EditError(f"a share of {keep:g} of {of} leaves every head; give a smaller one")
        if not choice:
            raise EditError(f"no head can go: the first one by {by} takes perplexity above {limit:g} times what it is")
    removed = named(ours, heads or {} if choice is None else choice)
    lap("choose")
    small = prune(ours, removed, regroup=regroup, share=True)
    lap("prune")
    reference = Reference(ours, cut.evaluation)
    rows = [_row("before", ours, cut.evaluation, None, progress) | {"kl": 0.0, "top1": 1.0}]
    rows.append(_row("after", small, cut.evaluation, reference, progress))
    del reference
    difference = decode_equals_forward(small, cut.evaluation[:1, :48])
    if not difference <= LARGEST_DIFFERENCE:
        raise CheckError(f"decoding with the cache differs from the full pass by {difference:.2g} (logits)")
    if context:
        steps = {"before": decoder(ours, context), "after": decoder(small, context)}
        for row, timing in zip(rows, interleaved(steps, ROUNDS, warmup=2).values(), strict=True):
            row["decode_ms"] = timing.median
    lap("measure")
    left = [layer.heads for layer in small.attentions]
    plan = None if choice is None else {
        "by": choice.by, "of": of, "kept": choice.kept, "stopped": choice.stopped, "loss": choice.loss,
        "loss_masked": choice.loss_masked, "steps": [step._asdict() for step in choice.steps],
    }  # fmt: skip
    told_of = {key: value for key, value in (plan or {}).items() if key != "steps"}
    report = save_checkpoint(
        small, out, tokenizer=source.tokenizer,
        notes={"pruned": told_of | {"heads_out": write_heads(removed), "perplexity": rows[1]["perplexity"]}},
    )  # fmt: skip
    shutil.rmtree(work, ignore_errors=True)
    lap("save")
    alike = len({str(spec) for spec in small.specs}) == len({*left}) == 1 and small.attentions[0].dim % left[0] == 0
    if alike and small.specs[0].by_stage["project"][0].name == "gqa" and small.config.base is not None:
        notes.append(f"all layers are alike: 'manyheads export {out} --format family' writes a stock model")
    return {
        "model": source.name, "date": datetime.date.today().isoformat(), "text": told, "heads_out": removed,
        "heads": left, "key_heads": [_key_heads(small, index) for index in range(len(left))], "plan": plan,
        "rows": rows, "difference": difference, "file_bytes": report.bytes, "seconds": clock, "machine": machine(),
        "notes": notes, "out": str(out),
    }  # fmt: skip


def mask_model(
    model: str | Path, heads: Heads | str | Path, *, texts: Sequence[str | Path] = (),
    evaluation: tuple[int, int] = EVALUATION, save: str | Path | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> dict[str, Any]:  # fmt: skip
    """Perplexity with and without some heads; the model stays as it is.

    Args:
        heads: by layer, or a file that `save_heads` wrote. save: such a file to write. Else as in `prune_model`.

    Returns:
        `model`, `text`, `heads_out`, `perplexity`, `masked` (perplexity, kl, top1), `notes`.
    """
    progress("load", 0, 1)
    source, cut, told, notes = _opened(model, texts, (1, 2), evaluation)
    removed = load_heads(heads, source.model) if isinstance(heads, str | Path) else named(source.model, heads)
    progress("load", 1, 1)
    reference = Reference(source.model, cut.evaluation, progress=lambda *step: progress("read", *step))
    whole = quality(source.model, cut.evaluation)
    with mask(source.model, removed):
        found = _against(reference, source.model, cut.evaluation, progress)
    if save is not None:
        save_heads(save, source.model, removed)
    return {
        "model": source.name, "text": told["evaluation"], "heads_out": removed, "perplexity": whole.perplexity,
        "masked": {"perplexity": found.perplexity, "kl": found.kl, "top1": found.top1}, "notes": notes,
    }  # fmt: skip


def _against(reference: Reference, model: PreTrainedModel, tokens: Tensor, progress: Progress) -> Quality:
    return quality(model, tokens, reference, progress=lambda *step: progress("evaluate", *step))


def _opened(
    model: str | Path, texts: Sequence[str | Path], calibration: tuple[int, int], evaluation: tuple[int, int]
) -> tuple[Source, Texts, dict[str, str], list[str]]:
    """The model, its text in windows, what the text is, and notes."""
    own = read_text([Path(text).expanduser() for text in texts]) if texts else None
    source = load_source(model)
    source.reader(model)
    return source, *cut_texts(source, own, [Path(text).name for text in texts], calibration, evaluation)


def _row(
    name: str, model: ManyheadsForCausalLM, tokens: Tensor, reference: Reference | None, progress: Progress
) -> dict[str, Any]:  # fmt: skip
    found = examine(model, tokens, reference, lambda *step: progress(f"measure {name}", *step))
    numbers = parameters(model)
    return {
        "name": name, "heads": sum(layer.heads for layer in model.attentions), "parameters": numbers,
        "parameter_bytes": numbers * model.dtype.itemsize, **found, "decode_ms": None,
    }  # fmt: skip


def _key_heads(model: ManyheadsForCausalLM, index: int) -> int:
    """Key heads that a layer caches."""
    entry = model.attentions[index].entries.get("k")
    return 0 if entry is None else entry.heads


def _begun(work: Path, options: dict[str, Any]) -> list[Step]:
    """The steps of an interrupted choice."""
    file = work / "steps.json"
    if not file.exists():
        return []
    check_resume(work, options)
    try:
        return [Step(each[0], tuple(each[1]), *each[2:]) for each in json.loads(file.read_text(encoding="utf-8"))]
    except (ValueError, LookupError, TypeError) as error:
        raise ResumeError(f"{file} cannot be read ({error!r}); remove {work} to start from the beginning") from None


def _keep(work: Path, options: dict[str, Any], steps: Sequence[Step]) -> None:
    check_resume(work, options)
    write_text(json.dumps(steps), work / "steps.json")


__all__ = ["CALIBRATION", "EVALUATION", "mask_model", "prune_model"]
