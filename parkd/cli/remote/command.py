"""`parkd ps`, `show`, `why`, `pin`, `unpin`, `keep`, `forget`, `bill` and `top`: a running server by command."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from rich.console import Console, RenderableType
from rich.live import Live

from parkd.cli.remote import tables
from parkd.cli.remote.client import RemoteServer, in_path
from parkd.cli.remote.flags import add_server_flags, key_of
from parkd.errors import ConfigError, InvalidRequest
from parkd.ledger.since import since_s

HELP = {
    "ps": "lists the conversations that are live or parked, as a tree of shared beginnings",
    "show": "shows one conversation, and its last turns",
    "why": "says why the last request, or one by its id, was read",
    "pin": "keeps a conversation, and what it grows to, from being evicted",
    "unpin": "ends that",
    "keep": "does so for a time",
    "forget": "forgets a conversation of a running server; with --park-dir, of a directory that none uses",
    "bill": "tells what cold reads cost, by cause, client and day, and what would prevent them",
    "top": "shows what runs, waits and is held, again and again",
}
COMMANDS = tuple(HELP)
EPILOGS = {"forget": "parkd forget --park-dir DIR --help tells how conversations of a park directory are removed."}
TURNS_SHOWN = 8
LEAST_STEP_S = 0.2
LONGEST_STEP_S = 3600.0
WIDTH_WITHOUT_TERMINAL = 120


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} ({self.prog} --help)")


def parser_of(command: str) -> argparse.ArgumentParser:
    description = f"parkd {command} {HELP[command]}."
    parser = _Parser(prog=f"parkd {command}", description=description, epilog=EPILOGS.get(command), allow_abbrev=False)
    if command in ("show", "pin", "unpin", "keep", "forget"):
        parser.add_argument("id", metavar="ID", help="its id in parkd ps, or the beginning of it")
    if command == "why":
        parser.add_argument("request", metavar="REQUEST", nargs="?", help="its x-request-id, or the answer's id")
    if command == "keep":
        parser.add_argument("--for", dest="for_s", metavar="AGE", required=True, help="how long: 90m, 8h, 7d")
    if command == "bill":
        parser.add_argument("--since", metavar="WHEN", default="7d", help="an age, a date or a Unix time [7d]")
    if command == "top":
        parser.add_argument("--step", metavar="SECONDS", type=float, default=1.0, help="time between two looks [1]")
        parser.add_argument("--once", action="store_true", help="look once")
    add_server_flags(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def run(command: str, words: Sequence[str], console: Console | None = None) -> int:
    """Runs a command. Returns the exit code. Raises ConfigError."""
    given = parser_of(command).parse_args(words)
    server = RemoteServer(given.url, key_of(given))
    with contextlib.closing(server):
        if command == "top":
            return _top(server, given, console or _console())
        document, shown = _COMMANDS[command](server, given)
        _print(document, shown, console, as_json=given.json)
    return 0


def _console() -> Console:
    """Rich asks for colours, width and NO_COLOR itself. Where there is no terminal, lines are not cut at 80."""
    width = None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL
    return Console(width=width, highlight=False, markup=False)


def _print(document: object, shown: RenderableType, console: Console | None, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(document, indent=2))
    else:
        (console or _console()).print(shown, crop=False)


Given = argparse.Namespace
Shown = tuple[object, RenderableType]


def _ps(server: RemoteServer, _given: Given) -> Shown:
    told = server.get("/parkd/conversations")
    return told, tables.conversations(told)


def _show(server: RemoteServer, given: Given) -> Shown:
    name = server.find(given.id)
    told = server.get(f"/parkd/conversations/{name}")
    try:
        turns = server.get("/parkd/turns", conversation=name, limit=TURNS_SHOWN, since="4w")["turns"]
    except ConfigError:  # it keeps no ledger
        turns = []
    return {**told, "last_turns": turns}, tables.conversation(told, turns)


def _why(server: RemoteServer, given: Given) -> Shown:
    asked: str | None = given.request
    path = None if asked is None else in_path(asked, "REQUEST")
    turn, explained, refused = None, None, None
    try:
        found = server.get("/parkd/turns", request_id=_bare(asked), limit=1, since="4w")["turns"]
        turn = found[0] if found else None
    except ConfigError as error:
        refused = error
        if asked is None:
            raise
    if path is None:
        if turn is None:
            raise ConfigError("no turn is in the ledger yet")
        path = in_path(turn["request_id"], "REQUEST")
    try:
        explained = server.get(f"/parkd/explain/{path}")
    except ConfigError as error:
        refused = error
    if turn is None and explained is None:
        assert refused is not None
        raise refused
    return {"turn": turn, "explained": explained}, tables.why(turn, explained)


def _bare(request: str | None) -> str | None:
    """The id of the request, if that of its answer was given."""
    if request is None:
        return None
    from parkd.lane.reports.explain import ID_PREFIXES

    bare = next((request.removeprefix(prefix) for prefix in ID_PREFIXES if request.startswith(prefix)), request)
    return bare if bare == request or bare.startswith("req_") else f"req_{bare}"


def _act(what: str) -> Callable[[RemoteServer, Given], Shown]:
    def act(server: RemoteServer, given: Given) -> Shown:
        name = server.find(given.id)
        body = {"for_s": _length_s(given.for_s)} if what == "keep" else None
        told = server.act("POST", f"/parkd/conversations/{name}/{what}", body)
        return told, tables.conversation(told, [])

    return act


def _length_s(text: str) -> float:
    try:
        length_s = -since_s(text, 0.0)
    except InvalidRequest:
        length_s = 0.0
    if length_s <= 0:
        raise ConfigError(f"--for {text!r}: expected an age such as 90m, 8h or 7d")
    return length_s


def _forget(server: RemoteServer, given: Given) -> Shown:
    name = server.find(given.id)
    told = server.act("DELETE", f"/parkd/conversations/{name}")
    answers = "and what was answered in it" if told["answers"] is None else f"{told['answers']:,} remembered answers"
    return told, tables.plain(f"forgot {name}, {answers}")


def _bill(server: RemoteServer, given: Given) -> Shown:
    told = server.get("/parkd/bill", since=given.since)
    return told, tables.bill(told, given.since)


_COMMANDS: Mapping[str, Callable[[RemoteServer, Given], Shown]] = {
    "ps": _ps,
    "show": _show,
    "why": _why,
    "pin": _act("pin"),
    "unpin": _act("unpin"),
    "keep": _act("keep"),
    "forget": _forget,
    "bill": _bill,
}


def _top(server: RemoteServer, given: Given, console: Console) -> int:
    """Looks again and again, until Ctrl-C; once where nobody could see it change."""

    def look() -> tuple[dict[str, Any], RenderableType]:
        state, held = server.get("/parkd/now"), server.get("/parkd/conversations")
        return {"now": state, **held}, tables.now(state, held)

    if not 0 <= given.step <= LONGEST_STEP_S:
        raise ConfigError(f"--step {given.step:g}: expected seconds, at most {LONGEST_STEP_S:.0f}")
    step_s = max(LEAST_STEP_S, given.step)
    document, shown = look()
    if given.once or not (console.is_terminal or given.json):
        _print(document, shown, console, as_json=given.json)
        return 0
    if given.json:
        while True:
            print(json.dumps(document), flush=True)
            time.sleep(step_s)
            document, _ = look()
    with Live(shown, console=console, screen=True, auto_refresh=False) as live, contextlib.suppress(KeyboardInterrupt):
        while True:
            time.sleep(step_s)
            live.update(look()[1], refresh=True)
    return 0
