"""Does a mechanism learn better, as its paper says? `python benchmarks/quality.py`, at a scale of minutes.

Small byte-level decoders of equal parameters, three seeds each, trained on Python's help topics by `manyheads compare`.
Beside each loss stands what the paper claims of the mechanism, and whether this scale shows it: a difference counts
that is twice its standard error, paired over seeds. The folder is gone on with when the command is given again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from manyheads.bench.compare import compare
from manyheads.bench.comparison import Comparison, Entry
from manyheads.cli.output import Bars

CLAIMS: dict[str, str] = {
    "gqa": "base",
    "gqa(kv_heads=1)": "worse",
    "gqa(kv_heads=2)": "as good",
    "mla(rank=48, rope_dim=16)": "as good",
    "kha": "better",
    "talking_heads": "better",
    "gda": "better",
    "dcmha": "better",
    "mea": "better",
    "moh(top=3)": "as good",
    "output_gate": "better",
    "window(32)": "worse",
    "linear-attention": "worse",
    "softmax-linear-attention": "worse",
    "retnet": "as good",
    "gated-linear-attention": "as good",
    "gated_delta_net": "better",
    "mamba2": "as good",
    "hymba": "better",
}
"""Against multi-head softmax attention of as many parameters; what papers say of far larger models."""

MOE = "moe(experts=4, top=2, hidden=128, act=gelu)"
STACKS: tuple[tuple[str, str, str, str | None], ...] = (
    ("residual", "mhar(heads=4)", "better", None),
    ("ffn", MOE, "worse", None),
    ("ffn", "mh_moe(heads=4, experts=48, hidden=32, top=4, act=gelu)", "better", MOE),
)
"""Options of the whole stack, with multi-head attention; the last field: the option's value that the claim is against."""


def shown(difference: float, error: float | None) -> str:
    """What this scale shows: `better`, `worse`, or `no difference`."""
    if error is None or abs(difference) < 2 * error:
        return "no difference"
    return "better" if difference < 0 else "worse"


def verdict(claim: str, found: str) -> str:
    if claim == "base":
        return ""
    agrees = claim == found or (claim == "as good" and found != "worse")
    return "reproduced" if agrees else "not reproduced"


def row(name: str, entry: Entry, difference: float, error: float | None, claim: str) -> str:
    found = "" if claim == "base" else shown(difference, error)
    apart = "" if claim == "base" else f"{difference:+.3f} ± {error or 0:.3f}".replace("-", "−")
    return (
        f"| `{name}` | {entry.parameters:,} | {entry.loss:.3f} ± {entry.spread:.3f} | {apart} | {claim} | {found} | "
        f"{verdict(claim, found)} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path("quality"), help="folder of the runs")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "quality.md")
    options = parser.parse_args()
    size = {"dim": 128, "heads": 4, "layers": 4, "context": 128, "batch": 8}
    runs = {"steps": options.steps, "seeds": options.seeds, "jobs": options.jobs, "threads": 1}
    with Bars() as bars:
        found = compare([*CLAIMS], equal="params", out=options.work / "specs", progress=bars, **size, **runs)
        rows = [
            row(entry.spec, entry, *found.difference(entry), claim)
            for entry, claim in zip(found.entries, CLAIMS.values(), strict=True)
        ]
        others: dict[str | None, Comparison] = {None: found}
        for name, value, claim, against in STACKS:
            out = options.work / f"{name}-{value.partition('(')[0]}"
            others[value] = compare(["gqa"], out=out, progress=bars, **{name: value}, **size, **runs)  # type: ignore[arg-type]
            base, entry = others[against], others[value].base
            beside = "" if against is None else f", against {against.partition('(')[0]}"
            rows.append(row(f"{name}: {value}{beside}", entry, *base.difference(entry), claim))
    reproduced = sum("| reproduced |" in line for line in rows)
    lines = [
        "# Loss at a small scale beside what papers claim",
        "",
        f"Measured with `python benchmarks/quality.py`: byte-level decoders of 4 layers, 4 heads and about {found.base.parameters / 1e6:.2f} M",
        f"parameters (widths and feed-forwards solved for equal parameters), {options.steps} steps of 8 x 128 bytes of Python's help",
        f"topics, {options.seeds} seeds; loss in nats a byte on held-out text. A difference counts from twice its standard error, paired",
        f"over seeds. Claims are about far larger models and longer training; {reproduced} of {len(rows) - 1} show here.",
        "",
        "| spec | parameters | loss ± std | to the base ± error | claimed | found | at this scale |",
        "|---|---|---|---|---|---|---|",
        *rows,
    ]
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
