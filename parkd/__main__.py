"""The process, as `parkd` and `python -m parkd` start it. The imports of the commands take a second or more on a busy
machine, and a signal may come in that time too, so it is heeded before them."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import NoReturn

EXIT_INTERRUPTED = 130


def _end(code: int, *_: object) -> NoReturn:
    os._exit(code)


def entry() -> NoReturn:
    """Runs the command in `sys.argv`. A signal during the imports ends the process at once: nothing is open yet, and an
    exception could be lost in a library that is being imported, or come out of it as another."""
    ends = {"SIGTERM": 0, "SIGHUP": 0, "SIGINT": EXIT_INTERRUPTED}  # as later; 0: stopped as asked
    for name, code in ends.items():
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a shell's background
            signal.signal(number, partial(_end, code))
    from parkd import cli

    cli.entry()


if __name__ == "__main__":
    entry()
