"""The start of `python -m experiments.NAME`, before slow imports. It imports only the standard library.

A missing package and Ctrl-C print one line instead of a traceback. It also installs the signal handlers of the training
program.
"""

import ast
import os
import shlex
import sys
from pathlib import Path
from types import TracebackType

from experiments import packages, signals

HELP = {"-h", "--help", "--help-all"}
# Disables XLA's Triton matmuls. Its autotuner would try them for every shape. With them, XLA also calls cuBLASLt with
# wider operands, so fp8jax would use its own kernels (fp8jax.ops.matmul.hopper).
RECOMMENDED_FLAGS = "--xla_gpu_enable_triton_gemm=false"


def begin() -> None:
    """Prepares this process if Python is about to run a program of `experiments`."""
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
        # The imports before the parser failed, but the program's purpose can be printed.
        help_flags = HELP & set(arguments)
        if help_flags:
            print(purpose(program), flush=True)
        _end(f"error: {line}", 0 if help_flags else 2)

    sys.excepthook = hook
    if program == "experiments.train":
        command = shlex.join(["python", "-m", program, *arguments])
        # Other processes of a run would wait for a process that ends before it joins.
        several = any(word.partition("=")[0] == "--coordinator" for word in arguments)
        signals.started = signals.StopSignals("" if several else command).__enter__()


def _program(words: list[str]) -> tuple[str, list[str]]:
    """Returns the module after -m on Python's command line, and the arguments after it."""
    for i, word in enumerate(words[1:], 1):
        if word.startswith("-") and not word.startswith("--") and "m" in word:
            flags, _, module = word.partition("m")
            if flags.lstrip("-").isalpha() or flags == "-":
                return (module, words[i + 1 :]) if module else ("".join(words[i + 1 : i + 2]), words[i + 2 :])
    return "", []


def purpose(program: str) -> str:
    """Returns the docstring of a program, without importing it."""
    path = Path(__file__).parents[1].joinpath(*program.split("."))
    paths = (path / "__main__.py", path / "__init__.py") if path.is_dir() else (path.with_suffix(".py"),)
    return next(filter(None, (ast.get_docstring(ast.parse(each.read_text())) for each in paths)), program)


def _end(line: str, code: int) -> None:
    print(line, file=sys.stderr, flush=True)
    os._exit(code)


def recommend_flags() -> str:
    """Adds `RECOMMENDED_FLAGS` to XLA_FLAGS unless this names the flag already; returns XLA_FLAGS.

    Call this before JAX uses a device, because XLA reads the flags then.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if RECOMMENDED_FLAGS.partition("=")[0] not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {RECOMMENDED_FLAGS}".strip()
    return os.environ["XLA_FLAGS"]
