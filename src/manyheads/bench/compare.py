"""`manyheads compare` as a function: small models that differ in one spec, trained alike, and what each of them costs.

Everything that can be refused is refused before a step is made or a file written. Afterwards a folder holds one file a
finished run and the last checkpoint of each begun one, and the same call goes on from there.
"""

from __future__ import annotations

import datetime
import errno
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from manyheads.bench.compare_report import write_comparison
from manyheads.bench.comparison import Comparison, Entry
from manyheads.bench.design import Design
from manyheads.bench.measure import decode_times, step_times
from manyheads.bench.plan import PYDOC, Plan, check_lines, check_numbers, make_plan, read_corpus
from manyheads.bench.timing import Timing, machine
from manyheads.bench.train import Training, read_run
from manyheads.bench.width import Equal
from manyheads.bench.workers import Progress, Task, run_all, threads_of
from manyheads.convert.export.atomic import disk_full
from manyheads.convert.ranks import Ranks, wait_for
from manyheads.convert.resume import check_resume, write_text
from manyheads.core.part import Site
from manyheads.core.spec import Spec

FOLDER = "comparison"
DESIGN = Design("gqa")
TRAINING = Training()


def compare(
    specs: str | Sequence[str],
    *,
    steps: int = TRAINING.steps,
    seeds: int = 3,
    equal: Equal = "none",
    dim: int = DESIGN.dim,
    heads: int = DESIGN.heads,
    layers: int = DESIGN.layers,
    ffn: str = DESIGN.ffn,
    residual: str = DESIGN.residual,
    context: int = TRAINING.context,
    batch: int = TRAINING.batch,
    text: str | Path = PYDOC,
    lr: float = TRAINING.lr,
    warmup: int | None = None,
    dtype: str = TRAINING.dtype,
    aux_weight: float = TRAINING.aux_weight,
    save_every: int = TRAINING.save_every,
    jobs: int = 1,
    threads: int | None = None,
    out: str | Path = FOLDER,
    progress: Progress = lambda stage, done, total: None,
) -> Comparison:
    """Train a small byte-level decoder from scratch for each spec, all on the same text in the same order.

    Args:
        specs: spec lines; the first is what the others are compared with.
        steps: of training, of `batch` windows of `context` tokens.
        seeds: runs of each spec: a seed decides first weights and the order of the text.
        equal: `params`, `flops` (of training, a token) or `cache` (bytes a token): every other model takes the width
            at which this figure is nearest to the base's, and its feed-forward the rest; `none` gives all `dim`.
        ffn, residual: see `Stack`.
        text: a file, or `pydoc`: Python's help topics. The first 80 % are trained on, the rest is held out.
        warmup: steps of rising rate (default: a tenth). dtype: see `Training`.
        jobs: runs at a time, each in a process of its own (call this under `if __name__ == "__main__"` then).
            threads: of each run; by default its share of the cores, or what an interrupted comparison had.
        save_every: steps between checkpoints.
        out: the folder. One that holds the same comparison is gone on with, or read if it is finished.

    Under a launcher (RANK and WORLD_SIZE in the environment) processes share the runs, and rank 0 writes the result.

    Raises:
        SpecError, OptionError, ValueError: a spec, number or text that does not fit; nothing has been written.
        ResumeError: `out` holds a comparison with other options. FileExistsError: it holds something else.
        OSError: the disk is full (finished steps are kept), or a process of `jobs` died.
    """
    lines = [specs] if isinstance(specs, str) else [str(spec) for spec in specs]
    out, ranks = Path(out).expanduser(), Ranks.here()
    named = {
        "dim": dim, "heads": heads, "layers": layers, "context": context, "batch": batch, "steps": steps,
        "seeds": seeds, "jobs": jobs, "save_every": save_every,
    }  # fmt: skip
    check_numbers(named if threads is None else named | {"threads": threads}, lr, warmup, aux_weight, dtype, equal)
    rising = steps // 10 if warmup is None else warmup
    lines = check_lines(lines, layers)
    name, corpus = read_corpus(text)
    training = Training(steps, batch, context, lr, rising, dtype, aux_weight, save_every=save_every)
    threads = threads or _recorded(out) or max(1, torch.get_num_threads() // (jobs * ranks.near))
    digest = hashlib.sha256(corpus.train + b"\0" + corpus.held).hexdigest()[:16]
    options: dict[str, Any] = {
        "specs": lines, "steps": steps, "seeds": seeds, "equal": equal, "dim": dim, "heads": heads, "layers": layers,
        "ffn": ffn, "residual": residual, "context": context, "batch": batch, "text": f"{name} ({digest})", "lr": lr,
        "warmup": warmup, "dtype": dtype, "aux_weight": aux_weight, "threads": threads,
    }  # fmt: skip
    _check_folder(out)
    if (out / "job.json").exists():
        check_resume(out, options)
    if (out / "result.json").exists():
        return Comparison.read(out / "result.json")
    plan = make_plan(lines, Design(lines[0], dim, heads, layers, ffn, residual), training, corpus, equal)
    check_resume(out, options)
    (out / "runs").mkdir(exist_ok=True)
    tasks = plan.tasks(seeds, out)
    for task in tasks:
        if task.file.exists():
            read_run(task.file)  # a damaged one is refused before the others are made
    try:
        run_all([t for t in ranks.share(tasks) if not t.file.exists()], training, corpus, jobs, threads, progress)
        if ranks.rank:
            wait_for([out / "result.json"])
            return Comparison.read(out / "result.json")
        wait_for([task.file for task in tasks])
        with threads_of(threads):
            found = _result(plan, tasks, options, name, out, progress)
    except Exception as error:
        if not disk_full(error):
            raise
        sentence = f"the disk is full: writing {out}; what is finished stays there: make room and repeat the command"
        raise OSError(errno.ENOSPC, sentence) from error
    return found


def _check_folder(out: Path) -> None:
    taken = out.is_symlink() or (out.exists() and not out.is_dir())
    held = [] if taken or not out.exists() else [file for file in out.iterdir() if file.suffix != ".tmp"]
    if taken or (held and not (out / "job.json").exists()):
        raise FileExistsError(f"{out} exists already and holds no comparison; choose another folder with --out")


def _recorded(out: Path) -> int | None:
    """The threads of the comparison in a folder."""
    try:
        return int(json.loads((out / "job.json").read_text(encoding="utf-8"))["threads"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _result(
    plan: Plan, tasks: Sequence[Task], options: dict[str, Any], text: str, out: Path, progress: Progress
) -> Comparison:
    designs = {line: fitted.design for line, fitted in zip(plan.lines, plan.fitted, strict=True)}
    training = plan.training
    stepped = step_times(designs, training, plan.corpus, lambda *step: progress("time training", *step))
    decoded = decode_times(designs, training.context, training.dtype, lambda *step: progress("time decoding", *step))
    entries = tuple(
        _entry(plan, index, [task for task in tasks if task.design == fitted.design], stepped, decoded, options)
        for index, fitted in enumerate(plan.fitted)
    )
    notes = list(plan.notes)
    for entry in entries:
        if lost := sum(not math.isfinite(loss) for loss in entry.losses):
            notes.append(f"{entry.spec}: {lost} of {len(entry.losses)} runs diverged; a smaller --lr may help")
    found = Comparison(
        entries, training.grid, options, text, datetime.date.today().isoformat(), machine(),
        round(sum(entry.seconds for entry in entries), 1), tuple(notes), str(out), str(out / "report.html"),
    )  # fmt: skip
    found = write_comparison(found, out)
    for scrap in (out / "runs").glob("*.tmp"):  # of a process that was killed
        scrap.unlink(missing_ok=True)
    write_text(json.dumps(found.to_json(), indent=1, ensure_ascii=False), out / "result.json")
    return found


def _entry(
    plan: Plan, index: int, tasks: Sequence[Task], stepped: dict[str, Timing], decoded: dict[str, Timing],
    options: dict[str, Any],
) -> Entry:  # fmt: skip
    line, fitted = plan.lines[index], plan.fitted[index]
    runs = [read_run(task.file) for task in tasks]
    return Entry(
        spec=line,
        resolved=str(Spec.parse(line).resolve(Site(layers=fitted.design.layers))),
        dim=fitted.design.dim,
        hidden=fitted.design.inner,
        parameters=fitted.costs.parameters,
        flops=fitted.costs.flops,
        cache=fitted.costs.cache,
        cache_measured=plan.cached[index] / plan.training.context,
        off=None if options["equal"] == "none" else fitted.off,
        curves=tuple(run.curve for run in runs),
        step_ms=stepped[line].median,
        tokens_per_second=1e3 / decoded[line].median,
        seconds=round(sum(run.seconds for run in runs), 1),
    )
