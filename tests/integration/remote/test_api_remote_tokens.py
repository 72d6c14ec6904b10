"""parkd before servers that take token ids: identity is in tokens, and parkd writes prompts and reads answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from parkd_engine.families.presets.words import tiny_tokenizer

from parkd.errors import ConfigError, ModelError
from parkd.types import NamedKey, Unit
from tests.fakes.kv_publisher import BLOCK, FakePublisher, removed, stored
from tests.fakes.openai_server import OLLAMA, SGLANG, VLLM, Events, FakeUpstream, ended, model_of
from tests.integration.api.api_harness import Messages, until
from tests.integration.remote.remote_kit import before, open_engine

pytestmark = pytest.mark.anyio

SYSTEM = "A server holds one conversation in memory and parks the others. " * 20
CALLS_TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
ALICE, BOB = NamedKey("alice", "sk-alice-0123456789"), NamedKey("bob", "sk-bob-0123456789")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model's tokenizer."""
    place = tmp_path_factory.mktemp("model")
    tiny_tokenizer().save_pretrained(place)
    return place


def opening(question: str = "Hi", system: str = SYSTEM) -> Messages:
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


class Model:
    """What a server has: the tokenizer's own library, without parkd."""

    def __init__(self, template: str | None = None) -> None:
        self.tokenizer = tiny_tokenizer()
        if template is not None:
            self.tokenizer.chat_template = template
        [self.end_id] = self.tokenizer.encode("<|im_end|>")

    def prompt(self, messages: Messages, tools: Any = None) -> list[int]:
        ids: list[int] = self.tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return ids

    def tokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        if "messages" in body:
            return {"tokens": self.prompt(body["messages"])}
        return {"tokens": self.tokenizer.encode(body["prompt"], add_special_tokens=False)}

    def answers(self, ids: list[int], *, ends: bool = True) -> Any:
        """A script that says these ids, a few at a time."""

        def script(body: dict[str, Any]) -> Events:
            whole = [*ids, self.end_id] if ends else ids
            for start in range(0, len(whole), 3):
                part = whole[start : start + 3]
                text = self.tokenizer.decode([each for each in part if each != self.end_id])
                choice: dict[str, Any] = {"index": 0, "text": text, "token_ids": part, "finish_reason": None}
                if start == 0:
                    choice["prompt_token_ids"] = body["prompt"]
                yield {"choices": [choice]}
            yield {"choices": [{"index": 0, "text": "", "finish_reason": "stop" if ends else "length"}]}

        return script


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture(params=[VLLM, SGLANG], ids=["vLLM", "SGLang"])
def upstream(request: pytest.FixtureRequest, model: Model) -> Iterator[FakeUpstream]:
    with FakeUpstream(request.param) as server:
        server.posts["/tokenize"] = model.tokenize
        server.script = model.answers(model.tokenizer.encode("Hello there, h\u00e9!"))
        yield server


async def test_a_prompt_goes_as_the_ids_that_the_model_reads(
    upstream: FakeUpstream, model: Model, folder: Path
) -> None:
    async with before(upstream, tokenizer=str(folder)) as parkd:
        assert parkd.engine.info.unit is Unit.TOKEN
        answer = await parkd.chat(opening())
        assert answer.text == "Hello there, h\u00e9!"
        assert answer.finish_reason == "stop"
        [body] = upstream.bodies
        assert upstream.paths == ["/v1/completions"]
        assert body["prompt"] == model.prompt(opening())
        assert body["return_token_ids"] is True
        assert body["max_tokens"] == 64
        assert answer.usage["completion_tokens"] == len(model.tokenizer.encode("Hello there, h\u00e9!")) + 1
        streamed = await parkd.stream(opening())
        assert streamed.text == answer.text


async def test_what_it_answered_comes_back_in_the_tokens_that_it_generated(
    upstream: FakeUpstream, model: Model, folder: Path
) -> None:
    """A model need not write a text in the tokens that its tokenizer would; its server's state has those it wrote."""
    letters = [model.tokenizer.encode(char)[0] for char in "conversation"]
    assert letters != model.tokenizer.encode("conversation")
    upstream.script = model.answers(letters)
    async with before(upstream, tokenizer=str(folder)) as parkd:
        first = await parkd.chat(opening())
        assert first.text == "conversation"
        await parkd.chat(
            [*opening(), {"role": "assistant", "content": first.text}, {"role": "user", "content": "More"}]
        )
        asked, again = (body["prompt"] for body in upstream.bodies)
        assert again[: len(asked) + len(letters) + 1] == [*asked, *letters, model.end_id]


