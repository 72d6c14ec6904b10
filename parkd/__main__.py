"""The process, as `parkd` and `python -m parkd` start it. The imports of the commands take a second or more on a busy
machine, and a signal may come in that time too, so it is heeded before them."""

from __future__ import annotations

import os
import signal
from typing import NoReturn

EXIT_INTERRUPTED = 130


def entry() -> NoReturn:
    """Runs the command in `sys.argv`. A signal during the imports ends the process at once: nothing is open yet, and an
    exception could be lost in a library that is being imported, or come out of it as another."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # stopped as asked, as later
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell may have it ignored
        signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))
    from parkd import cli

    cli.entry()


if __name__ == "__main__":
    entry()
