"""SIGINT and SIGTERM as flags, from the first moment of a program on. Standard library alone: it is imported first."""

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
        signum: of the first signal, or None.
        command: the program's command line, while the first signal, too, ends it at once, with a message; else "".
        notice: what is printed at the first signal.
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
        """Takes the signals again, which other code has taken for itself in the meantime."""
        for signum in self._before:
            signal.signal(signum, self._note if self.signum is None else signal.SIG_DFL)

    def check(self) -> None:
        """Raises Stopped where a signal has come."""
        if self.signum is not None:
            raise Stopped(self.signum)

    def _note(self, signum: int, _: FrameType | None) -> None:
        if self.command:
            _say(Stopped(signum).message(self.command))
            os._exit(128 + signum)
        self.signum = signum
        self.renew()
        if self.notice:
            _say(self.notice)


def _say(line: str) -> None:
    # Not by `print`: a handler may run within a call of it.
    os.write(2, f"{line}\n".encode(errors="replace"))


# Those of a program that `experiments.startup` began; None in a process that only imports its module.
started: StopSignals | None = None
