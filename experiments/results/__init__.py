"""Measures all figures in README and RESULTS, file by file: `make results`, or `python -m experiments.results`.

Each file of results/CARD/ comes from one command on one card at one commit. Files of the current commit and card are
skipped, so an interrupted run continues where it stopped. Do not edit these files. `--list` shows the existing
files and, from git, later changes; `--dry` runs the benchmarks' code on a CPU, small and without measuring.

On a host with more GPUs than a job uses, jobs run in parallel. The single-GPU files take 100 minutes on an H100, and
a quarter of that on four. `--cpu` makes the papers' tables that need no GPU. `--data TEXT` trains the studies, two
per GPU, because they are not timed.
"""
