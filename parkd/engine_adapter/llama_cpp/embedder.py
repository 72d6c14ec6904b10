"""Embeddings and relevance of texts, through a context of their own: no live conversation is touched.

text -> tokens -> one batch -> pooled over the tokens -> [dimensions]       `--embeddings`
query and document -> tokens -> one batch -> one number                     `--reranking`
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import llama_cpp.llama_cpp as low
import numpy as np
import numpy.typing as npt

from parkd.engine_adapter.llama_cpp.library import LlamaModel
from parkd.engine_adapter.llama_cpp.text import LlamaTokenizer
from parkd.errors import EngineFailure, ModelError

MOST_TOKENS = 2048
"""The longest text, since attention and pooling see all of it at once; more with a larger --batch-size."""
POOLINGS = {"mean": low.LLAMA_POOLING_TYPE_MEAN, "cls": low.LLAMA_POOLING_TYPE_CLS} | {
    "last": low.LLAMA_POOLING_TYPE_LAST,
    "rank": low.LLAMA_POOLING_TYPE_RANK,
}
RERANK_TEMPLATE = "rerank"
"""The chat template of the file that a query and a document are put into (Qwen3's rerankers have one)."""


class LlamaEmbedder:
    """An `Embedder`. Thread-safe: one text is computed at a time."""

    def __init__(self, model: LlamaModel, tokenizer: LlamaTokenizer, pooling: str | None) -> None:
        """`pooling` is a name of `POOLINGS`; None: as the file says. Raises ModelError."""
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self.most_tokens = max(model.batch_tokens, min(MOST_TOKENS, model.model_tokens or MOST_TOKENS))
        kind = low.LLAMA_POOLING_TYPE_UNSPECIFIED if pooling is None else POOLINGS[pooling]
        self._context = model.open_context(embeds_tokens=self.most_tokens, pooling=kind)
        self._last_words: Callable[[], str] = model.last_words
        kind = int(low.llama_pooling_type(self._context.pointer))
        if kind == low.LLAMA_POOLING_TYPE_NONE:
            self._context.close()
            raise ModelError(
                "--embeddings: the model's file does not say how its tokens are pooled. Add --pooling last or mean, as "
                "the model's authors say."
            )
        self.ranks = kind == low.LLAMA_POOLING_TYPE_RANK
        self._dimensions = 1 if self.ranks else int(low.llama_model_n_embd(model.pointer))
        template = low.llama_model_chat_template(model.pointer, RERANK_TEMPLATE.encode()) if self.ranks else None
        self._template = template.decode() if template else None
        self._vocab = model.vocab

    def tokens(self, text: str) -> list[int]:
        return self._tokenizer.encode_whole(text)

    def pair(self, query: str, document: str) -> list[int]:
        if self._template is not None:
            # Not one after the other: a query may contain the mark of the document.
            parts = self._template.replace("{query}", "\0q\0").replace("{document}", "\0d\0").split("\0")
            texts = {"q": query, "d": document}
            return self._tokenizer.encode("".join(texts.get(part, part) for part in parts))
        begin, end = low.llama_vocab_bos(self._vocab), low.llama_vocab_eos(self._vocab)
        between = low.llama_vocab_sep(self._vocab)
        asked, found = self._tokenizer.encode(query), self._tokenizer.encode(document)
        framed = [begin, *asked, end, between, *found, end]
        return [token for token in framed if token >= 0]

    def embed(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        assert 0 < len(token_ids) <= self.most_tokens, "the caller has checked the length"
        with self._lock:
            return self._computed(token_ids)

    def close(self) -> None:
        self._context.close()

    def _computed(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        count = len(token_ids)
        low.llama_memory_clear(self._context.memory, False)
        batch = low.llama_batch_init(count, 0, 1)
        try:
            batch.n_tokens = count
            for place, token in enumerate(token_ids):
                batch.token[place], batch.pos[place], batch.logits[place] = token, place, 1
                batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
            failed = low.llama_decode(self._context.pointer, batch)
            pooled = None if failed else low.llama_get_embeddings_seq(self._context.pointer, 0)
            if not pooled:
                raise EngineFailure(
                    f"llama.cpp could not embed {count} tokens (code {failed}): {self._last_words()}. Send it again."
                )
            return np.ctypeslib.as_array(pooled, (self._dimensions,)).copy()
        finally:
            low.llama_batch_free(batch)
