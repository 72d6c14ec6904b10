"""Every view in a real browser: with nothing, one and three hundred conversations, light and dark, wide and narrow."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from parkd.ledger.ledger import Ledger
from parkd.proxy.config import ProxyConfig
from parkd.proxy.server import Server
from parkd.types import NamedKey
from tests.fakes.engine import FakeEngine
from tests.integration.api.api_harness import Gate, body_of, make_services, running_in_thread
from tests.page.page_data import NASTY
from tests.page.page_kit import DESK, EXPECT_MS, PHONE, TITLES, VIEWS, opened, tell

pytestmark = [pytest.mark.slow, pytest.mark.page]
LONG = [{"role": "user", "content": "A long question. " * 200}]
LOOKS = {"light": (False, DESK), "dark": (True, DESK), "phone": (False, PHONE), "dark phone": (True, PHONE)}


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that says it keeps a ledger, as those do whose data the tests make up."""
    with (
        closing(Ledger(tmp_path_factory.mktemp("quiet") / "ledger.sqlite3")) as ledger,
        running_in_thread(FakeEngine(), ledger=ledger) as server,
    ):
        yield server


def ask(server: Server, messages: list[dict[str, Any]], key: str = "none", **fields: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=server.url, timeout=30, trust_env=False) as client:
        answer = client.post("/v1/chat/completions", json=body_of(messages, **fields), headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


def soon(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + EXPECT_MS / 1000
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


@contextmanager
def serving(server: Server, port: int = 0) -> Iterator[Server]:
    """Runs a server in a thread, on a free port if `port` is 0."""
    with socket.create_server(("127.0.0.1", port)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        soon(lambda: server.started)
        try:
            yield server
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("count", [0, 1, 300])
def test_every_view_is_sound_and_accessible(browser: Any, axe: str, quiet: Server, count: int, look: str) -> None:
    dark, size = LOOKS[look]
    with opened(browser, quiet.url, dark=dark, size=size) as seen:
        tell(seen, count, words=True)
        for view in VIEWS:
            seen.go(view)
            seen.text("live")
            if view == "conversations":
                seen.text("No conversation is parked" if count == 0 else f"{count} conversation")
                if count:
                    seen.page.locator(".name").first.click()
                    seen.text("Forget", "Its turns")
            if view == "cold":
                seen.text("No turn ended in this time" if count == 0 else "By client")
            if view == "budget":
                seen.text("What fits")
            assert seen.faults(axe) == [], (view, count, look)
            seen.is_sound()


def test_a_live_turn_is_seen_from_its_reading_to_its_end(browser: Any, axe: str) -> None:
    reading, answering = Gate("chunk", 3), Gate("token", 4)

    def hook(name: str, number: int) -> None:
        reading(name, number)
        answering(name, number)

    with running_in_thread(FakeEngine(hook=hook, end_odds=10**9)) as server, opened(browser, server.url) as seen:
        tell(seen, 0)
        seen.go("now")
        seen.text("Nothing runs.")
        turn = threading.Thread(target=ask, args=(server, LONG))
        turn.start()
        soon(reading.reached.is_set)
        waits = threading.Thread(target=ask, args=(server, [{"role": "user", "content": "Another"}]))
        waits.start()
        length = server.proxy.lane.running.explained.progress.total_tokens  # type: ignore[union-attr]
        seen.text("Reading its prompt", "1,024", f"of {length:,} tokens", "tokens/s", "Queue")
        seen.page.get_by_role("region", name="Queue").get_by_role("row").nth(1).wait_for(timeout=EXPECT_MS)
        assert seen.faults(axe) == []
        reading.opened.set()
        soon(answering.reached.is_set)
        seen.text("Answering", "To the first token")
        answering.opened.set()
        turn.join()
        waits.join()
        seen.text("Nothing runs.", "2 conversations")
        seen.is_sound()


def test_a_paused_turn_is_seen_beside_the_one_that_runs(browser: Any, axe: str) -> None:
    opened_up, held, servers = threading.Event(), threading.Event(), list[Server]()

    def hook(name: str, _number: int) -> None:
        """Each token takes a while, so that there is time to pause; the turn that another one pauses for is held."""
        if name == "token":
            time.sleep(0.01)
            if servers[0].proxy.lane.paused and not opened_up.is_set():
                held.set()
                assert opened_up.wait(60)

    engine = FakeEngine(batch_tokens=128, hook=hook, end_odds=10**9)
    with running_in_thread(engine) as server, opened(browser, server.url) as seen:
        servers.append(server)
        tell(seen, 0)
        seen.go("now")
        asked = [
            threading.Thread(target=ask, args=(server, LONG), kwargs={"max_tokens": 300}),
            threading.Thread(target=ask, args=(server, [{"role": "user", "content": "A title."}])),
        ]
        asked[0].start()
        seen.text("Answering")
        asked[1].start()
        soon(held.is_set)
        paused = seen.page.get_by_role("article").filter(has=seen.page.get_by_role("heading", name="Paused"))
        try:
            paused.wait_for(timeout=EXPECT_MS)
            turn = server.proxy.lane.paused_turns[0]
            known = f"{turn.answer.output_tokens:,} tokens so far"  # type: ignore[union-attr]
            assert turn.request_id in paused.text_content()
            assert known in paused.text_content()
            assert "Speed" not in paused.text_content(), "a turn that rests has no speed"
            assert seen.page.get_by_role("article").count() == 2
            assert seen.faults(axe) == []
        finally:
            opened_up.set()
        paused.wait_for(state="detached", timeout=EXPECT_MS)
        for each in asked:
            each.join()
        seen.text("Nothing runs.")
        seen.is_sound()


def test_a_refusal_is_told_with_its_reason(browser: Any, axe: str) -> None:
    services, _ = make_services(FakeEngine(), budget_bytes=8 * 1024)
    with serving(Server(services)) as server, opened(browser, server.url) as seen:
        ask(server, LONG)
        soon(lambda: not server.proxy.lane.busy)
        seen.go("budget")
        seen.text("it does not fit the budget")
        assert seen.faults(axe) == []
        seen.is_sound()


def test_a_dead_server_is_told_and_found_again(browser: Any, axe: str) -> None:
    with opened(browser, "") as seen:
        services, _ = make_services(FakeEngine())
        with serving(Server(services)) as server:
            seen.url = server.url
            port = int(server.url.rpartition(":")[2])
            seen.go("conversations")
            seen.text("live")
        seen.text("The server does not answer.", "not connected")
        assert seen.faults(axe) == []
        for view in VIEWS:  # whatever is opened says so, and nothing breaks
            seen.page.get_by_role("link", name=TITLES[view], exact=True).click()
            seen.page.get_by_role("heading", level=1, name=TITLES[view]).wait_for(timeout=EXPECT_MS)
        services, _ = make_services(FakeEngine())
        with serving(Server(services), port):
            seen.text("live")
            seen.until("() => !document.querySelector('#notice').textContent")
        # A browser itself notes each request that finds no server; the page adds nothing.
        assert [line for line in seen.console if "Failed to load resource" not in line] == []


def test_a_wrong_key_is_refused_and_the_right_one_kept_in_its_tab(browser: Any, axe: str) -> None:
    config = ProxyConfig(named_keys=(NamedKey("anna", "k-anna"), NamedKey("ben", "k-ben")), operator_keys=("k-op",))
    with running_in_thread(FakeEngine(), config=config) as server, opened(browser, server.url) as seen:
        ask(server, LONG, "k-anna")
        seen.go("now")
        field = seen.page.get_by_label("API key")
        field.wait_for(timeout=EXPECT_MS)
        assert seen.faults(axe) == []
        field.fill("wrong")
        seen.page.keyboard.press("Enter")
        seen.text("The server does not know the key.")
        seen.page.get_by_label("API key").fill("k-ben")
        seen.page.keyboard.press("Enter")
        seen.text("Nothing runs.", "No turn of your key runs.")
        assert seen.page.get_by_text("parked as").count() == 0, "ben sees what anna said"
        seen.page.reload()
        seen.text("Nothing runs.")
        assert seen.page.evaluate("() => [sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
        seen.page.evaluate("() => sessionStorage.setItem('parkd-key', 'k-op')")
        seen.page.reload()
        seen.text("1 conversation")
        assert not any("k-" in line for line in seen.console)


def test_all_can_be_done_by_keyboard(browser: Any, quiet: Server) -> None:
    with opened(browser, quiet.url) as seen:
        tell(seen, 12, words=True)
        done: list[tuple[str, str, dict[str, str]]] = []

        def act(route: Any) -> None:
            done.append(
                (route.request.method, route.request.url.rpartition("/parkd/conversations/")[2], route.request.headers)
            )
            route.fulfill(json={})

        seen.page.route("**/parkd/conversations/*", act)
        seen.page.route("**/parkd/conversations/*/*", act)
        seen.go("now")
        seen.text("live")
        press, focused = seen.page.keyboard.press, "() => document.activeElement.textContent"
        press("Tab")
        assert seen.page.evaluate(focused) == "Skip to content"
        for _ in range(2):
            press("Tab")
        assert seen.page.evaluate(focused) == "Conversations"
        outline = "() => getComputedStyle(document.activeElement).outlineStyle"
        assert seen.page.evaluate(outline) != "none", "the focus is not seen"
        press("Enter")
        seen.text("12 conversations")
        seen.until("() => document.activeElement.id === 'main'")
        for _ in range(3):  # Find, Order, the first conversation
            press("Tab")
        assert seen.page.evaluate("() => document.activeElement.getAttribute('aria-expanded')") == "false"
        press("Enter")
        assert seen.page.evaluate("() => document.activeElement.getAttribute('aria-expanded')") == "true"
        press("Tab")
        assert seen.page.evaluate(focused) in ("Pin", "Unpin")
        press("Enter")
        seen.soon(lambda: len(done) == 1)
        seen.text("inned ")
        while seen.page.evaluate(focused) != "Forget":
            press("Tab")
        press("Enter")
        assert seen.page.evaluate(focused) == "Forget it for good?"
        assert len(done) == 1, "one press forgets nothing"
        press("Enter")
        seen.soon(lambda: len(done) == 2)
        seen.text("Forgot ")
        assert [method for method, _, _ in done] == ["POST", "DELETE"]
        assert done[0][1].endswith("pin")
        assert all(headers["x-parkd-action"] == "1" for _, _, headers in done)
        seen.is_sound()


def test_a_clock_in_a_prompt_is_told_with_the_rule_against_it(browser: Any, axe: str, tmp_path: Path) -> None:
    """From two requests to the line for the rules file, on a real ledger."""
    config = ProxyConfig(shows_text=True, watts=400.0, kwh_price=0.3)
    rest = "You answer in short and friendly sentences, and say no more than was asked. " * 4
    with (
        closing(Ledger(tmp_path / "ledger.sqlite3")) as ledger,
        running_in_thread(FakeEngine(), config=config, ledger=ledger) as server,
        opened(browser, server.url) as seen,
    ):
        for clock in ("10:04:31", "10:05:02"):
            said = [{"role": "system", "content": f"It is {clock} now. {rest}"}, {"role": "user", "content": NASTY}]
            ask(server, said)
            soon(lambda: not server.proxy.lane.busy)
        seen.go("cold")
        seen.text("Spent reading again", "a clock or an id in the prompt", "What would prevent it", "[[rule]]", "kWh")
        seen.page.locator("summary").first.click()
        marks = seen.page.locator("mark")
        marks.nth(1).wait_for(timeout=EXPECT_MS)
        assert marks.all_text_contents() == ["10:04:31", "10:05:02"]
        seen.page.get_by_role("button", name="Try it", exact=True).click()
        seen.text("It would have saved", "in the last 2 requests")
        seen.page.get_by_role("button", name="Switch it on", exact=True).click()
        seen.text("It is on until the server stops.")
        assert seen.faults(axe) == []
        seen.go("now")
        seen.text("Last turns")
        seen.is_sound()


def test_without_a_ledger_the_views_say_so(browser: Any) -> None:
    with running_in_thread(FakeEngine()) as server, opened(browser, server.url) as seen:
        ask(server, LONG)
        for view in ("cold", "now", "conversations"):
            seen.go(view)
            seen.text("live")
            if view == "cold":
                seen.text("This server keeps no ledger.")
            if view == "conversations":
                seen.page.locator(".name").first.click()
                seen.text("The server keeps no ledger of turns.")
        seen.is_sound()


def test_prompts_are_shown_as_text_whatever_they_contain(browser: Any, tmp_path: Path) -> None:
    engine = FakeEngine(script=lambda _prompt: NASTY)
    with (
        closing(Ledger(tmp_path / "ledger.sqlite3")) as ledger,
        running_in_thread(engine, ledger=ledger) as server,
        opened(browser, server.url) as seen,
    ):
        tell(seen, 12, words=True)
        seen.go("conversations")
        seen.page.locator(".name").first.click()
        seen.text(NASTY)
        in_ram, on_disk = (
            seen.page.locator(".row", has=seen.page.locator(".badge", has_text=badge)).first
            for badge in ("live", "on disk")
        )
        on_disk.locator(".name").click()
        on_disk.get_by_role("button", name="Forget").wait_for(timeout=EXPECT_MS)
        assert on_disk.get_by_role("button", name="Move to disk").count() == 0, "it is there already"
        in_ram.locator(".name").click()
        in_ram.get_by_role("button", name="Move to disk").wait_for(timeout=EXPECT_MS)
        seen.page.locator("summary").nth(1).click()
        marks = seen.page.locator("mark")
        marks.nth(1).wait_for(timeout=EXPECT_MS)
        assert marks.all_text_contents() == ["09:41", "12:01"]
        assert seen.page.locator(".diff code").nth(1).text_content() == f"It is 12:01 {NASTY}"
        seen.go("try")
        seen.page.get_by_label("Message", exact=True).fill(NASTY)
        seen.page.keyboard.press("Enter")
        seen.page.locator(".said.assistant footer").wait_for(timeout=EXPECT_MS)
        seen.until("() => document.querySelector('.say button').textContent === 'Send'")
        assert seen.page.locator(".said .text").all_text_contents() == [NASTY, NASTY]
        assert seen.page.locator("main img, main script, main b >> text=bold").count() == 0
        assert "owned" not in seen.page.title()
        seen.is_sound()


@pytest.mark.parametrize("shows_text", [False, True])
def test_real_conversations_are_a_tree_and_are_steered(browser: Any, axe: str, shows_text: bool) -> None:
    system = {"role": "system", "content": f"{NASTY} " + "Be careful. " * 60}
    config = ProxyConfig(shows_text=shows_text)
    with running_in_thread(FakeEngine(), config=config) as server, opened(browser, server.url) as seen:
        for words in ("First of all. ", "Another thing. "):
            ask(server, [system, {"role": "user", "content": words + NASTY}])
            soon(lambda: not server.proxy.lane.busy)
        ask(server, [{"role": "user", "content": "Alone. " * 100}])
        soon(lambda: not server.proxy.lane.busy)
        seen.go("conversations")
        seen.text("3 conversations")
        assert seen.page.locator(".fork").count() == 1
        whole = seen.page.locator("main").text_content()
        assert ("<img src=x" in whole) is shows_text
        fork = seen.page.locator(".row", has=seen.page.locator(".fork"))
        fork.locator(".name").click()
        assert seen.page.get_by_text("First of all. ").count() == 0 or shows_text
        fork.get_by_role("button", name="Pin", exact=True).click()
        fork.locator(".badge", has_text="pinned").wait_for(timeout=EXPECT_MS)
        fork.get_by_role("button", name="Keep for").click()
        fork.locator(".badge", has_text="kept").wait_for(timeout=EXPECT_MS)
        fork.get_by_role("button", name="Move to disk").click()
        seen.text("It was not moved to disk")  # there is no disk
        assert seen.faults(axe) == []
        for _ in range(2):
            fork.get_by_role("button", name="Forget").click()
        seen.text("2 conversations", "Forgot ")
        with httpx.Client(base_url=server.url, trust_env=False) as client:
            assert len(client.get("/parkd/conversations").json()["conversations"]) == 2
        # A browser itself notes the one refusal, and turns that no ledger keeps.
        assert [line for line in seen.console if "Failed to load resource" not in line] == []


def test_a_chat_shows_what_was_reused_and_takes_images(browser: Any) -> None:
    engine = FakeEngine(reads_images=True, script=lambda _prompt: "Fine.")
    with running_in_thread(engine) as server, opened(browser, server.url) as seen:
        seen.go("try")

        def say(words: str) -> str:
            known = seen.page.locator(".said.assistant footer").count()
            seen.page.get_by_label("Message", exact=True).fill(words)
            seen.page.get_by_role("button", name="Send").click()
            seen.until(f"() => document.querySelectorAll('.said.assistant footer').length > {known}")
            seen.until("() => document.querySelector('.say button').textContent === 'Send'")
            return str(seen.page.locator(".said.assistant footer").last.locator("p").first.text_content())

        assert say("First of A. " * 60).startswith("read cold")
        assert say("Second of A").startswith("was live")
        seen.page.get_by_role("button", name="New").click()
        assert say("Something else. " * 60).startswith("read cold")
        seen.page.get_by_role("button", name="A", exact=True).click()
        assert say("Third of A").startswith("restored from RAM")
        picture = {"name": "red.png", "mimeType": "image/png", "buffer": b"PIC of something"}
        seen.page.get_by_label("Images").set_input_files([picture])
        seen.text("1 attached.")
        say("What is this?")
        assert len(engine.images_read) == 1
        assert seen.page.locator(".said img").count() == 1
        seen.is_sound()


def test_the_slider_plans_another_budget(browser: Any, quiet: Server) -> None:
    with opened(browser, quiet.url) as seen:
        seen.go("budget")
        seen.text("What fits")
        assert seen.page.get_by_text("Would fit").count() == 0
        seen.page.get_by_label("If the budget were").focus()
        for _ in range(40):
            seen.page.keyboard.press("ArrowRight")
        seen.text("Would fit")
        mib = int(seen.page.get_by_label("Budget in MiB").input_value())
        with httpx.Client(base_url=quiet.url, trust_env=False) as client:
            fits = client.get(f"/parkd/budget?ram_mib={mib}").json()["what_if"]["fits"]
        cells = seen.page.locator("td:last-child b").all_text_contents()
        assert cells == [f"{each['conversations']:,}" for each in fits]
        assert fits[0]["conversations"] > 0
        seen.is_sound()
