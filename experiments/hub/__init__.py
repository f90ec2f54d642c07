"""Checkpoints of Hugging Face, in and out of `experiments.models`: docs/howto/hugging_face.md lists the families.

Imports run one way: `files`, `fields` -> `families` -> `quantized` -> `load`, `save`.
"""
