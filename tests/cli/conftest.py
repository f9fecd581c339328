"""A tiny model and one job's output, shared by all tests of the command line."""

from pathlib import Path

import pytest
from tests.cli.line import SMALL, run, save_tiny

from manyheads.bench import figures, job
from manyheads.convert import text as text_module
from manyheads.convert.text import default_text, second_text
from manyheads.edit import job as edit_job


@pytest.fixture(scope="session", autouse=True)
def short_jobs():
    """The default texts, read once and cut, and few timed steps: jobs would spend seconds on what no test looks at."""
    with pytest.MonkeyPatch.context() as patch:
        for name, text in (("default_text", default_text()[:40_000]), ("second_text", second_text()[:5_000])):
            for module in (text_module, job, edit_job):
                patch.setattr(module, name, lambda text=text: text, raising=module is not edit_job)
        patch.setattr(figures, "SAMPLE", 8)
        for module in (figures, edit_job):
            patch.setattr(module, "ROUNDS", 2)
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """Caches 4 · (6 + 6) = 48 numbers a token and layer."""
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def shrunk(short_jobs, tiny, tmp_path_factory) -> Path:
    """The output of one `shrink` with two candidates, not to be changed."""
    out = tmp_path_factory.mktemp("jobs") / "shrunk"
    ran = run("shrink", tiny, "--kv", "50%", "--kv", "25%", "--out", out, "--json", *SMALL)
    assert ran.code == 0, ran
    (out / "stdout.txt").write_text(ran.out)
    return out
