"""What is remembered between requests, apart for each key: no key learns by time what another one sent.

    =team            the namespace of a key, or of several that share one
    =team/0f3a...    the part of it for one `cache_salt`

Each namespace of keys has a memory of its own, so that none pushes another's out. The parts for salts share it, since
a client may have any number of them; so what is looked up in it is looked up with the whole namespace.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


def root_of(namespace: str) -> str:
    """The namespace of keys in which a namespace is. Names of namespaces contain no slash."""
    return namespace.partition("/")[0]


class ByNamespace(Generic[T]):
    """One memory for each namespace of keys, at most `most`: the least recently used goes. Thread-safe."""

    def __init__(self, make: Callable[[str], T], most: int) -> None:
        """`make` returns the empty memory of a namespace of keys."""
        self._make = make
        self._most = most
        self._memories: OrderedDict[str, T] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, namespace: str) -> T:
        root = root_of(namespace)
        with self._lock:
            memory = self._memories.get(root)
            if memory is None:
                memory = self._memories[root] = self._make(root)
                while len(self._memories) > self._most:
                    self._memories.popitem(last=False)
            else:
                self._memories.move_to_end(root)
            return memory

    def all(self) -> list[T]:
        with self._lock:
            return list(self._memories.values())