async def test_where_a_prompt_differs_is_told_in_tokens(upstream: FakeUpstream, model: Model, folder: Path) -> None:
    async with before(upstream, tokenizer=str(folder)) as parkd:
        await parkd.chat(opening("one"))
        answer = await parkd.chat(opening("two"))
        pair = zip(model.prompt(opening("one")), model.prompt(opening("two")), strict=False)
        place = next(n for n, (a, b) in enumerate(pair) if a != b)
        assert answer.headers["x-parkd-why"].startswith(f"differs from token {place} in ")


async def test_calls_are_read_by_the_models_own_template(folder: Path, tmp_path: Path) -> None:
    model, template = Model(CALLS_TEMPLATE), tmp_path / "template.jinja"
    template.write_text(CALLS_TEMPLATE)
    with FakeUpstream(VLLM) as upstream:
        upstream.posts["/tokenize"] = model.tokenize
        said = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
        upstream.script = model.answers(model.tokenizer.encode(said))
        async with before(upstream, tokenizer=str(folder), chat_template_file=str(template)) as parkd:
            answer = await parkd.chat(opening(), tools=[TOOL])
            [call] = answer.chunks[0]["tool_calls"]
            assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}
            assert answer.finish_reason == "tool_calls"
            assert upstream.bodies[-1]["prompt"] == model.prompt(opening(), [TOOL])
            refused = await parkd.post(opening(), tools=[TOOL], tool_choice="required")
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")


async def test_the_servers_own_directory_is_used_if_it_is_here(folder: Path, model: Model) -> None:
    answers = {**VLLM, "/v1/models": model_of("vllm", root=str(folder), max_model_len=4000)}
    with FakeUpstream(answers) as upstream:
        upstream.posts["/tokenize"] = model.tokenize
        assert open_unit(upstream) is Unit.TOKEN
        assert open_unit(upstream, tokenizer="none") is Unit.CHARACTER
        upstream.posts["/tokenize"] = Model(CALLS_TEMPLATE.replace("system", "")).tokenize
        other = Model("{% for message in messages %}[{{ message.content }}]{% endfor %}")
        upstream.posts["/tokenize"] = other.tokenize  # the server was started with another template
        assert open_unit(upstream) is Unit.CHARACTER


def open_unit(upstream: FakeUpstream, **flags: str) -> Unit:
    engine = open_engine(upstream, **flags)
    engine.close()
    return engine.info.unit


async def test_words_that_are_not_the_servers_are_refused(folder: Path) -> None:
    with FakeUpstream(VLLM) as upstream:
        upstream.posts["/tokenize"] = lambda _body: {"tokens": [1, 2, 3]}
        with pytest.raises(ModelError, match="not that of the server's model"):
            open_engine(upstream, tokenizer=str(folder))
        upstream.posts["/tokenize"] = Model("{{ messages[0].content }}").tokenize
        with pytest.raises(ModelError, match="another chat template"):
            open_engine(upstream, tokenizer=str(folder))
    with FakeUpstream(OLLAMA) as upstream, pytest.raises(ModelError, match="takes no prompts as token ids"):
        open_engine(upstream, tokenizer=str(folder))


async def test_a_server_that_returns_no_ids_or_read_others_is_not_believed(
    upstream: FakeUpstream, model: Model, folder: Path
) -> None:
    async with before(upstream, tokenizer=str(folder)) as parkd:
        upstream.script = lambda _: iter([{"choices": [{"index": 0, "text": "Hello"}]}, ended()])
        response = await parkd.post(opening())
        assert response.status_code == 502
        assert "does not return the ids" in response.text
        other = {"index": 0, "text": "x", "token_ids": [5], "prompt_token_ids": [1, 2, 3]}
        upstream.script = lambda _: iter([{"choices": [other]}, ended()])
        response = await parkd.post(opening())
        assert response.status_code == 502
        assert "another prompt" in response.text
        upstream.script = model.answers(model.tokenizer.encode("whole"), ends=False)
        answer = await parkd.chat(opening())
        assert (answer.text, answer.finish_reason) == ("whole", "length")


async def test_a_prompt_beyond_the_context_never_reaches_the_server(folder: Path, upstream: FakeUpstream) -> None:
    async with before(upstream, tokenizer=str(folder), ctx_size="64") as parkd:
        response = await parkd.post(opening())
        assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert upstream.bodies == []


