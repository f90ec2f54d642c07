"""The tables and figures of the papers, each made by one command: `python -m experiments.papers` lists them.

Those of real moments and activations train a small model first (`common.FLAGS`). It stays under runs/ for the others.
"""
