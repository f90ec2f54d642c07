"""Errors with a message for the user."""


class UserError(Exception):
    """An error that the user can fix. The message is one line that names the value and the fix."""

    exit_code = 2


class DiskError(UserError):
    """A file could not be written."""

    exit_code = 3


class BusyError(UserError):
    """Another process is at work on the run."""

    exit_code = 4
