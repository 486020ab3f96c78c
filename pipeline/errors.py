"""Every error that a user can meet, each with what to do next and an exit code.

Exit codes 0 to 3 belong to verdicts (see ``docs/exit-codes.md``); errors use the numbers of BSD's
``sysexits.h`` so that a script can tell "the engine is bad" from "the run is broken".
"""

from __future__ import annotations


class EnginegateError(Exception):
    """Base of all errors shown to the user: ``message`` names the item, ``next_step`` what to do."""

    exit_code = 70  # EX_SOFTWARE

    def __init__(self, message: str, next_step: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.next_step = next_step

    def __str__(self) -> str:
        return f"{self.message}\n  next: {self.next_step}" if self.next_step else self.message


class UsageError(EnginegateError):
    """The command line is wrong."""

    exit_code = 64  # EX_USAGE


class InputError(EnginegateError):
    """A file that the user gave cannot be used as it is."""

    exit_code = 65  # EX_DATAERR


class ConfigError(InputError):
    """``params.yaml`` or ``policy.yaml`` is wrong; the message starts with file, line and key."""

    exit_code = 78  # EX_CONFIG


class CheckpointError(InputError):
    """The checkpoint fails intake."""


class DataError(InputError):
    """Calibration or evaluation data cannot be used."""


class QuantizationError(EnginegateError):
    """Calibration or export did not produce what the recipe promises."""


class BuildError(EnginegateError):
    """A backend did not produce an engine, or the engine is not the model it was built from."""


class ServerError(EnginegateError):
    """A server did not start, died, hung, or answered with an error."""

    exit_code = 69  # EX_UNAVAILABLE


class IntegrityError(EnginegateError):
    """Bytes on disk are not the bytes that a manifest or a verdict speaks of."""

    exit_code = 65


class SignatureError(IntegrityError):
    """A signature is missing where one is asked for, or is not of these bytes by this key."""


class PromotionError(EnginegateError):
    """An engine may not, or cannot, be promoted."""

    exit_code = 77  # EX_NOPERM


class RegistryError(EnginegateError):
    """Git, a remote or a store does not answer, or holds less than the registry says."""

    exit_code = 69  # EX_UNAVAILABLE


class UnfitError(EnginegateError):
    """An engine cannot run on this machine."""

    exit_code = 69


class StorageError(EnginegateError):
    """The disk is full or a path cannot be written."""

    exit_code = 74  # EX_IOERR
