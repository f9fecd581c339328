"""Every example runs as a script, and the page of examples has a line for it."""

import re
import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
FAST = {
    "alternet": ("--seeds", "1", "--steps", "1"),
    "attention_deconstruction": ("--steps", "1"),
    "content_types": ("--steps", "1"),
    "align_lora": ("--steps", "1"),
    "combinatorial_aggregation": ("--seeds", "1", "--steps", "1"),
    "ednil": ("--seeds", "1", "--steps", "1"),
    "forgetting": ("--seeds", "1", "--steps", "1"),
    "head_curriculum": ("--rounds", "1", "--steps", "1"),
    "hlt_mt": ("--steps", "2"),
    "icl_regression": ("--steps", "1"),
    "interaction_operator": (),
    "learned_monoid": ("--seeds", "1", "--steps", "2"),
    "latent_control": ("--steps", "10"),
    "m_diffusion_planner": ("--steps", "1"),
    "memorization_capacity": ("--seeds", "1"),
    "non_target_heads": ("--steps", "1"),
    "rank_vs_heads": ("--seeds", "1", "--steps", "1"),
    "rgr_capacity": ("--seeds", "1", "--steps", "1"),
    "slt_mha": ("--seeds", "1"),
    "t3time": ("--seeds", "1", "--steps", "1"),
    "yq_lsa": ("--seeds", "1", "--steps", "1"),
}


def test_every_example_is_on_the_page_and_here():
    linked = re.findall(r"\]\((\w+)\.py\)", (FOLDER / "README.md").read_text(encoding="utf-8"))
    assert sorted(linked) == sorted(FAST) == sorted(path.stem for path in FOLDER.glob("*.py"))


@pytest.mark.parametrize("name", FAST)
def test_it_runs(name, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [name, *FAST[name]])
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 4 and max(map(len, lines)) <= 150
