"""Any text as the name of a module, which may hold no dot, and back."""

from __future__ import annotations


def escaped(text: str) -> str:
    """The text without dots; two texts never become one."""
    return text.replace("%", "%25").replace(".", "%2E")


def unescaped(key: str) -> str:
    """The text that `escaped` made this of."""
    return key.replace("%2E", ".").replace("%25", "%")


def key_of(name: str) -> str:
    """A name for a module: neither dots nor what modules themselves are called."""
    return "of " + escaped(name)


def name_of(key: str) -> str:
    """The name that `key_of` made this of."""
    return unescaped(key.removeprefix("of "))
