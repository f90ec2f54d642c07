"""SIGINT and SIGTERM as flags, from the start of a program. It imports only the standard library, to load first."""

import os
import signal
from types import FrameType


class Stopped(Exception):
    """The user asked to stop. `signum` is the signal, `step` the step that is saved, if training had begun."""

    def __init__(self, signum: int, step: int | None = None) -> None:
        super().__init__(signum, step)
        self.signum, self.step = signum, step

    def message(self, command: str) -> str:
        """The message for the user: the signal, the saved state, and the command to continue."""
        saved = f"step {self.step} is saved" if self.step else "no step was lost"
        name = signal.Signals(self.signum).name
        return f"stopped by {name}: {saved}. To resume: {command.replace(' --resume never', '')}"


class StopSignals:
    """Context manager that turns the first SIGINT or SIGTERM into a flag; a second one ends the program at once.

    Attributes:
        signum: number of the first signal, or None.
        command: the program's command line while the first signal also ends it at once, with a message; else "".
        notice: text to print at the first signal.
    """

    def __init__(self, command: str = "") -> None:
        self.signum: int | None = None
        self.command, self.notice = command, ""
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopSignals":
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._before.setdefault(signum, signal.getsignal(signum))
        self.renew()
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]
        self._before = {}

    def renew(self) -> None:
        """Installs the handlers again, after other code has replaced them."""
        for signum in self._before:
            signal.signal(signum, self._note if self.signum is None else signal.SIG_DFL)

    def check(self) -> None:
        """Raises Stopped if a signal was received."""
        if self.signum is not None:
            raise Stopped(self.signum)

    def _note(self, signum: int, _: FrameType | None) -> None:
        if self.command:
            _print_to_stderr(Stopped(signum).message(self.command))
            os._exit(128 + signum)
        self.signum = signum
        self.renew()
        if self.notice:
            _print_to_stderr(self.notice)


def _print_to_stderr(line: str) -> None:
    # Not `print`: a handler may run inside a call of it.
    os.write(2, f"{line}\n".encode(errors="replace"))


# Signals of a program started by `experiments.startup`; None in a process that only imports its module.
started: StopSignals | None = None
