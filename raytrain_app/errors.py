"""Every error that a user may see, and the exit code each one ends the program with.

An error is one or two plain sentences: what is wrong, where, what was found, what was expected, what to do. All of them
can be pickled, since they travel from workers to the driver.
"""

from __future__ import annotations

EXIT_DONE = 0
EXIT_WRONG_INPUT = 2
EXIT_NO_RESOURCES = 3
EXIT_FAILED = 4
EXIT_LOST = 5
EXIT_INTERRUPTED = 130


class RaytrainError(Exception):
    """Base of all errors raised on purpose by raytrain.

    Attributes:
        exit_code: what the command ends with.
        traceback: text of the task's own traceback where its code raised, else empty.
    """

    exit_code = EXIT_FAILED
    traceback = ""


class JobError(RaytrainError):
    """The job file or the command line is wrong; the message lists every problem found, one a line."""

    exit_code = EXIT_WRONG_INPUT


class DataError(RaytrainError):
    """The data is missing, damaged or not what the task expects; found before training begins."""

    exit_code = EXIT_WRONG_INPUT


class StorageError(RaytrainError):
    """The run's storage cannot be used, or holds something that must not be overwritten."""

    exit_code = EXIT_WRONG_INPUT


class ClusterError(RaytrainError):
    """The cluster could not give what the job needs in the time allowed."""

    exit_code = EXIT_NO_RESOURCES


class LostJobError(RaytrainError):
    """A submitted job was lost sight of: how it ended, or whether, is not known here."""

    exit_code = EXIT_LOST


class TrainingError(RaytrainError):
    """Training failed."""

    exit_code = EXIT_FAILED

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message, traceback)
        self.traceback = traceback

    def __str__(self) -> str:
        return str(self.args[0])


class Interrupted(RaytrainError):
    """The run was asked to stop; it is checkpointed and can be resumed."""

    exit_code = EXIT_INTERRUPTED
