"""vLLM in processes of its own that can be killed, over tiny models of random weights."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from parkd_tier.canary import Reply
from parkd_tier.vllm.settings import transfer_config

from parkd.store.budget import MIB

VOCABULARY = 512
ANSWER_TOKENS = 12
CHUNK_TOKENS = 32
START_S = 300.0
"""Longest wait for an engine to start, on a machine that is busy with other things."""
ANSWER_S = 120.0
FORK = get_context("fork")
"""vLLM is imported once, by the test's process: a start takes seconds then."""


def tokens(seed: int, count: int = 530) -> list[int]:
    """A prompt. 0 and 1 begin and end texts."""
    source = random.Random(seed)
    return [source.randrange(2, VOCABULARY) for _ in range(count)]


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    cached: int
    """Prompt tokens that were not computed."""
    seconds: float


def make_model(folder: Path, seed: int, **shape: Any) -> None:
    """A llama of 2 layers, or of another shape, whose weights are so large that its answers depend on the whole
    prompt."""
    process = FORK.Process(target=_make_model, args=(folder, seed, shape))
    process.start()
    process.join(START_S)
    assert process.exitcode == 0


def _make_model(folder: Path, seed: int, shape: dict[str, Any]) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    small = {
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "initializer_range": 0.3,
    }
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        **small | shape,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def parkd_tier(
    directory: Path,
    ram_mib: int = 64,
    disk_mib: int = 64,
    *,
    needs_canary: bool = False,
    chunk_tokens: int | None = None,
) -> dict[str, Any]:
    return transfer_config(directory, ram_mib * MIB, disk_mib * MIB, chunk_tokens, 10, needs_canary=needs_canary)


def stock_fs_tier(directory: Path, ram_mib: int = 64) -> dict[str, Any]:
    """vLLM's own tier of files, with the worker that copies without a card."""
    config = parkd_tier(directory, ram_mib)
    extra = config["kv_connector_extra_config"]
    extra["secondary_tiers"] = [{"type": "fs", "root_dir": str(directory)}]
    return {**config, "kv_connector": "OffloadingConnector", "kv_connector_module_path": None}


class Engine:
    """A process with one vLLM engine in it."""

    def __init__(self, model: Path, transfer: dict[str, Any] | None, **options: Any) -> None:
        self._pipe, theirs = FORK.Pipe()
        self._process = FORK.Process(target=_serve, args=(theirs, model, transfer, options), daemon=True)
        self._process.start()
        theirs.close()
        self._call("started", wait_s=START_S)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def ask(self, prompt: Sequence[int], salt: str | None = None, count: int = ANSWER_TOKENS) -> Answer:
        return Answer(*self._call("ask", list(prompt), salt, count))

    def ask_as_canary(self, prompt: list[int], salt: str, params: Mapping[str, Any]) -> Reply:
        return Reply(*self._call("ask_as_canary", prompt, salt, dict(params)))

    def ask_all(self, prompts: Sequence[Sequence[int]], count: int = ANSWER_TOKENS) -> list[Answer]:
        """At once."""
        return [Answer(*each) for each in self._call("ask_all", [list(prompt) for prompt in prompts], count)]

    def empty_memory(self) -> None:
        """Empties the device's cache and vLLM's tier in memory, once all is written."""
        self._call("empty_memory")

    def lines(self) -> list[str]:
        """What parkd logged, warnings and worse."""
        return list(self._call("lines"))

    def counts(self) -> dict[str, int]:
        """By vLLM's metrics, without the prefix of the tier's."""
        return dict(self._call("counts"))

    def limit_files(self, size: int | None) -> None:
        """No file may grow beyond `size`, as on a disk that is full; None: any may."""
        self._call("limit_files", size)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._process.join(ANSWER_S)

    def send(self, prompt: Sequence[int]) -> None:
        """Asks and does not wait."""
        self._pipe.send(("ask", list(prompt), None, ANSWER_TOKENS))

    def close(self) -> None:
        if self._process.is_alive():
            self._pipe.send(("close",))
            self._process.join(ANSWER_S)
            if self._process.is_alive():
                self.kill()
                raise AssertionError("vLLM did not stop")

    def _call(self, *message: Any, wait_s: float = ANSWER_S) -> Any:
        if message != ("started",):
            self._pipe.send(message)
        assert self._pipe.poll(wait_s), f"no answer to {message[0]}"
        try:
            kind, value = self._pipe.recv()
        except EOFError as error:
            raise EngineFailed("the process is gone") from error
        if kind == "failed":
            raise EngineFailed(value)
        return value


class EngineFailed(Exception):
    pass


