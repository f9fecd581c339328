"""Experts: what serves a token, or a task, out of many."""
