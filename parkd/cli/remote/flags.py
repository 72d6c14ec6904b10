"""The flags with which every command names a running server."""

from __future__ import annotations

import argparse

from parkd.config import server_address
from parkd.errors import ConfigError


def add_server_flags(parser: argparse.ArgumentParser, where: argparse._ActionsContainer | None = None) -> None:
    """Adds --url, to the group `where` if one is given, and --api-key."""
    url, _ = server_address()
    (where or parser).add_argument("--url", metavar="URL", default=url, help=f"the server [{url}]; also PARKD_URL")
    parser.add_argument("--api-key", metavar="KEY", help="its API key; also PARKD_API_KEY")


def key_of(given: argparse.Namespace) -> str | None:
    """The key that was typed, else that of the environment. Raises ConfigError for one that cannot be sent, without
    repeating it."""
    typed: str | None = given.api_key
    key = server_address()[1] if typed is None else typed
    if key is not None and not (key.isascii() and key.isprintable()):
        named = "PARKD_API_KEY" if typed is None else "--api-key"
        raise ConfigError(f"{named} has a character that no key of a server has. Check it, also for a line's end.")
    return key
