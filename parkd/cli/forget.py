"""`parkd forget`: lists and removes parked conversations in a park directory that no server holds."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from parkd.config import LEDGER_NAME
from parkd.config.keys import read_key_file
from parkd.errors import ConfigError
from parkd.identity.answer_file import NAME
from parkd.identity.answer_file import forget as forget_answers
from parkd.identity.output_memory import RememberedAnswer, is_within
from parkd.ledger.ledger import remove_ledger
from parkd.proxy.access import namespace_of
from parkd.store.files.manifest import Manifest
from parkd.store.files.park_directory import open_directory
from parkd.store.opening import forget, scan
from parkd.store.records import name_of
from parkd.types import NamedKey


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (parkd forget --help)")


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="parkd forget",
        description="Removes parked conversations, and the answers remembered of them, from a park directory. Stop the "
        "server that uses it first.",
        allow_abbrev=False,
    )
    parser.add_argument("--park-dir", metavar="DIR", required=True, help="the directory that parkd serve was given")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--all", action="store_true", help="every conversation")
    which.add_argument("--key", metavar="KEY", help="those of an API key: the key, its namespace or its name")
    which.add_argument("--conversation", metavar="ID", help="one conversation, by its id in --list")
    which.add_argument("--list", action="store_true", help="remove nothing: show ids, tokens, last use and key")
    parser.add_argument("--api-key-file", metavar="FILE", help="where names of keys are looked up")
    return parser


def run(words: Sequence[str]) -> int:
    """Runs `parkd forget`. Returns the exit code: 1 if nothing matched. Raises ConfigError."""
    given = make_parser().parse_args(words)
    path = Path(given.park_dir).expanduser()
    if not path.is_dir():
        raise ConfigError(f"--park-dir {path}: there is no such directory")
    keys = () if given.api_key_file is None else read_key_file(Path(given.api_key_file).expanduser())
    fs = open_directory(path, creates=False)
    try:
        if given.list:
            print(table([manifest for manifest, _ in scan(fs).manifests], fs.times(), keys))
            return 0
        belongs = _chosen(given, keys)
        gone, left = forget(fs, lambda manifest: belongs(manifest.id, manifest.namespace))
        answers = forget_answers(path / NAME, _chosen_answers(given, belongs, gone))
        if given.all:
            remove_ledger(path / LEDGER_NAME)
    except OSError as error:
        raise ConfigError(f"--park-dir {path} cannot be read: {error.strerror}") from error
    finally:
        fs.close()
    print(f"forgot {_counted(len(gone), 'conversation')}, {_counted(answers, 'remembered answer')}")
    if left:
        raise ConfigError(f"{len(left)} files in {path} could not be removed; remove the directory itself")
    if gone or answers or given.all:
        return 0
    print("Nothing there is of that name or key: --list shows what there is.", file=sys.stderr)
    return 1


def table(manifests: Sequence[Manifest], times: Mapping[str, float], keys: Sequence[NamedKey]) -> str:
    """A line for each conversation, most recently used last: what `--conversation` takes, and whose it is. No text of a
    prompt. `times` are those of the manifests' files in seconds since the epoch, by name."""
    names: dict[str, list[str]] = {}
    for key in keys:
        names.setdefault(_namespace_of(key), []).append(key.name)
    used_s = {each.name: max(each.last_used_s, times.get(each.name, 0.0)) for each in manifests}
    rows = [("ID", "TOKENS", "LAST USED (UTC)", "KEY")]
    for each in sorted(manifests, key=lambda each: (used_s[each.name], each.id)):
        namespace, _, salt = each.namespace.partition("/")
        own = ",".join(names.get(namespace, ())) or namespace.removeprefix("=") or "-"
        when = datetime.fromtimestamp(used_s[each.name], UTC).strftime("%Y-%m-%d %H:%M")
        rows.append((name_of(each.id), f"{len(each.units):,}", when, f"{own} (salted)" if salt else own))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:<{widths[2]}}  {row[3]}".rstrip() for row in rows
    )


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _chosen(given: argparse.Namespace, keys: Sequence[NamedKey]) -> Callable[[str, str], bool]:
    """Whether a conversation is to go, by its id and namespace."""
    if given.all:
        return lambda _id, _namespace: True
    if given.conversation is not None:
        wanted: str = given.conversation
        return lambda conversation_id, _namespace: wanted in (conversation_id, name_of(conversation_id))
    namespaces = _namespaces(given.key, keys)
    # A request's `cache_salt` makes a sub-namespace of its key's namespace, after a slash; it belongs to the key too.
    return lambda _id, namespace: namespace.partition("/")[0] in namespaces


def _chosen_answers(
    given: argparse.Namespace, belongs: Callable[[str, str], bool], gone: Sequence[Manifest]
) -> Callable[[RememberedAnswer], bool]:
    """Whether an answer is to go: it was given within a conversation that is gone, or to a key that is forgotten.

    Answers saved by earlier versions do not tell their key, so they go with any conversation of a forgotten key.
    """
    within = [is_within(each.units, each.key_digest, each.namespace) for each in gone]

    def chosen(answer: RememberedAnswer) -> bool:
        if given.conversation is None:
            is_of_key = bool(gone) if answer.namespace is None else belongs("", answer.namespace)
            if given.all or is_of_key:
                return True
        return any(test(answer) for test in within)

    return chosen


def _namespaces(text: str, keys: Sequence[NamedKey]) -> set[str]:
    """The namespaces that `text` may stand for: as a key, as the name of a namespace, or as the name of a key."""
    named = {_namespace_of(key) for key in keys if text in (key.name, key.key)}
    return named | {namespace_of(text), f"={text}"}


def _namespace_of(key: NamedKey) -> str:
    return namespace_of(key.key) if key.namespace is None else f"={key.namespace}"
