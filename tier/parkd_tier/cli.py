"""The command `parkd-tier`, which `parkd tier` hands its words to.

    parkd-tier config --dir DIRECTORY --ram-mib N --disk-mib N    prints vLLM's --kv-transfer-config
    parkd-tier canary --dir DIRECTORY --url URL                   proves a server before it restores anything
    parkd-tier look --dir DIRECTORY                               what is kept there, and of whom

Exit codes: 0 done, 1 the canary failed, 2 a setting cannot be used.
"""

from __future__ import annotations

import argparse
import json
import random
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from parkd.errors import ConfigError
from parkd.store.budget import MIB, mib
from parkd.store.files.park_directory import open_directory
from parkd.store.opening import scan
from parkd_tier.canary import FIRST_TOKEN, PARAMS_KEY, Verdict, try_all
from parkd_tier.opening import FACTS_NAME, TOKEN_NAME, known_identities
from parkd_tier.server import Server
from parkd_tier.vllm.settings import DEFAULT_WRITE_GIB_PER_DAY, transfer_config

EXIT_FAILED = 1
EXIT_USAGE = 2


def entry() -> NoReturn:
    raise SystemExit(main(sys.argv[1:]))


def main(words: Sequence[str]) -> int:
    try:
        arguments = _parser().parse_args(words)
        if arguments.command == "config":
            config = transfer_config(
                arguments.dir.expanduser().absolute(),
                arguments.ram_mib * MIB,
                arguments.disk_mib * MIB,
                arguments.chunk_tokens,
                arguments.write_gib_per_day,
                needs_canary=not arguments.no_canary,
            )
            print(json.dumps(config))
        elif arguments.command == "canary":
            verdict = _canary(arguments)
            print(("passed: " if verdict.passed else "failed: ") + verdict.told)
            return 0 if verdict.passed else EXIT_FAILED
        else:
            print("\n".join(_look(arguments.dir.expanduser())))
    except ConfigError as error:
        print(f"parkd-tier: {error.message}", file=sys.stderr)
        return EXIT_USAGE
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="parkd-tier", description="parkd's store on disk, inside vLLM")
    commands = parser.add_subparsers(dest="command", required=True)
    config = commands.add_parser("config", help="print vLLM's --kv-transfer-config for a budget")
    config.add_argument("--dir", type=Path, required=True, help="where state is kept; belongs to one server")
    config.add_argument("--ram-mib", type=_positive, required=True, help="memory for state, all workers together")
    config.add_argument("--disk-mib", type=_positive, required=True, help="disk for state")
    config.add_argument("--chunk-tokens", type=_positive, help="tokens of a chunk; a multiple of vLLM's block size")
    config.add_argument(
        "--write-gib-per-day",
        type=_positive,
        default=DEFAULT_WRITE_GIB_PER_DAY,
        help=f"most that is written to the drive in a day; default {DEFAULT_WRITE_GIB_PER_DAY}",
    )
    config.add_argument("--no-canary", action="store_true", help="restore without proof that it is right")
    canary = commands.add_parser("canary", help="prove a running server, so that it may restore; again at any time")
    canary.add_argument("--dir", type=Path, required=True, help="the server's directory (of each replica its own)")
    canary.add_argument("--url", required=True, help="of the server, like http://127.0.0.1:8000")
    canary.add_argument("--api-key", help="if the server wants one")
    canary.add_argument("--wait-s", type=float, default=600.0, help="longest wait for the server to be there")
    look = commands.add_parser("look", help="say what is kept in a directory that no server uses")
    look.add_argument("--dir", type=Path, required=True)
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"a whole number above 0 is wanted, not {text}")
    return number


def _canary(arguments: argparse.Namespace) -> Verdict:
    """Raises ConfigError if the server or its directory cannot be used."""
    directory = arguments.dir.expanduser()
    server = Server(arguments.url, arguments.api_key, arguments.wait_s)
    try:
        token = (directory / TOKEN_NAME).read_text()
        facts = json.loads((directory / FACTS_NAME).read_text())
        verdict = try_all(server.ask, int(facts["chunk_tokens"]), token, random.Random())  # noqa: S311
        server.ask([FIRST_TOKEN], secrets.token_hex(16), {PARAMS_KEY: {"token": token, "verdict": vars(verdict)}})
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"the canary could not run: {error}") from error
    return verdict


def _look(directory: Path) -> list[str]:
    """A line for each identity. Raises ConfigError if the directory is none of parkd's, or in use."""
    fs = open_directory(directory, creates=False)
    try:
        identities = known_identities(fs)
        manifests = [manifest for manifest, _ in scan(fs).manifests]
    finally:
        fs.close()
    lines = []
    for fingerprint in dict.fromkeys([*identities, *(manifest.fingerprint for manifest in manifests)]):
        mine = [manifest for manifest in manifests if manifest.fingerprint == fingerprint]
        size = sum({ref.id: ref.taken_bytes for manifest in mine for ref in manifest.extents}.values())
        known = identities.get(fingerprint)
        facts = "an engine that is not described" if known is None else json.dumps({**known.model, **known.rows})
        lines.append(f"{len(mine)} conversations, {mib(size)}: {facts}")
    return lines or ["nothing is kept here"]


if __name__ == "__main__":
    entry()
