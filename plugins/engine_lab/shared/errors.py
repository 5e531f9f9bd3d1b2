"""What ends a command in one line instead of a traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class EvalError(ValueError):
    """What was asked for makes no sense, or not with this model or file: the user can change it. Exit status 2."""


class EvalFailed(RuntimeError):
    """A plan or the system broke while everything was as it should be. Exit status 1."""


def complain(command: str, error: object, status: int) -> int:
    """Say on standard error what was wrong with a command; returns its exit status."""
    print(f"engine {command}: {error}", file=sys.stderr)
    return status


@contextmanager
def explained() -> Iterator[None]:
    """Turns what loading and generating say of a checkpoint, of memory or of a request into the errors above.

    Anything else that is raised is a fault in the code, and keeps its traceback.
    """
    import torch  # first needed when a plan is built

    from engine.checkpoint.tensors import CheckpointError
    from engine.service.offline import GenerationFailed

    try:
        yield
    except CheckpointError as error:
        raise EvalError(str(error)) from error
    except GenerationFailed as error:
        raise EvalFailed(str(error)) from error
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise EvalFailed(f"out of memory ({error}): compare fewer plans at once, or set a smaller --context") from error
