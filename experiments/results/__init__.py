"""Measures all that README and RESULTS quote, file by file: `make results`, or `python -m experiments.results`.

One command makes each file of results/CARD/, on one card at one commit. A file whose rows are of this commit and card
is left as it is, so that a run that was cut short goes on where it stopped; nobody edits one. `--list` says what is
there and, from git, what changed since; `--dry` runs the benchmarks' code on a CPU, small and without measuring.

Each job takes the GPUs that it is for; those of a host that has more run side by side. The files of one GPU take an
hour and a half of an H100, and with four of one host a quarter of it. With `--cpu` the papers' tables are made that
need none; with `--data TEXT` the studies train, two on each GPU, since nothing is timed.
"""
