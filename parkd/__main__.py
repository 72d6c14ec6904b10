"""`python -m parkd`."""

from __future__ import annotations

from parkd.cli import entry

entry()
