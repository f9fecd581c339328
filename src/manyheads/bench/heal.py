"""The whole of `manyheads heal` as a function: a converted checkpoint and its source in, a healed checkpoint out.

A job works in `<out>.partial`, as that of `shrink` does. Under `accelerate launch` every process trains, and the first
one measures and writes.
"""

from __future__ import annotations

import datetime
import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from manyheads.bench.folders import check_folders, finish, kept, partial_folder
from manyheads.bench.healed import on_device, put_weights, save_healed, summary
from manyheads.bench.timing import machine
from manyheads.convert.adopt import AdoptError, adopt
from manyheads.convert.corpus import (
    PREFIX,
    FileWindows,
    StreamWindows,
    Text,
    TrainingText,
    documents,
    find_files,
    is_dataset,
)
from manyheads.convert.distil import Distil, check, distil
from manyheads.convert.ranks import Ranks
from manyheads.convert.resume import write_text
from manyheads.convert.source import Source, SourceError, load_source
from manyheads.convert.text import PLENTY, default_text, fitting, max_positions, windows
from manyheads.convert.verify import Quality, Reference, quality

Progress = Callable[[str, int, int], object]
EVALUATION = (5, 2048)
TRAINED = 0.8
"""Share of a text that is trained on; the rest evaluates."""


def heal_model(
    checkpoint: str | Path,
    teacher: str | Path,
    *,
    texts: Sequence[str | Path] = (),
    options: Distil | None = None,
    out: str | Path,
    resume: bool = False,
    evaluation: tuple[int, int] = EVALUATION,
    progress: Progress = lambda stage, done, total: None,
) -> dict[str, Any]:
    """Train a converted checkpoint to predict what its source predicts, and measure what that brought.

    Args:
        checkpoint: a folder that this library wrote, or any model whose attention it knows.
        teacher: what the checkpoint was made from: a hub name, a folder, a GGUF file, or `smollm2`.
        texts: files or folders to train on (first 80 %) and to evaluate on (the rest), instead of Python's help topics;
            or one `datasets:owner/name[:config]`, whose first documents evaluate.
        options: of the training.
        out: a new folder: the healed checkpoint, and `result.json`.
        resume: go on with what an interrupted job left in `<out>.partial`; without such a job, start one.
        evaluation: (windows, tokens in each).

    Returns:
        What `result.json` holds and `manyheads heal --json` prints: `model`, `teacher`, `date`, `text`, `rows` (figures
        of the teacher, and before and after healing), `curve`, `steps`, `best`, `tokens`, `seconds`,
        `seconds_per_step`, `options`, `processes`, `machine`, `notes`, `out`.

    Raises:
        FileExistsError: `out` exists, or an unfinished job of that name and `resume` is not set.
        SourceError, AdoptError, OptionError, ValueError, ImportError: a model, option or text that does not fit,
            before any work; nothing is left behind.
        ResumeError: the unfinished job had other options. FloatingPointError: the training diverged.
        OSError: the disk is full; what is finished stays for `resume`.
    """
    options, out, ranks = options or Distil(), Path(out).expanduser(), Ranks.here()
    work = partial_folder(out)
    if ranks.rank == 0:
        check_folders(out, work, resume)
    opened = open_texts(texts)
    progress("load", 0, 1)
    loaded, source = load_source(checkpoint), load_source(teacher)
    tokenizer = check_vocabularies(loaded, source)
    student, master = adopted(loaded.model, options), adopted(source.model, options)
    check(student, master, options)
    notes: list[str] = []
    text, tokens, told = opened(tokenizer, fitting(evaluation, max_positions(student.config), notes))
    text.held(options.batch[1])  # refused here, where it is too short
    progress("load", 1, 1)
    rows: list[dict[str, Any]] = []
    with kept(work) if ranks.rank == 0 else nullcontext(), on_device(student, master):
        reference = None
        if ranks.rank == 0:
            reference = Reference(master, tokens)
            for name, model in (("teacher", master), ("before", student)):
                rows.append(figures(name, quality(model, tokens, reference)))
        found = distil(
            student, master, text, options, work=work / "training", record={"model": loaded.name, "of": source.name},
            progress=lambda *step: progress("heal", *step),
        )  # fmt: skip
        if ranks.rank:
            return {}
        if any(hasattr(parameter, "full_tensor") for parameter in student.parameters()):  # spread over processes
            student = adopted(load_source(checkpoint).model, options).to(master.device)  # type: ignore[arg-type]
            put_weights(student, found)
        rows.append(figures("after", quality(student, tokens, reference)))
        del reference
        result = {
            "model": loaded.name, "teacher": source.name, "date": datetime.date.today().isoformat(),
            "text": told | {"tokens_evaluation": tokens.numel()}, "rows": rows,
            **summary(found), "options": asdict(options), "processes": ranks.world, "machine": machine(),
            "notes": notes, "out": str(out),
        }  # fmt: skip
        save_healed(student, tokenizer, work, found, options)
        write_text(json.dumps(result, indent=1, ensure_ascii=False), work / "result.json")
        shutil.rmtree(work / "training")
        finish(work, out)
    return result


