"""The page with 300 parked conversations: time to first paint and bytes, and what it costs a running turn.

    python -m benchmarks.page [--conversations 300] [--loads 10] [--pairs 8]

Chromium opens the view of conversations with an empty cache each time. First paint is the browser's own first
contentful paint, counted from the navigation; the list is complete when its last row is there. Then turns of a model
with random weights (`random:tiny-llama`, whose tokens take so little that any work beside them shows) are decoded by
turns alone, with a page open at Now (its browser is another process), and with eight listeners of the page's events,
the most that one key may have. The server's processor time for each token is compared, since the clock on a shared
machine says more of the neighbours; what one page costs is an eighth of what eight listeners do, which stands out more
from chance.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
from playwright.sync_api import Browser, sync_playwright

from benchmarks import servers
from benchmarks.common import Goal, Result, Table, finish, machine, percentile, progress

CONVERSATIONS = 300
LOADS = 10
PAIRS = 8
LISTENERS = 8
OUTPUT_TOKENS = 400
CONTEXT_TOKENS = 2048
PAINT_MS = 300.0
PAGE_BYTES = 200_000
COST_SHARE = 0.01
CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-quic")


def park(client: httpx.Client, count: int) -> None:
    """Families of four that share a beginning."""
    for number in range(count):
        shared = f"Family {number // 4}. " * 40
        messages = [{"role": "system", "content": shared}, {"role": "user", "content": f"Question {number}. " * 12}]
        body = {"messages": messages, "max_tokens": 1, "temperature": 0}
        client.post("/v1/chat/completions", json=body).raise_for_status()


def load(browser: Browser, url: str, count: int) -> dict[str, float]:
    """Milliseconds and bytes of one visit with an empty cache."""
    context = browser.new_context(viewport={"width": 1100, "height": 800})
    page = context.new_page()
    wire = context.new_cdp_session(page)
    wire.send("Network.enable")
    received: list[int] = []
    wire.on("Network.loadingFinished", lambda event: received.append(int(event["encodedDataLength"])))
    page.goto(f"{url}/#/conversations")
    page.wait_for_function(f"() => document.querySelectorAll('.row').length >= {count}", polling=10, timeout=30_000)
    rows_ms = page.evaluate("() => performance.now()")
    paint_ms = page.evaluate("() => performance.getEntriesByName('first-contentful-paint')[0].startTime")
    page.wait_for_timeout(300)
    context.close()
    return {"paint_ms": paint_ms, "rows_ms": rows_ms, "bytes": float(sum(received))}


def decode(client: httpx.Client, process: psutil.Process, number: int) -> dict[str, float]:
    """Processor seconds of the server for each token of one answer, and tokens a second."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": f"Turn {number}. " * 20}],
        "max_tokens": OUTPUT_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    before, began_s = _cpu_s(process), time.perf_counter()
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        for _ in answer.iter_lines():
            pass
    took_s = time.perf_counter() - began_s
    return {"cpu_ms_a_token": 1000 * (_cpu_s(process) - before) / OUTPUT_TOKENS, "tokens_a_s": OUTPUT_TOKENS / took_s}


@contextlib.contextmanager
def listening(url: str, count: int) -> Iterator[None]:
    """So many listeners, which read what comes."""

    def listen(stream: httpx.Response) -> None:
        with contextlib.suppress(httpx.HTTPError, httpx.StreamError):
            for _ in stream.iter_raw():
                pass

    with contextlib.ExitStack() as opened:
        for _ in range(count):
            client = opened.enter_context(httpx.Client(timeout=None))
            stream = opened.enter_context(client.stream("GET", f"{url}/parkd/events"))
            threading.Thread(target=listen, args=(stream,), daemon=True).start()
        yield


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> None:
    parser = argparse.ArgumentParser(description="the page with many conversations")
    parser.add_argument("--conversations", type=int, default=CONVERSATIONS)
    parser.add_argument("--loads", type=int, default=LOADS)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    options = parser.parse_args()
    started = machine()
    how = __doc__.split("\n\n")[2].replace("\n", " ")
    result = Result("page", "The page", how)
    port = servers.free_port()
    command = [sys.executable, "-m", "parkd", "serve", "--model", "random:tiny-llama", "--devices", "cpu"]
    command += ["--ctx-size", str(CONTEXT_TOKENS), "--conversation-cache-mib", "2048", "--port", str(port)]
    with (
        servers.running("parkd", command, port, 1) as server,
        httpx.Client(base_url=server.base_url, timeout=120) as client,
    ):
        progress(f"parking {options.conversations} conversations ...")
        park(client, options.conversations)
        count = len(client.get("/parkd/conversations").json()["conversations"])
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
            load(browser, server.base_url, count)  # the browser's own first page is not the page's
            visits = [load(browser, server.base_url, count) for _ in range(options.loads)]
            process = psutil.Process(server.process.pid)
            decode(client, process, 0)
            pairs: list[tuple[dict[str, float], ...]] = []
            for number in range(1, options.pairs + 1):
                progress(f"pair {number} of {options.pairs} ...")
                alone = decode(client, process, 3 * number)
                with listening(server.base_url, LISTENERS):
                    heard = decode(client, process, 3 * number + 1)
                page = browser.new_context().new_page()
                page.goto(f"{server.base_url}/#/now")
                page.get_by_text("Nothing runs.").wait_for()
                pairs.append((alone, decode(client, process, 3 * number + 2), heard))
                page.context.close()
            browser.close()
    paint, rows, size = ([visit[name] for visit in visits] for name in ("paint_ms", "rows_ms", "bytes"))
    result.tables.append(
        Table(
            f"{count} conversations, {options.loads} visits with an empty cache",
            ("", "median", "slowest"),
            (
                ("first contentful paint, ms", f"{percentile(paint, 0.5):.0f}", f"{max(paint):.0f}"),
                ("all rows are there, ms", f"{percentile(rows, 0.5):.0f}", f"{max(rows):.0f}"),
                ("bytes over the wire", f"{percentile(size, 0.5):,.0f}", f"{max(size):,.0f}"),
            ),
        )
    )
    cpu = [[pair[at]["cpu_ms_a_token"] for pair in pairs] for at in range(3)]
    heard_share = statistics.median(later / earlier - 1 for earlier, later in zip(cpu[0], cpu[2], strict=True))
    share = heard_share / LISTENERS
    speeds = [statistics.median(pair[at]["tokens_a_s"] for pair in pairs) for at in range(3)]
    result.tables.append(
        Table(
            f"a turn of {OUTPUT_TOKENS} tokens, median of {options.pairs}",
            ("", "alone", "a page open", f"{LISTENERS} listeners"),
            (
                ("processor ms a token", *(f"{statistics.median(each):.3f}" for each in cpu)),
                ("tokens a second", *(f"{each:.0f}" for each in speeds)),
            ),
        )
    )
    median_paint, most_bytes = percentile(paint, 0.5), max(size)
    result.goals += [
        Goal("first paint", f"< {PAINT_MS:.0f} ms", f"{median_paint:.0f} ms", median_paint < PAINT_MS),
        Goal("bytes", f"< {PAGE_BYTES:,}", f"{most_bytes:,.0f}", most_bytes < PAGE_BYTES),
        Goal(
            "processor time that one page adds to a running turn",
            f"< +{COST_SHARE:.0%}",
            f"{share:+.2%}",
            share < COST_SHARE,
        ),
    ]
    result.raw = {"visits": visits, "pairs": [list(pair) for pair in pairs]}
    finish(result, started)


if __name__ == "__main__":
    main()
