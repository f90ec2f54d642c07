"""The tables and figures of the papers, each made by one command: `python -m experiments.papers` lists them."""
