"""Measures all that README and RESULTS quote, file by file: `make results`, or `python -m experiments.results`.

One command makes each file of results/CARD/, on one card at one commit. A file whose rows are of this commit and card
is skipped, so that an interrupted run continues where it stopped. Do not edit these files. `--list` shows the existing
files and, from git, later changes; `--dry` runs the benchmarks' code on a CPU, small and without measuring.

Each job uses its number of GPUs; on a host with more GPUs, jobs run in parallel. The files of one GPU need an hour and
a half on an H100, and a quarter of that with four on one host. With `--cpu` the papers' tables are made that need none;
with `--data TEXT` the studies train, two on each GPU, since nothing is timed.
"""