@contextmanager
def running(model: Path, transfer: dict[str, Any] | None, **options: Any) -> Iterator[Engine]:
    engine = Engine(model, transfer, **options)
    try:
        yield engine
    finally:
        engine.close()


def _serve(pipe: Connection, model: Path, transfer: dict[str, Any] | None, options: dict[str, Any]) -> None:
    import vllm

    vllm.__version__ = options.pop("version", vllm.__version__)
    try:
        engine = _Served(model, transfer, options)
    except BaseException as error:
        chain: list[str] = []
        seen: BaseException | None = error
        while seen is not None:
            chain.append(f"{type(seen).__name__}: {seen}")
            seen = seen.__cause__ or seen.__context__
        pipe.send(("failed", "\n".join(chain)))
        os._exit(1)
    pipe.send(("done", None))
    while True:
        name, *rest = pipe.recv()
        if name == "close":
            engine.close()
            os._exit(0)
        pipe.send(("done", getattr(engine, name)(*rest)))


class _Served:
    def __init__(self, model: Path, transfer: dict[str, Any] | None, options: dict[str, Any]) -> None:
        import logging

        from vllm import LLM

        self._lines: list[str] = []
        make = logging.getLogRecordFactory()

        def noted(*args: Any, **kwargs: Any) -> logging.LogRecord:
            record = make(*args, **kwargs)
            if record.name.startswith("parkd") and record.levelno >= logging.WARNING:
                self._lines.append(record.getMessage())
            return record

        logging.setLogRecordFactory(noted)
        self._llm = LLM(
            model=str(model),
            kv_transfer_config=transfer,
            **{
                "skip_tokenizer_init": True,
                "dtype": "float32",
                "max_model_len": 1024,
                "enforce_eager": True,
                "max_num_seqs": 4,
                "block_size": CHUNK_TOKENS,
                "kv_cache_memory_bytes": 2 * MIB,
                "gpu_memory_utilization": 0.02,
                "enable_prefix_caching": True,
                "disable_log_stats": False,
            }
            | options,
        )

    def ask(self, prompt: list[int], salt: str | None, count: int) -> tuple[tuple[int, ...], int, float]:
        return self._ask([prompt], salt, count)[0]

    def ask_all(self, prompts: list[list[int]], count: int) -> list[tuple[tuple[int, ...], int, float]]:
        return self._ask(prompts, None, count)

    def ask_as_canary(
        self, prompt: list[int], salt: str, params: dict[str, Any]
    ) -> tuple[tuple[str, ...], tuple[float, ...]]:
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=ANSWER_TOKENS,
            ignore_eos=True,
            detokenize=False,
            logprobs=1,
            extra_args={"kv_transfer_params": params},
        )
        given: Any = {"prompt_token_ids": prompt, "cache_salt": salt}
        answer = self._llm.generate([given], sampling, use_tqdm=False)[0].outputs[0]
        odds = [places[token].logprob for token, places in zip(answer.token_ids, answer.logprobs or [], strict=True)]
        return tuple(map(str, answer.token_ids)), tuple(odds)

    def _ask(self, prompts: list[list[int]], salt: str | None, count: int) -> list[tuple[tuple[int, ...], int, float]]:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        inputs: list[Any] = [
            {"prompt_token_ids": prompt, **({} if salt is None else {"cache_salt": salt})} for prompt in prompts
        ]
        began_s = time.monotonic()
        outputs = self._llm.generate(inputs, sampling, use_tqdm=False)
        took_s = time.monotonic() - began_s
        return [(tuple(each.outputs[0].token_ids), each.num_cached_tokens or 0, took_s) for each in outputs]

    def empty_memory(self) -> None:
        core = self._llm.llm_engine
        deadline_s = time.monotonic() + ANSWER_S
        while core.has_unfinished_requests() or self._manager().has_pending_work():
            core.step()
            assert time.monotonic() < deadline_s
        assert self._llm.reset_prefix_cache(reset_connector=True)

    def lines(self) -> list[str]:
        return self._lines

    def counts(self) -> dict[str, int]:
        for _ in range(2):  # vLLM collects them with a step
            self._ask([[2, 3]], "counting", 1)
        found = {each.name: each.value for each in self._llm.get_metrics() if hasattr(each, "value")}
        mine = "vllm:parkd_tier_"
        return {name.removeprefix(mine): int(value) for name, value in found.items() if name.startswith(mine)}

    def limit_files(self, size: int | None) -> None:
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard if size is None else size, hard))

    def _manager(self) -> Any:
        core = self._llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
        return core.scheduler.connector.connector_scheduler.manager

    def close(self) -> None:
        core = self._llm.llm_engine.engine_core
        core.shutdown()
