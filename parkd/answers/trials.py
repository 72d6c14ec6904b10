"""Bounds the time that the grammar library may take for what a client sends.

Nothing can stop the library once it compiles, and some short schemas take it minutes or longer: patterns that must hold
together, remainders, objects of thousands of properties. So a schema that may be one of these is compiled in another
process first, which is ended when its time is up; the server compiles only what ended in time there.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from parkd.errors import SchemaTooComplex
from parkd.namespaces import ByNamespace
from parkd.types import StillWanted, always_wanted

log = logging.getLogger(__name__)

TRIAL_CPU_S = 3
"""Seconds of CPU that a trial may take. Real schemas take milliseconds."""
TRIAL_WALL_S = 20.0
"""Longest wait for a trial on a busy machine."""
LOOK_S = 0.1
"""Time between two looks whether the client still waits for a trial."""
TRIED_KEPT = 256
"""Schemas whose trial is remembered in a namespace of keys, since agents send their tools with every turn."""
MOST_ERROR_CHARACTERS = 1000
"""An error of the library may repeat a pattern that is as long as the schema."""
TRIED_BYTES = 1500
"""Bytes of a remembered trial with the longest error."""
PLAIN_NODES = 500
"""Objects in a schema without costly keywords up to which compiling it takes milliseconds."""
COSTLY = frozenset({"pattern", "patternProperties", "multipleOf", "allOf", "oneOf"})
"""Keywords that the library turns into automata, or combines with others."""
_SCRIPT = Path(__file__).with_name("trial_compile.py")


class Trials:
    """Thread-safe."""

    def __init__(self, cpu_s: int = TRIAL_CPU_S, wall_s: float = TRIAL_WALL_S, namespaces: int = 1) -> None:
        """`namespaces` of keys, each of which learns of its own trials alone."""
        self._cpu_s = cpu_s
        self._wall_s = wall_s
        self._tried = ByNamespace(_no_trials, namespaces)
        self.limit_bytes = namespaces * TRIED_KEPT * TRIED_BYTES
        self._lock = threading.Lock()
        self.count = 0
        """Processes that were started."""

    @property
    def memory_bytes(self) -> int:
        """Bytes remembered now, at most `limit_bytes`."""
        return sum(map(len, self._tried.all())) * TRIED_BYTES

    def check(self, grammar: str, param: str, namespace: str, still_wanted: StillWanted = always_wanted) -> str:
        """The library's error about a grammar, or an empty text. Raises SchemaTooComplex if compiling it takes too long
        or too much memory, and what `still_wanted` raises, which ends the process."""
        text, tried = grammar.encode("utf-8", "surrogatepass"), self._tried.of(namespace)
        digest = blake2b(f"{namespace} ".encode() + text, digest_size=16).digest()
        with self._lock:
            is_known, said = digest in tried, tried.get(digest)
            if is_known:
                tried.move_to_end(digest)
        if not is_known:
            said = self._try(text, still_wanted)
            with self._lock:
                tried[digest] = said
                while len(tried) > TRIED_KEPT:
                    tried.popitem(last=False)
        if said is None:
            raise SchemaTooComplex(f"compiling it takes more than {self._cpu_s} s", param=param)
        return said

    def _try(self, grammar: bytes, still_wanted: StillWanted) -> str | None:
        self.count += 1
        command = [sys.executable, "-I", str(_SCRIPT), str(self._cpu_s)]
        until_s = time.monotonic() + self._wall_s
        with tempfile.TemporaryFile() as given:
            given.write(grammar)
            given.seek(0)
            try:
                process = subprocess.Popen(  # noqa: S603 - our own script
                    command, stdin=given, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
                )
            except OSError as error:
                log.warning("a schema is compiled without a trial, since no process could be started: %s", error)
                return ""
            with process:
                try:
                    return self._said(process, until_s, still_wanted)
                finally:
                    process.kill()

    def _said(self, process: subprocess.Popen[bytes], until_s: float, still_wanted: StillWanted) -> str | None:
        while (left_s := until_s - time.monotonic()) > 0:
            still_wanted()
            with contextlib.suppress(subprocess.TimeoutExpired):
                said, _ = process.communicate(timeout=min(left_s, LOOK_S))
                return None if process.returncode < 0 else said.decode("utf-8", "replace")[:MOST_ERROR_CHARACTERS]
        return None


def _no_trials(_namespace: str) -> OrderedDict[bytes, str | None]:
    """What the library said of the grammar of a digest; None if it did not end in time."""
    return OrderedDict()


def is_costly(schema: Any) -> bool:
    """Whether a schema may take the library long: it has one of the costly keywords, or very many parts."""
    nodes, parts = 0, [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, Mapping):
            nodes += 1
            if nodes > PLAIN_NODES or not COSTLY.isdisjoint(part):
                return True
            parts.extend(part.values())
        elif isinstance(part, list):
            parts.extend(part)
    return False
