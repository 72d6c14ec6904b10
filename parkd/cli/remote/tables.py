"""What a server tells, as tables for a terminal. Pure: from documents to what rich prints.

Text that a server tells may come from prompts, so it is never markup, and what could steer a terminal is taken out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

ID_CHARACTERS = 12
NOTHING = "-"
Document = Mapping[str, Any]


def plain(text: object) -> Text:
    """Any text on one line, without control characters."""
    return Text("".join(mark if mark.isprintable() else " " for mark in str(text)))


def count(number: float | None) -> str:
    return NOTHING if number is None else f"{number:,.0f}"


def size(bytes_: float | None) -> str:
    if not bytes_:
        return NOTHING
    for unit in ("B", "KiB", "MiB"):
        if bytes_ < 1024:
            return f"{bytes_:.0f} {unit}" if unit == "B" else f"{bytes_:.1f} {unit}"
        bytes_ /= 1024
    return f"{bytes_:.1f} GiB"


def age(seconds: float | None) -> str:
    if seconds is None:
        return NOTHING
    for limit, unit_s, unit in ((1, 0.001, "ms"), (120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


class Lines(Table):
    """Rows of one line each. Columns whose names begin with `>` hold numbers. Where room is short, the last column is
    cut first."""

    def __init__(self, *columns: str) -> None:
        super().__init__(box=None, pad_edge=False, header_style="bold")
        for column in columns:
            name = column.removeprefix(">")
            self.add_column(name, justify="left" if name == column else "right", no_wrap=True, overflow="ellipsis")

    def add_line(self, *cells: str | Text) -> None:
        self.add_row(*cells)
        for column, cell in zip(self.columns[:-1], cells, strict=False):
            width = cell_len(cell if isinstance(cell, str) else cell.plain)
            column.min_width = max(column.min_width or cell_len(str(column.header)), width)


def facts(rows: Iterable[tuple[str, object]]) -> Table:
    made = Table(box=None, pad_edge=False, show_header=False)
    made.add_column(no_wrap=True, style="dim")
    made.add_column(overflow="fold")
    for name, value in rows:
        made.add_row(name, value if isinstance(value, Text) else plain(value))
    return made


def in_tree(conversations: Sequence[Document]) -> list[tuple[Document, int]]:
    """Each with its depth, children behind their parents."""
    known = {each["id"] for each in conversations}
    children: dict[str | None, list[Document]] = {}
    for each in conversations:
        children.setdefault(each["parent"] if each["parent"] in known else None, []).append(each)
    found: list[tuple[Document, int]] = []
    stack = [(each, 0) for each in reversed(children.get(None, []))]
    while stack:
        each, depth = stack.pop()
        found.append((each, depth))
        stack += [(child, depth + 1) for child in reversed(children.get(each["id"], []))]
    return found


def conversations(told: Document) -> RenderableType:
    """`parkd ps`."""
    each_: Sequence[Document] = told["conversations"]
    if not each_:
        return Text("no conversation is live or parked")
    has_words = any(each.get("first_words") for each in each_)
    columns = ["ID", "STATE", ">TOKENS", ">SHARED", ">RAM", ">DISK", ">TURNS", ">HITS", ">IDLE"]
    made = Lines(*columns, *(["WORDS"] if has_words else []))
    for each, depth in in_tree(each_):
        cells: list[str | Text] = [
            plain("  " * min(depth, 6) + each["id"][:ID_CHARACTERS]),
            _state(each),
            count(each["tokens"]),
            count(each["shared_tokens"]) if each["parent"] else NOTHING,
            size(each["bytes"]["ram"]),
            size(each["bytes"]["disk"]),
            count(each["turns"]),
            count(each["hits"]),
            age(each["idle_s"]),
        ]
        words = each.get("first_words") or {}
        made.add_line(*cells, *([plain(words.get("user") or words.get("system") or "")] if has_words else []))
    left_off = told.get("left_off", 0)
    return Group(made, Text(f"and {left_off:,} more")) if left_off else made


def _state(each: Document) -> Text:
    words = [word for word in ("live", "pinned") if each.get(word)]
    if not words:
        words = ["disk" if not each["bytes"]["ram"] and each["bytes"]["disk"] else "parked"]
    return Text(" ".join(words), style="green" if each.get("live") else "")


def conversation(each: Document, turns: Sequence[Document]) -> RenderableType:
    """`parkd show ID`."""
    words = each.get("first_words") or {}
    until = each.get("kept_until_s")
    own_bytes = each["bytes"]["own"]  # not told where it would tell what other keys have sent
    own = "" if own_bytes is None else f", of which {size(own_bytes)} are its own"
    rows: list[tuple[str, object]] = [
        ("id", each["id"]),
        ("state", _state(each)),
        ("tokens", count(each["tokens"])),
        ("shared", f"{count(each['shared_tokens'])} with {each['parent']}" if each["parent"] else NOTHING),
        ("children", ", ".join(each.get("children", ())) or NOTHING),
        ("in RAM", f"{size(each['bytes']['ram'])}{own}"),
        ("on disk", size(each["bytes"]["disk"])),
        ("checkpoints", count(each["checkpoints"])),
        ("age", f"{age(each['age_s'])}, not used for {age(each['idle_s'])}"),
        ("turns", f"{count(each['turns'])}, of which {count(each['hits'])} found state again"),
        ("saves", NOTHING if each["saves_s"] is None else f"{each['saves_s']:.1f} s of its next turn"),
        ("kept", "for a time" if until else "until it is unpinned" if each["pinned"] else "as long as there is room"),
    ]
    rows += [(name, words[name]) for name in ("system", "user") if words.get(name)]
    return Group(facts(rows), Text(""), turn_table(turns)) if turns else facts(rows)


def turn_table(turns: Sequence[Document]) -> Lines:
    made = Lines("REQUEST", ">AGO", ">PROMPT", ">REUSED", ">NEEDLESS", "CAUSE", "CLIENT")
    newest = max((each["at_s"] for each in turns), default=0.0)
    for each in turns:
        made.add_line(
            plain(each["request_id"]),
            age(newest - each["at_s"]),
            count(each["prompt_tokens"]),
            count(each["reused_tokens"]),
            count(each["needless_tokens"]),
            _cause(each["cause"]),
            plain(each["client"]),
        )
    return made


def _cause(cause: str | None) -> Text:
    return plain((cause or NOTHING).replace("_", " "))


def why(turn: Document | None, explained: Document | None) -> RenderableType:
    """`parkd why`: from the ledger, and from what is still remembered of the request."""
    given = {**(explained or {}), **(turn or {})}
    rows: list[tuple[str, object]] = [
        ("request", given["request_id"]),
        ("prompt", f"{count(given['prompt_tokens'])} tokens, {count(given['reused_tokens'])} reused"),
        ("cache", given.get("cache") or NOTHING),
        ("why", given.get("why") or "nothing that was known had to be read again"),
    ]
    if turn is not None:
        needless = f"{count(turn['needless_tokens'])} tokens, {turn['needless_s']:.2f} s"
        rows += [("cause", _cause(turn["cause"])), ("needless", needless)]
        rows += [("conversation", turn["conversation"] or NOTHING), ("client", turn["client"] or NOTHING)]
    differs = (turn or {}).get("differs") or (explained or {}).get("divergence")
    if differs is not None:
        rows.append(("differs", f"from token {count(differs['token'])} in {differs['segment'] or 'the prompt'}"))
        if differs.get("text") or differs.get("known_text"):
            rows += [("was", differs["known_text"]), ("is", differs["text"])]
    rule = (turn or {}).get("rule")
    if rule:
        rows.append(("rule", f"{rule['pattern']} -> {rule['replacement']}"))
    return facts(rows)


def bill(told: Document, since: str) -> RenderableType:
    """`parkd bill`."""
    total = told["total"]
    if not total["turns"]:
        return Text(f"no turn since {since}")
    head = Text(
        f"{count(total['turns'])} turns since {since}: {count(total['read_tokens'])} tokens were read, "
        f"{count(total['needless_tokens'])} of them again, which took {age(total['needless_s'])}{_money(total)}"
    )
    parts: list[RenderableType] = [head]
    for name in ("cause", "client", "day"):
        made = Lines(name.upper(), ">TURNS", ">NEEDLESS", ">SECONDS", *_money_columns(total))
        for each in told[f"by_{name}"]:
            made.add_line(
                _cause(each[name]),
                count(each["turns"]),
                count(each["needless_tokens"]),
                f"{each['needless_s']:,.1f}",
                *(f"{each[unit]:.3f}" for unit in ("kwh", "money") if unit in total),
            )
        parts += [Text(""), made]
    for each in told["rules"]:
        turns = f"{count(each['turns'])} turn{'' if each['turns'] == 1 else 's'}"
        lines = "\n".join(plain(line).plain for line in each["line"].split("\n"))
        # Never broken: it is to be copied into a file.
        rule = Text(lines, no_wrap=True, overflow="ignore")
        parts += [Text(""), Text(f"this rule would have saved {age(each['needless_s'])} in {turns}:"), rule]
    return Group(*parts)


def _money(total: Document) -> str:
    shown = "" if "kwh" not in total else f", {total['kwh']:.3f} kWh"
    return shown if "money" not in total else f"{shown} for {total['money']:.2f}"


def _money_columns(total: Document) -> list[str]:
    return [name for unit, name in (("kwh", ">KWH"), ("money", ">PRICE")) if unit in total]


def now(state: Document, conversations_told: Document) -> RenderableType:
    """`parkd top`: what runs and waits, then the conversations."""
    head = f"{state['model']}, context {count(state['context_tokens'])}, {state['state']}"
    parts: list[RenderableType] = [plain(head)]
    parts += [plain(f"runs   {_running(turn)}") for turn in state["running"]] or [Text("runs   nothing")]
    parts += [plain(f"waits  {_waiting(turn)}") for turn in state["waiting"]]
    return Group(*parts, Text(""), conversations(conversations_told))


def _waiting(turn: Document) -> str:
    return f"{turn['client']}, {count(turn['prompt_tokens'])} tokens, for {age(turn['waits_s'])}"


def _running(turn: Document) -> str:
    words = f"{turn['client']}, {count(turn['prompt_tokens'])} tokens, {turn['phase']}"
    reading, answer = turn.get("reading"), turn.get("answer")
    if turn["phase"] == "reading" and reading:
        words += f" {count(reading['read_tokens'])} of {count(reading['total_tokens'])}"
        words += "" if reading["left_s"] is None else f", {age(reading['left_s'])} left"
    if turn["phase"] == "answering" and answer:
        words += f" {count(answer['tokens'])} tokens"
    return words
