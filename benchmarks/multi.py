"""Many heads on one trunk against a model for each: `python benchmarks/multi.py`, on data sets that scikit-learn ships.

Quality at equal total parameters, with all labels and with 30 % of the training labels gone; the time of a step of 8
heads beside that of 1; and what each way of balancing losses adds to a step. Needs scikit-learn and torchjd.
"""

from __future__ import annotations

import argparse
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.bench.timing import interleaved, machine
from manyheads.multi.fit import make_trunk
from manyheads.multi.head import read_head
from manyheads.multi.loop import fit, measure, parameters, single_width
from manyheads.multi.model import MultiHead

WIDTH, LAYERS, DROPOUT, MISSING, SEEDS = 64, 2, 0.1, 0.3, 5
FIT = dict(epochs=60, patience=10, batch=64, lr=3e-3)


@dataclass
class Data:
    """Features `[rows, columns]`, and by head its line and labels."""

    x: Tensor
    heads: dict[str, tuple[str, Tensor]]


def quartile(values: Tensor) -> Tensor:
    return torch.bucketize(
        values.contiguous(), values.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=values.dtype))
    ).double()


def carried(name: str, **options: Any) -> Any:
    """A data set that scikit-learn carries."""
    return getattr(import_module("sklearn.datasets"), f"load_{name}")(**options)


def digits() -> Data:
    found = carried("digits")
    x, y = torch.tensor(found.data), torch.tensor(found.target).double()
    holes = torch.tensor([1, 0, 0, 0, 0, 0, 1, 0, 2, 1.0]).double()[y.long()]
    return Data(x, {
        "class": ("classification(classes=10)", y), "parity": ("classification(classes=2)", y % 2),
        "value": ("ordinal(levels=10)", y), "holes": ("classification(classes=3)", holes),
        "mass": ("regression", x.sum(1)),
        "slant": ("regression", slant(x.view(-1, 8, 8))),
    })  # fmt: skip


def slant(image: Tensor) -> Tensor:
    """The covariance of row and column under the ink, over the variance of the row."""
    at = torch.arange(8, dtype=image.dtype)
    ink = image.sum((1, 2))
    row, column = (image.sum(2) @ at / ink, image.sum(1) @ at / ink)
    rows, columns = at - row[:, None], at - column[:, None]
    return torch.einsum("brc,br,bc->b", image, rows, columns) / (image.sum(2) * rows**2).sum(1)


def diabetes() -> Data:
    found = carried("diabetes", scaled=False)
    names, x, y = found.feature_names, torch.tensor(found.data), torch.tensor(found.target)
    own = {name: x[:, names.index(name)] for name in ("age", "bmi", "bp")}
    rest = [index for index, name in enumerate(names) if name not in own]
    return Data(x[:, rest], {
        "progression": ("regression", y), "quarter": ("ordinal(levels=4)", quartile(y)),
        **{name: ("regression", values) for name, values in own.items()},
    })  # fmt: skip


def linnerud() -> Data:
    found = carried("linnerud")
    y = torch.tensor(found.target)
    return Data(
        torch.tensor(found.data), {name: ("regression", y[:, at]) for at, name in enumerate(found.target_names)}
    )


def cancer() -> Data:
    found = carried("breast_cancer")
    x, names = torch.tensor(found.data), list(found.feature_names)
    worst = {name: x[:, names.index(f"worst {name}")] for name in ("area", "concavity", "texture")}
    inputs = [at for at, name in enumerate(names) if not name.startswith("worst")]
    return Data(x[:, inputs], {
        "benign": ("classification(classes=2)", torch.tensor(found.target).double()),
        "size": ("ordinal(levels=4)", quartile(worst["area"])),
        **{f"worst {name}": ("regression", values) for name, values in worst.items()},
    })  # fmt: skip


SETS: dict[str, Callable[[], Data]] = {
    "digits": digits, "diabetes": diabetes, "linnerud": linnerud, "breast cancer": cancer,
}  # fmt: skip


