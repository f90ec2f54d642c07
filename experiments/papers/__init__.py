"""Tables and figures of the papers. `python -m experiments.papers` lists the commands.

Tables of real moments and activations first train a small model (`common.FLAGS`). Its run in runs/ is reused.
"""
