"""The command line: from words to a command and its flags. `parkd/config` interprets the flags."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from parkd import __version__
from parkd.config import SETTINGS, nearest
from parkd.errors import ConfigError

_EPILOG = """\
Every flag is also a variable (--ctx-size is PARKD_CTX_SIZE) and a key of the TOML file named by --config
(ctx-size = 8192). A flag overrides a variable, a variable overrides the file. Defaults are in brackets.

`parkd` means `parkd serve`. `parkd demo` starts a server, parks and restores a conversation, and prints a table.
`parkd plan` prints how much of a model's state the parking budget holds, without loading the weights. Both take the
flags above. `parkd replay` runs a recorded trace through the store without a model, and `parkd forget` removes
conversations from a park directory. They have their own flags: `parkd replay --help`, `parkd forget --help`.
"""

COMMANDS = ("serve", "demo", "plan")
"""Commands that take the settings; `forget` and `replay` have their own flags."""

_NAME_THE_MODEL = "one model is served, named with --model (a hub id is downloaded): parkd --model owner/name"
FOREIGN_COMMANDS = {
    "run": _NAME_THE_MODEL,
    "pull": _NAME_THE_MODEL,
    "list": "GET /v1/models of a running server tells its model",
    "ps": "GET /slots of a running server tells what it does",
    "stop": "end the server with Ctrl-C or SIGTERM",
    "show": "GET /v1/models and GET /props of a running server tell its model",
    **dict.fromkeys(("create", "cp", "rm", "push"), "models are files that --model names; none are kept here"),
    **dict.fromkeys(("help", "version"), "ask with --help or --version"),
}
"""Commands of Ollama, and what to use instead."""
_ONE_LANE = "one conversation runs at a time, and the others are parked: see --conversation-cache-mib"
_NOT_NEEDED = "it is always on; leave it out"
_NOTHING = "there is no such setting; leave it out"
_EXACT = "state is reused exactly where the prompt is equal; leave it out"
FOREIGN_FLAGS = {
    "--n-gpu-layers": "it is --gpu-layers",
    **dict.fromkeys(("-np", "--parallel", "-cb", "--cont-batching"), _ONE_LANE),
    **dict.fromkeys(("--cache-ram", "-cram"), "memory for parked conversations is --conversation-cache-mib"),
    **dict.fromkeys(
        ("--jinja", "--metrics", "--slots", "--props", "--cache-prompt", "--reasoning-format"), _NOT_NEEDED
    ),
    **dict.fromkeys(("-hff", "--hf-file"), "the quantisation is named with the model: --model owner/name:Q4_K_M"),
    **dict.fromkeys(("-hft", "--hf-token"), "set HF_TOKEN"),
    **dict.fromkeys(("-n", "--n-predict", "--predict"), "the longest answer is --max-output-tokens"),
    **dict.fromkeys(("-ub", "--ubatch-size"), "tokens read in one chunk are --batch-size"),
    **dict.fromkeys(
        ("--temp", "--temperature", "--top-k", "--top-p", "--min-p", "-s", "--seed", "--repeat-penalty"),
        "each request says how its answer is sampled",
    ),
    **dict.fromkeys(("-md", "--model-draft"), "only a model's own draft head guesses: --draft-tokens"),
    **dict.fromkeys(("--cache-reuse", "-sps", "--slot-prompt-similarity", "--keep"), _EXACT),
    **dict.fromkeys(("--embedding", "--embeddings", "--reranking"), "this server generates text only"),
    **dict.fromkeys(("--ssl-key-file", "--ssl-cert-file"), "put a proxy with TLS in front"),
    **dict.fromkeys(
        ("--mlock", "--no-mmap", "--no-webui", "--swa-full", "-v", "--verbose", "-to", "--timeout"), _NOTHING
    ),
    "--chat-template": "a template is a file: --chat-template-file",
    "--reasoning-budget": "each request limits its thinking with `thinking_budget`",
}
"""Flags of llama-server, and what to use instead."""

_SHORT_FLAG = re.compile(r"-[A-Za-z]")


@dataclass(frozen=True)
class Invocation:
    """A parsed command line."""

    command: str
    """One of COMMANDS."""
    flags: dict[str, str]
    """The text typed for each setting name, and for `config`."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (parkd --help lists the flags)")


def parse(arguments: Sequence[str]) -> Invocation:
    """Parses the command line. Raises ConfigError; exits for `--help` and `--version`."""
    words = list(arguments)
    command = words.pop(0) if words and not words[0].startswith("-") else "serve"
    if command in FOREIGN_COMMANDS:
        raise ConfigError(f"there is no command {command!r}: {FOREIGN_COMMANDS[command]}")
    if command not in COMMANDS:
        others = [*COMMANDS, "forget", "replay"]
        raise ConfigError(f"unknown command {command!r}{nearest(command, others)} (there are {', '.join(others)})")
    _check_short(words)
    parsed, rest = _parser().parse_known_args(words)
    if rest:
        raise _unknown(rest[0])
    given = {
        name.replace("_", "-"): ",".join(value) if isinstance(value, list) else value
        for name, value in vars(parsed).items()
        if value is not None
    }
    return Invocation(command, given)


def _check_short(words: Sequence[str]) -> None:
    """Raises ConfigError for a short flag that is not known. argparse would take `-n` for the beginning of `-ngl`, and
    `-md x` for `-m d x`."""
    known = {"-h", *(short for setting in SETTINGS for short in setting.short)}
    for word in words:
        if _SHORT_FLAG.match(word) and word.partition("=")[0] not in known:
            raise _unknown(word)


def _unknown(word: str) -> ConfigError:
    """The error for a word that is neither a flag of parkd nor the value of one."""
    flag = word.partition("=")[0]
    if flag in FOREIGN_FLAGS:
        return ConfigError(f"there is no flag {flag} here: {FOREIGN_FLAGS[flag]}")
    if not flag.startswith("-"):
        return ConfigError(f"{flag!r} belongs to no flag; a model is named with --model")
    known = [f"--{setting.name}" for setting in SETTINGS] + ["--config", "--help", "--version"]
    return ConfigError(f"unknown flag {word}{nearest(flag, known)}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="parkd",
        usage="parkd [serve | plan | demo] [flags], or parkd {replay | forget} --help",
        description="Serves one model to many conversations, and restores the state of each when it returns.",
        epilog=_EPILOG,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=34, width=118),
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"parkd {__version__}")
    parser.add_argument("--config", metavar="FILE", help="read settings from this TOML file")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for setting in SETTINGS:
        group = groups.get(setting.group)
        if group is None:
            group = groups[setting.group] = parser.add_argument_group(setting.group)
        dest = setting.name.replace("-", "_")
        if setting.words > 1:
            names = tuple(setting.metavar.split())
            group.add_argument(
                *setting.short, f"--{setting.name}", dest=dest, metavar=names, nargs=setting.words, help=setting.help
            )
        elif setting.metavar:
            action = "append" if setting.many else "store"
            group.add_argument(
                *setting.short,
                f"--{setting.name}",
                dest=dest,
                metavar=setting.metavar,
                action=action,
                help=setting.help,
            )
        else:
            group.add_argument(f"--{setting.name}", action="store_const", const="true", help=setting.help)
    return parser
