"""The first moments of `python -m experiments.NAME`, before imports that take seconds. Standard library alone.

A package that is missing, and Ctrl-C, are one line in place of a traceback. Signals of the training program are taken.
"""

import ast
import os
import shlex
import sys
from pathlib import Path
from types import TracebackType

from experiments import packages, signals

HELP = {"-h", "--help", "--help-all"}
# XLA's own Triton products off: its autotuner tries them for every shape, and with them on it calls cuBLASLt with
# widened operands, so that fp8jax takes its own kernels (fp8jax.ops.matmul.hopper).
RECOMMENDED_FLAGS = "--xla_gpu_enable_triton_gemm=false"


def begin() -> None:
    """Prepares this process for the program that Python is about to run, where it is one of `experiments`."""
    program, arguments = _program(sys.orig_argv)
    if program.partition(".")[0] != "experiments":
        return
    default_hook = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, KeyboardInterrupt):
            _end("stopped by SIGINT", 130)
        line = packages.explain(error, program) if isinstance(error, ModuleNotFoundError) else None
        if line is None:
            default_hook(kind, error, trace)
            return
        # The parser of this program comes after imports that failed. What the program is for can be said.
        help_flags = HELP & set(arguments)
        if help_flags:
            print(purpose(program), flush=True)
        _end(f"error: {line}", 0 if help_flags else 2)

    sys.excepthook = hook
    if program == "experiments.train":
        command = shlex.join(["python", "-m", program, *arguments])
        # Other processes of a run would wait for one that ends before it has joined them.
        several = any(word.partition("=")[0] == "--coordinator" for word in arguments)
        signals.started = signals.StopSignals("" if several else command).__enter__()


def _program(words: list[str]) -> tuple[str, list[str]]:
    """The module that -m names on Python's command line, and the arguments after it."""
    for i, word in enumerate(words[1:], 1):
        if word.startswith("-") and not word.startswith("--") and "m" in word:
            flags, _, module = word.partition("m")
            if flags.lstrip("-").isalpha() or flags == "-":
                return (module, words[i + 1 :]) if module else ("".join(words[i + 1 : i + 2]), words[i + 2 :])
    return "", []


def purpose(program: str) -> str:
    """The docstring of a program, which is not imported."""
    path = Path(__file__).parents[1].joinpath(*program.split("."))
    paths = (path / "__main__.py", path / "__init__.py") if path.is_dir() else (path.with_suffix(".py"),)
    return next(filter(None, (ast.get_docstring(ast.parse(each.read_text())) for each in paths)), program)


def _end(line: str, code: int) -> None:
    print(line, file=sys.stderr, flush=True)
    os._exit(code)


def recommend_flags() -> str:
    """Adds `RECOMMENDED_FLAGS` to XLA_FLAGS unless this names the flag already; returns XLA_FLAGS.

    XLA reads it when JAX first asks for a device: call this before.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if RECOMMENDED_FLAGS.partition("=")[0] not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {RECOMMENDED_FLAGS}".strip()
    return os.environ["XLA_FLAGS"]