def figures(name: str, found: Quality) -> dict[str, Any]:
    return {"name": name, "loss": found.nll, "perplexity": found.perplexity, "kl": found.kl, "top1": found.top1}


def adopted(model: PreTrainedModel, options: Distil) -> PreTrainedModel:
    """With our attention, where its family is known or has to be."""
    try:
        return adopt(model)
    except AdoptError:
        if options.train == "attention" or options.relations is not None:
            raise
        return model


def check_vocabularies(student: Source, teacher: Source) -> PreTrainedTokenizerBase:
    """The tokenizer of both.

    Raises:
        ValueError: their vocabularies differ. SourceError: neither has a tokenizer.
    """
    sizes = [each.model.config.get_text_config().vocab_size for each in (student, teacher)]
    tokenizers = [each.tokenizer for each in (student, teacher)]
    if sizes[0] == sizes[1] and None not in tokenizers:
        words = [tokenizer.get_vocab() for tokenizer in tokenizers if tokenizer is not None]
        if differ := len(words[0].items() ^ words[1].items()):
            raise ValueError(
                f"{student.name} and {teacher.name} have vocabularies of {len(words[0]):,} and {len(words[1]):,} "
                f"tokens that differ in {differ:,}; they need one vocabulary"
            )
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"{student.name} predicts {sizes[0]:,} tokens, {teacher.name} {sizes[1]:,}; they need one vocabulary"
        )
    found = tokenizers[0] or tokenizers[1]
    if found is None:
        raise SourceError(f"neither {student.name} nor {teacher.name} has a tokenizer, so no text can be read with it")
    return found


Opened = Callable[[PreTrainedTokenizerBase, tuple[int, int]], tuple[TrainingText, Tensor, dict[str, Any]]]


def open_texts(texts: Sequence[str | Path]) -> Opened:
    """Look at the texts, before a weight is read.

    Returns:
        A function of a tokenizer and (windows, tokens in each) to evaluate on: the text to train on, the windows, and
        what both are called.
    """
    if texts and is_dataset(texts):
        name = str(texts[0])
        open_at = documents(name.removeprefix(PREFIX))

        def stream(tokenizer: PreTrainedTokenizerBase, evaluation: tuple[int, int]) -> Any:
            made = StreamWindows(tokenizer, open_at, name)
            rows = made.reserve(*evaluation)
            return made, rows, {"training": name, "evaluation": f"the first {made.first} documents of {name}"}

        return stream
    paths = find_files(texts)
    whole = Text.of(*paths) if paths else Text.of(default_text())
    name = ", ".join(Path(each).name for each in texts) or "Python's help topics"
    trained, evaluated = whole.split(TRAINED)

    def files(tokenizer: PreTrainedTokenizerBase, evaluation: tuple[int, int]) -> Any:
        count, length = evaluation
        try:
            rows = windows(tokenizer, evaluated.head(PLENTY * count * length), count=count, length=length)
        except ValueError as error:
            raise ValueError(f"evaluation: {error}") from error
        told = {
            "training": f"{name}, first 80 %",
            "evaluation": f"{name}, last 20 %: {count} windows of {length} tokens",
        }
        return FileWindows(tokenizer, trained), rows, told

    return files
