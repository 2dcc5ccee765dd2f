"""Every error the library raises on purpose.

Each message names the argument, what was expected, what came and the likely fix.
"""

from typing import NoReturn


class FuncspecError(Exception):
    """Base class of all errors raised by funcspec."""


class ArgumentError(FuncspecError, ValueError):
    """An argument has the right type but a value that cannot work."""


class ArgumentTypeError(FuncspecError, TypeError):
    """An argument has the wrong type or dtype."""


class CapacityError(ArgumentError):
    """A preallocated buffer is too small: no free row, prompt too long, too many stop ids."""


class PoolExhaustedError(CapacityError):
    """Too few free KV blocks. Nothing was written."""


class StateError(FuncspecError, ValueError):
    """A state cannot be used for this step."""


class DonatedStateError(StateError):
    """The state was consumed by an earlier step that ran with `donate=True`."""


class StepOrderError(StateError):
    """The state is at another point of the round than the step needs."""


class StaleScoresError(StateError):
    """Scores were made from another state than the one they are applied to."""


class ModelError(FuncspecError, ValueError):
    """A model breaks its contract or does not fit the state or its partner."""


class FileError(FuncspecError, ValueError):
    """A file is not what it should be. Nothing was made of it."""


class BackendError(FuncspecError, RuntimeError):
    """The asked-for kernel backend cannot run here."""


def refuse(argument: str, expected: str, actual: object, fix: str, error: type[Exception] = ArgumentError) -> NoReturn:
    """Raise `error` in the library's one message form.

    Args:
        argument: name of the offending argument, as the caller spells it.
        expected: what would have been right.
        actual: what came.
        fix: the likely remedy.
        error: class to raise, an `ArgumentError` unless told otherwise.

    Raises:
        error: always.

    Example:
        >>> refuse("chunk", "a positive integer", 0, "leave it out")
        Traceback (most recent call last):
        funcspec.errors.ArgumentError: chunk: expected a positive integer, got 0. Fix: leave it out.
    """
    raise error(f"{argument}: expected {expected}, got {actual}. Fix: {fix}.")


def type_name(value: object) -> str:
    """How messages call what a value is: a class by its own name."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def check_bool(argument: str, value: object) -> None:
    """Refuse anything but True and False."""
    if not isinstance(value, bool):
        refuse(argument, "True or False", repr(value)[:60], "pass a bool", ArgumentTypeError)


def check_int(argument: str, value: object, least: int) -> None:
    """Refuse anything but an int of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool):
        refuse(argument, "an int", f"{value!r:.60} ({type(value).__name__})", "pass a plain Python int", ArgumentTypeError)
    if value < least:
        refuse(argument, f"at least {least}", value, "pass a larger number")
