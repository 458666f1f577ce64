"""How a block of work ended, known to whoever keeps a record of it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


class Terminated(SystemExit):
    """SIGTERM came."""


@contextlib.contextmanager
def ending(end: Callable[[str], None]) -> Iterator[None]:
    """Call `end` with how the block ended: FINISHED, KILLED by SIGTERM or an interrupt, or FAILED."""
    with _sigterm_as_exception():
        try:
            yield
        except (KeyboardInterrupt, Terminated):
            end("KILLED")
            raise
        except BaseException:
            end("FAILED")
            raise
        end("FINISHED")


@contextlib.contextmanager
def _sigterm_as_exception() -> Iterator[None]:
    """Let SIGTERM raise in the block, so that it is left in order. Only a main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(number: int, _frame: Any) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise Terminated(128 + number)

    previous = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
