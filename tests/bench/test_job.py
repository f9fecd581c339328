"""What a job does about its options before any work."""

from pathlib import Path

import pytest
from transformers import LlamaConfig

from manyheads.bench import job
from manyheads.convert.adopt import adopted_config
from manyheads.convert.plan import BudgetError
from manyheads.convert.source import SourceError, load_source
from manyheads.convert.text import fitting, max_positions

CONFIG = adopted_config(
    LlamaConfig(
        hidden_size=24, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, intermediate_size=16,
        vocab_size=50, max_position_embeddings=64,
    )
)  # fmt: skip


def test_contexts_beyond_the_positions_are_cut_with_a_note():
    notes: list[str] = []
    assert job._within((8, 8, 24), CONFIG, notes) == (8, 24) and not notes
    assert job._within((8, 64, 9_999_999), CONFIG, notes) == (8, 64)
    assert notes == ["contexts above the model's 64 positions are timed at 64"]


def test_a_note_on_windows_is_made_once():
    notes: list[str] = []
    cuts = [fitting(cut, max_positions(CONFIG), notes) for cut in ((2, 90), (3, 90), (2, 60))]
    assert cuts == [(2, 64), (3, 64), (2, 60)]
    assert notes == ["windows of 90 tokens are longer than the model's 64 positions; cut to 64"]


def test_a_name_that_the_hub_does_not_know_is_asked_for_once(monkeypatch):
    asked = []
    monkeypatch.setattr(job, "download", lambda name, patterns: asked.append((name, patterns)) or Path("/nowhere"))
    assert job.quick_config("nobody/nothing") is None and asked == [("nobody/nothing", ["config.json"])]


def test_one_budget_in_two_spellings_is_refused():
    with pytest.raises(BudgetError, match="50% and 12 are the same budget, 12 numbers"):
        job._goals(CONFIG, ["50%", "12"], "mla")


@pytest.mark.parametrize("name", ["", " ", Path("")])
def test_no_name_is_not_the_working_folder(name):
    with pytest.raises(SourceError, match="name is empty"):
        load_source(name)
    assert job.quick_config("") is None
