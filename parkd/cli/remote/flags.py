"""The flags with which every command names a running server."""

from __future__ import annotations

import argparse

from parkd.config import server_address


def add_server_flags(parser: argparse.ArgumentParser, where: argparse._ActionsContainer | None = None) -> None:
    """Adds --url, to the group `where` if one is given, and --api-key."""
    url, _ = server_address()
    (where or parser).add_argument("--url", metavar="URL", default=url, help=f"the server [{url}]; also PARKD_URL")
    parser.add_argument("--api-key", metavar="KEY", help="its API key; also PARKD_API_KEY")


def key_of(given: argparse.Namespace) -> str | None:
    """The key that was typed, else that of the environment."""
    key: str | None = given.api_key
    return server_address()[1] if key is None else key
