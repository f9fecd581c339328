"""A page opened in headless Chromium."""

import subprocess
from pathlib import Path


def drawn(chromium: str, page: Path, folder: Path) -> str:
    """The page's elements once its script has run, which said nothing to the console."""
    quiet = ("gpu", "quic", "background-networking", "component-update", "sync", "dev-shm-usage")
    flags = [*(f"--disable-{name}" for name in quiet), "--headless", "--no-sandbox", "--no-first-run"]
    flags += ["--virtual-time-budget=8000", "--enable-logging=stderr", "--dump-dom"]
    command = [chromium, *flags, f"--user-data-dir={folder / 'profile'}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=120)
    assert done.returncode == 0, done.stderr
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line], done.stderr
    return done.stdout