async def test_what_the_server_tells_that_it_holds_is_told_and_what_it_gave_up(
    upstream: FakeUpstream, model: Model, folder: Path
) -> None:
    """The server's events are made by its own rule: blocks of 4 tokens, each with a number."""
    with FakePublisher(keeps=1000) as publisher:
        flags = {"upstream_events": publisher.endpoint, "upstream_events_replay": str(publisher.replay_endpoint)}
        async with before(upstream, named_keys=(ALICE, BOB), tokenizer=str(folder), **flags) as parkd:
            first = await parkd.chat(opening(), key=ALICE.key)
            assert "x-parkd-held-tokens" not in first.headers
            body = upstream.bodies[-1]
            blocks = len(body["prompt"]) // BLOCK
            names = list(range(1, blocks + 1))
            publisher.publish(stored(body["prompt"][: blocks * BLOCK], names, salt=body["cache_salt"]))
            held = parkd.engine.held
            assert held is not None
            await until(lambda: held.stats().blocks == blocks)
            again = await parkd.chat(opening(), key=ALICE.key)
            assert again.headers["x-parkd-held-tokens"] == str(blocks * BLOCK)
            assert "x-parkd-why" not in again.headers
            publisher.publish(removed(*names[10:]))
            upstream.forget()
            await until(lambda: held.stats().gone_blocks == blocks - 10)
            cold = await parkd.chat(opening(), key=ALICE.key)
            assert cold.headers["x-parkd-held-tokens"] == str(10 * BLOCK)
            told = f"evicted by the upstream server: tokens {10 * BLOCK} to {blocks * BLOCK}, from GPU 0 s before"
            assert cold.headers["x-parkd-why"] == told
            explained = await parkd.client.get(
                f"/parkd/explain/{cold.headers['x-request-id']}", headers={"authorization": f"Bearer {ALICE.key}"}
            )
            assert (explained.json()["held_tokens"], explained.json()["why"]) == (10 * BLOCK, told)
            upstream.tells_cached = False
            uncounted = await parkd.chat(opening(), key=ALICE.key)
            assert uncounted.headers["x-parkd-why"].startswith(f"{told}; ")
            others = await parkd.chat(opening(), key=BOB.key)
            assert others.headers["x-parkd-held-tokens"] == "0"
            assert "evicted" not in others.headers.get("x-parkd-why", "")
            page = parkd.server.proxy.metrics.page().decode()
            assert f"parkd_upstream_kv_gone_blocks {blocks - 10}.0" in page


async def test_events_are_refused_where_nothing_could_be_made_of_them(folder: Path) -> None:
    with FakeUpstream(VLLM) as upstream, pytest.raises(ModelError, match="--tokenizer"):
        open_engine(upstream, upstream_events="tcp://127.0.0.1:5557")
    with FakeUpstream(OLLAMA) as upstream, pytest.raises(ModelError, match="publishes no KV events"):
        open_engine(upstream, upstream_events="tcp://127.0.0.1:5557")
    with FakeUpstream(VLLM) as upstream, pytest.raises(ConfigError, match="name both"):
        open_engine(upstream, upstream_events_replay="tcp://127.0.0.1:5557")


async def test_logprobs_are_those_of_the_server(upstream: FakeUpstream, model: Model, folder: Path) -> None:
    """The server says those of each token by its id; parkd tells the client the tokens' texts."""
    ids = model.tokenizer.encode("Hello there")
    says_scores = True

    def script(_body: dict[str, Any]) -> Events:
        for place, token in enumerate(ids):
            odds = {f"token_id:{ids[0]}": -3.0, f"token_id:{token}": -0.5 - place, "token_id:7": -0.25}
            scores = {"tokens": [f"token_id:{token}"], "token_logprobs": [-0.5 - place], "top_logprobs": [odds]}
            choice = {"index": 0, "text": "x", "token_ids": [token], **({"logprobs": scores} if says_scores else {})}
            yield {"choices": [choice]}
        yield {"choices": [{"index": 0, "text": "", "token_ids": [], "finish_reason": "stop"}]}

    upstream.script = script
    async with before(upstream, tokenizer=str(folder)) as parkd:
        response = await parkd.post(opening(), logprobs=True, top_logprobs=2)
        if not parkd.engine.found.flavour.scores:
            assert (response.status_code, response.json()["error"]["param"]) == (400, "logprobs")
            return
        assert upstream.bodies[-1]["logprobs"] == 2
        assert upstream.bodies[-1]["return_tokens_as_token_ids"] is True
        told = response.json()["choices"][0]["logprobs"]["content"]
        texts = [model.tokenizer.decode([token]) for token in ids]
        assert [(each["token"], each["logprob"]) for each in told] == [
            (text, -0.5 - place) for place, text in enumerate(texts)
        ]
        seventh = model.tokenizer.decode([7])
        assert [(each["token"], each["logprob"]) for each in told[1]["top_logprobs"]] == [
            (seventh, -0.25),
            (texts[1], -1.5),
        ]
        says_scores = False
        refused = await parkd.post(opening(), logprobs=True)
        assert refused.status_code == 502
        assert "logprobs" in refused.json()["error"]["message"]
