"""Reads and writes Hugging Face checkpoints for `experiments.models`. docs/howto/hugging_face.md lists the families.

Imports run one way: `files`, `fields` -> `families` -> `quantized` -> `load`, `save`.
"""
