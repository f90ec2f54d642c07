"""Bugs that tests must catch: `python -m tests.planted` says which are caught."""
