"""Checkpoints of Hugging Face, in and out of `experiments.models`: README.md beside this file says of which families.

Imports run one way: `files`, `fields` -> `families` -> `quantized` -> `load`, `save`.
"""
