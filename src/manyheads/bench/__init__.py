"""Measuring what a change costs (time, bytes, quality) and showing it on one page."""