def scores(data: Data, seed: int, missing: float, options: dict) -> dict[str, dict[str, float]]:
    """The first metric (of numbers R²) of each head on rows never looked at: of one model, and of a model each."""
    torch.manual_seed(seed)
    order = torch.randperm(len(data.x))
    count = max(2, len(order) // 5)
    test, rest, train = order[:count], order[count : 2 * count], order[2 * count :]
    spread_of = data.x[train].std(0)
    x = (data.x - data.x[train].mean(0)) / spread_of.where(spread_of > 0, 1.0)
    y, heads = {}, {}
    for name, (line, labels) in data.heads.items():
        if line == "regression":
            head = read_head(f"regression(shift={labels[train].mean():.6f}, scale={labels[train].std():.6f})")
        else:
            head = read_head(line)
        heads[name], y[name] = head, labels.clone()
        y[name][train[torch.rand(len(train)) < missing]] = math.nan

    def model(names: list[str], width: int) -> MultiHead:
        torch.manual_seed(seed)
        return MultiHead(trunk(width), {name: heads[name] for name in names}, width=width).float()

    def trunk(width: int) -> nn.Module:
        return make_trunk(x.shape[1], width, LAYERS, DROPOUT)

    def figure(found: dict[str, float]) -> float:
        return found["r2"] if "r2" in found else found["accuracy"]

    x = x.float()
    held = {name: data.heads[name][1][test] for name in heads}
    many = model([*heads], WIDTH)
    fit(many, x, y, train, rest, **options)
    found = {"many": {n: figure(each) for n, each in measure(many, x[test], held).metrics.items()}, "single": {}}
    width, total = single_width(trunk, heads, WIDTH), 0
    for name in heads:
        alone, rows = model([name], width), train[~y[name][train].isnan()]
        fit(alone, x, {name: y[name]}, rows, rest, **options)
        found["single"][name] = figure(measure(alone, x[test], {name: held[name]}).metrics[name])
        total += parameters(alone)
    found["sizes"] = {"many": parameters(many), "single": total, "width": width}
    return found


def quality(seeds: int, options: dict) -> list[str]:
    lines = [
        "| data | head | metric | one model | a model each | difference | one, 30 % gone | each, 30 % gone | one loses | each lose |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    sizes, won, lost, ahead = [], 0, 0, 0
    gaps: dict[str, list[float]] = {"many": [], "single": []}
    for name, make in SETS.items():
        data = make()
        runs = {part: [scores(data, seed, part, options) for seed in range(seeds)] for part in (0.0, MISSING)}
        size = runs[0.0][0]["sizes"]
        sizes.append(f"{name} {size['many']:,} and {size['single']:,.0f} ({size['width']} wide)")
        for head, (line, _) in data.heads.items():
            cells = {(part, kind): [run[kind][head] for run in found] for part, found in runs.items() for kind in gaps}
            apart = [a - b for a, b in zip(cells[0.0, "many"], cells[0.0, "single"], strict=True)]
            error = stdev(apart) / math.sqrt(seeds) if seeds > 1 else math.inf
            won += mean(apart) > 2 * error
            lost += mean(apart) < -2 * error
            gone = {}
            for kind in gaps:
                gone[kind] = mean(cells[0.0, kind]) - mean(cells[MISSING, kind])
                gaps[kind].append(gone[kind])
            ahead += mean(cells[MISSING, "many"]) > mean(cells[MISSING, "single"])
            metric = "R²" if line == "regression" else "accuracy"
            shown = [spread(cells[part, kind]) for part in (0.0, MISSING) for kind in gaps]
            lines.append(
                f"| {name} | {head} | {metric} | {shown[0]} | {shown[1]} | {signed(mean(apart))} ± {error:.3f} | {shown[2]} | "
                f"{shown[3]} | {signed(gone['many'])} | {signed(gone['single'])} |"
            )
            print(lines[-1], flush=True)
    count = len(lines) - 2
    middle = {kind: sorted(values)[count // 2] for kind, values in gaps.items()}
    return [
        *lines, "",
        f"Of {count} heads one model is better by more than twice the standard error (paired by seed) for {won}, worse for {lost}.",
        f"With 30 % of training labels gone, one model is the better for {ahead} of them; the median head loses {middle['many']:.3f} on one",
        f"trunk and {middle['single']:.3f} alone. Parameters of one model and of all models of a head: {'; '.join(sizes)}.",
    ]  # fmt: skip


def signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")


def spread(values: list[float]) -> str:
    return f"{mean(values):.3f}{f' ± {stdev(values):.3f}' if len(values) > 1 else ''}".replace("-", "−")


# --- time


def trunk_of(millions: float) -> tuple[nn.Module, int]:
    """Four layers of one width, as many parameters as asked for."""
    width = round(math.sqrt(millions * 1e6 / 4))
    return nn.Sequential(*(each for _ in range(4) for each in (nn.Linear(width, width), nn.GELU()))), width


def heads_of(count: int) -> dict[str, str]:
    kinds = ("classification(classes=10)", "regression", "ordinal(levels=5)", "multi-label(labels=4)")
    return {f"h{at}": kinds[at % 4] for at in range(count)}


def labels_of(count: int, rows: int) -> dict[str, Tensor]:
    made = (torch.randint(10, (rows,)), torch.randn(rows), torch.randint(5, (rows,)), torch.randint(2, (rows, 4)))
    return {f"h{at}": made[at % 4] for at in range(count)}


def stepper(count: int, millions: float, rows: int, balance: object = "sum") -> Callable[[], None]:
    torch.manual_seed(0)
    trunk, width = trunk_of(millions)
    model = MultiHead(trunk, heads_of(count), width=width, balance=balance)
    optimiser = torch.optim.AdamW(model.parameters(), 1e-4)
    x, targets = torch.randn(rows, width), labels_of(count, rows)

    def step() -> None:
        optimiser.zero_grad()
        model(x, targets=targets).loss.backward()
        optimiser.step()

    return step


def times(rounds: int, millions: float, rows: int) -> list[str]:
    lines = ["| heads | step, ms | times one head's | to reach |", "|---|---|---|---|"]
    steps = {str(count): stepper(count, millions, rows) for count in (1, 2, 4, 8)}
    timed = interleaved(steps, rounds, warmup=2)
    for count, each in timed.items():
        bar = "≤ 1.3" if count == "8" else ""
        lines.append(f"| {count} | {each.median:.1f} | {timed['1'].ratio(each):.3f} | {bar} |")
        print(lines[-1], flush=True)
    return lines


def aggregators(heads: int) -> dict[str, object]:
    """Every aggregator of torchjd that can be made here, those with options by the ones below; and why others cannot."""
    try:
        library = import_module("torchjd.aggregation")
    except ImportError as error:
        return {"torchjd": error}
    options = {
        "CAGrad": {"c": 0.5}, "Constant": {"weights": torch.full((heads,), 1 / heads)}, "FairGrad": {"alpha": 1.0},
        "Krum": {"n_byzantine": 1, "n_selected": heads - 3}, "NashMTL": {"n_tasks": heads}, "TrimmedMean": {"trim_number": 1},
    }  # fmt: skip
    found: dict[str, object] = {}
    for name, kind in vars(library).items():
        concrete = isinstance(kind, type) and issubclass(kind, library.Aggregator) and not inspect.isabstract(kind)
        if concrete and name not in ("Aggregator", "GramianWeightedAggregator", "WeightedAggregator"):
            try:
                found[name] = kind(**options.get(name, {}))
                found[name](torch.randn(heads, 16))  # type: ignore[operator]
            except (ImportError, TypeError, ValueError) as error:
                found[name] = error
    return found


def balances(rounds: int, millions: float, rows: int, heads: int = 8) -> list[str]:
    lines = [
        "| balance | step, ms | times `sum` | more, ms |",
        "|---|---|---|---|",
    ]
    made = aggregators(heads)
    usable: dict[str, object] = {"sum": "sum", "uncertainty": "uncertainty"}
    usable |= {name: each for name, each in made.items() if not isinstance(each, Exception)}
    base = stepper(heads, millions, rows)
    first = True
    for name, balance in usable.items():  # two at a time: all models at once would not be held in memory for long
        steps = {"base": base} if first else {"base": base, name: stepper(heads, millions, rows, balance)}
        timed = interleaved(steps, rounds, warmup=1)
        one, other = timed["base"], timed.get(name, timed["base"])
        more = median(b - a for a, b in zip(one.samples, other.samples, strict=True))
        lines.append(f"| `{name}` | {other.median:.1f} | {one.ratio(other):.3f} | {more:.1f} |".replace("-", "−"))
        print(lines[-1], flush=True)
        first = False
    without = {name: str(each).splitlines()[0] for name, each in made.items() if isinstance(each, Exception)}
    if without:
        lines += ["", "Not made here: " + "; ".join(f"`{name}` ({why})" for name, why in without.items()) + "."]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--epochs", type=int, default=FIT["epochs"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--millions", type=float, default=10.0, help="parameters of the trunk that is timed")
    parser.add_argument("--rows", type=int, default=128, help="of a step that is timed")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "multi.md")
    options = parser.parse_args()
    torch.set_num_threads(min(2, torch.get_num_threads()))
    on = machine()
    timed = times(options.rounds, options.millions, options.rows)
    balanced = balances(options.rounds, options.millions, options.rows)
    torch.set_num_threads(1)  # small models: a second thread only waits
    found = quality(options.seeds, {**FIT, "epochs": options.epochs})
    lines = [
        "# Many heads on one trunk",
        "",
        f"Measured with `python benchmarks/multi.py` on {on}.",
        "",
        "## Against a model for each head, at equal total parameters",
        "",
        f"Data sets of scikit-learn; a trunk of {LAYERS} layers, {WIDTH} wide, against trunks as wide as makes all models of one head",
        f"together no larger. {options.seeds} seeds: split (60 % trained on, 20 % that say when to stop, 20 % measured), weights and order;",
        f"at most {options.epochs} epochs. Mean ± standard deviation; difference ± standard error, paired by seed. R² below 0: worse than the mean.",
        "What a head loses is how much lower its metric is with 30 % of the training labels gone.",
        "",
        *found,
        "",
        "## Time of a training step",
        "",
        f"A trunk of {options.millions:g} M parameters, {options.rows} rows, AdamW, median of {options.rounds} rounds side by side.",
        "",
        *timed,
        "",
        "## What balancing adds to a step of 8 heads",
        "",
        *balanced,
    ]  # fmt: skip
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
