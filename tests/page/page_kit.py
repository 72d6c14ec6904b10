"""Opens views of the page, and knows what none may do: tell the console an error, ask elsewhere, or scroll sideways."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from tests.page import page_data

VIEWS = ("now", "conversations", "budget", "cold", "try")
TITLES = {"now": "Now", "conversations": "Conversations", "budget": "Budget", "cold": "Cold reads", "try": "Try"}
PHONE = {"width": 380, "height": 800}
DESK = {"width": 1100, "height": 800}
EXPECT_MS = 20_000
STEP_MS = 20
SERIOUS = ("serious", "critical")


@dataclass
class Seen:
    """A page that is open, and what it did besides showing something."""

    page: Any
    url: str
    console: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)

    def go(self, view: str) -> None:
        self.page.goto(f"{self.url}/#/{view}")
        self.page.get_by_role("heading", level=1, name=TITLES[view]).wait_for(timeout=EXPECT_MS)

    def text(self, *words: str) -> None:
        """Waits until the page shows each of the words."""
        for each in words:
            self.page.get_by_text(each).first.wait_for(timeout=EXPECT_MS)

    def until(self, expression: str) -> None:
        self.page.wait_for_function(expression, timeout=EXPECT_MS)

    def soon(self, condition: Callable[[], bool]) -> None:
        """Waits for something that need not be on the page, while the browser goes on."""
        for _ in range(EXPECT_MS // STEP_MS):
            if condition():
                return
            self.page.wait_for_timeout(STEP_MS)
        raise AssertionError("it did not happen in time")

    def faults(self, axe: str) -> list[str]:
        """What axe finds serious."""
        self.page.evaluate(axe)
        found = self.page.evaluate("() => axe.run(document, { resultTypes: ['violations'] })")
        return [
            f"{each['id']}: {node['html'][:160]} {node.get('failureSummary', '')[:200]}"
            for each in found["violations"]
            if each["impact"] in SERIOUS
            for node in each["nodes"][:3]
        ]

    def is_sound(self) -> None:
        """Nothing in the console, nothing asked elsewhere, nothing wider than the window."""
        assert self.console == []
        assert self.elsewhere == []
        width = self.page.evaluate("() => document.documentElement.scrollWidth - window.innerWidth")
        assert width <= 0, f"{width} pixels too wide"


@contextmanager
def opened(browser: Any, url: str, *, dark: bool = False, size: dict[str, int] = DESK) -> Iterator[Seen]:
    context = browser.new_context(viewport=size, color_scheme="dark" if dark else "light", reduced_motion="reduce")
    page = context.new_page()
    seen = Seen(page, url)
    host = urlsplit(url).netloc

    def asked(request: Any) -> None:
        there = urlsplit(request.url)
        if there.scheme != "data" and there.netloc != host:
            seen.elsewhere.append(request.url)

    page.on(
        "console", lambda message: seen.console.append(message.text) if message.type in ("error", "warning") else None
    )
    page.on("pageerror", lambda error: seen.console.append(str(error)))
    page.on("request", asked)
    try:
        yield seen
    finally:
        context.close()


def _answer(document: Any, route: Any) -> None:
    route.fulfill(json=document)


def tell(seen: Seen, count: int, *, words: bool = False) -> None:
    """Lets the page believe that the server has so many conversations, and that many turns in its ledger."""
    told = {
        "**/parkd/conversations": page_data.conversations(count, words=words),
        "**/parkd/turns*": page_data.turns(count, words=words),
        "**/parkd/bill*": page_data.bill(count),
    }
    for pattern, document in told.items():
        seen.page.route(pattern, partial(_answer, document))
