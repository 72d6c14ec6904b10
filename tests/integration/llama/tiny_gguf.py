"""Tiny models of random weights as GGUF files: Qwen3's kind (full attention), Qwen3.5's (gated delta net and full
attention in turns), and Gemma 3's (sliding windows and full attention).

Names and shapes of the tensors as llama.cpp's `qwen3`, `qwen35` and `gemma3` read them. The vocabulary is the 256
bytes, one merge, and the three tokens of ChatML, so that every text is tokenised and every token is text.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

EMBED, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN = 64, 4, 4, 2, 32, 128
STATE, GROUPS, RANK, CONV = 16, 2, 4, 4
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SLIDING_LAYERS, WINDOW = 6, 32
EXPERTS, EXPERT_FFN = 4, 64
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB = 256 + 1 + len(SPECIAL)


def byte_characters() -> list[str]:
    """GPT-2's printable stand-ins, byte by byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_ins = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in stand_ins]
    return [stand_ins.get(byte, chr(256 + others.index(byte) if byte in others else 0)) for byte in range(256)]


def write_tiny_hybrid(path: Path, seed: int = 0) -> None:
    """Three layers of linear attention and one of full attention, a few hundred kilobytes."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "qwen35")
    _add_shape(writer, "tiny-hybrid", LAYERS)
    writer.add_rope_dimension_count(16)
    writer.add_rope_dimension_sections([4, 2, 2, 0])
    writer.add_ssm_conv_kernel(CONV)
    writer.add_ssm_inner_size(STATE * RANK)
    writer.add_ssm_state_size(STATE)
    writer.add_ssm_time_step_rank(RANK)
    writer.add_ssm_group_count(GROUPS)
    writer.add_uint32("qwen35.full_attention_interval", 4)
    add_vocabulary(writer)

    add = _adder(writer, rng)
    key, value = STATE * GROUPS, STATE * RANK
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        add(f"{block}.attn_norm.weight", EMBED, base=1.0)
        add(f"{block}.post_attention_norm.weight", EMBED, base=1.0)
        if (layer + 1) % 4 == 0:
            add(f"{block}.attn_q.weight", HEADS * HEAD_DIM * 2, EMBED)
            add(f"{block}.attn_k.weight", KV_HEADS * HEAD_DIM, EMBED)
            add(f"{block}.attn_v.weight", KV_HEADS * HEAD_DIM, EMBED)
            add(f"{block}.attn_output.weight", EMBED, HEADS * HEAD_DIM)
            add(f"{block}.attn_q_norm.weight", HEAD_DIM, base=1.0)
            add(f"{block}.attn_k_norm.weight", HEAD_DIM, base=1.0)
        else:
            add(f"{block}.attn_qkv.weight", 2 * key + value, EMBED)
            add(f"{block}.attn_gate.weight", value, EMBED)
            add(f"{block}.ssm_conv1d.weight", 2 * key + value, CONV, scale=0.4)
            add(f"{block}.ssm_dt.bias", RANK)
            add(f"{block}.ssm_a", RANK, scale=0.05, base=-0.3)
            add(f"{block}.ssm_beta.weight", RANK, EMBED)
            add(f"{block}.ssm_alpha.weight", RANK, EMBED)
            add(f"{block}.ssm_norm.weight", STATE, base=1.0)
            add(f"{block}.ssm_out.weight", EMBED, value)
        _add_feed_forward(add, block)
    _write(writer)


def write_tiny_reranker(path: Path) -> None:
    """The same with a head that says how well a document answers, as Qwen3's rerankers have it."""
    write_tiny_dense(path, labels=("yes", "no"))


def write_tiny_dense(path: Path, seed: int = 0, labels: tuple[str, ...] = ()) -> None:
    """Four layers of full attention."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "qwen3")
    _add_shape(writer, "tiny-dense", LAYERS)
    add_vocabulary(writer)
    add = _adder(writer, rng)
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        for norm in ("attn_norm", "ffn_norm"):
            add(f"{block}.{norm}.weight", EMBED, base=1.0)
        _add_attention(add, block)
        _add_feed_forward(add, block)
    if labels:
        writer.add_classifier_output_labels(labels)
        add("cls.output.weight", len(labels), EMBED)
    _write(writer)


def write_tiny_sliding(path: Path, seed: int = 0) -> None:
    """Five layers with windows of `WINDOW` tokens and one of full attention."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "gemma3")
    _add_shape(writer, "tiny-sliding", SLIDING_LAYERS)
    writer.add_sliding_window(WINDOW)
    add_vocabulary(writer)

    add = _adder(writer, rng)
    for layer in range(SLIDING_LAYERS):
        block = f"blk.{layer}"
        for norm in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            add(f"{block}.{norm}.weight", EMBED, base=1.0)
        _add_attention(add, block)
        _add_feed_forward(add, block)
    _write(writer)


def write_tiny_experts(path: Path, seed: int = 0) -> None:
    """Four layers of full attention with four experts each, of which a token takes two."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "qwen3moe")
    _add_shape(writer, "tiny-experts", LAYERS)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(EXPERT_FFN)
    add_vocabulary(writer)
    add = _adder(writer, rng)
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        for norm in ("attn_norm", "ffn_norm"):
            add(f"{block}.{norm}.weight", EMBED, base=1.0)
        _add_attention(add, block)
        add(f"{block}.ffn_gate_inp.weight", EXPERTS, EMBED)
        add(f"{block}.ffn_gate_exps.weight", EXPERTS, EXPERT_FFN, EMBED)
        add(f"{block}.ffn_down_exps.weight", EXPERTS, EMBED, EXPERT_FFN)
        add(f"{block}.ffn_up_exps.weight", EXPERTS, EXPERT_FFN, EMBED)
    _write(writer)


def _add_attention(add: Callable[..., None], block: str) -> None:
    for norm in ("attn_q_norm", "attn_k_norm"):
        add(f"{block}.{norm}.weight", HEAD_DIM, base=1.0)
    add(f"{block}.attn_q.weight", HEADS * HEAD_DIM, EMBED)
    add(f"{block}.attn_k.weight", KV_HEADS * HEAD_DIM, EMBED)
    add(f"{block}.attn_v.weight", KV_HEADS * HEAD_DIM, EMBED)
    add(f"{block}.attn_output.weight", EMBED, HEADS * HEAD_DIM)


def _add_feed_forward(add: Callable[..., None], block: str) -> None:
    add(f"{block}.ffn_gate.weight", FFN, EMBED)
    add(f"{block}.ffn_down.weight", EMBED, FFN)
    add(f"{block}.ffn_up.weight", FFN, EMBED)


def _add_shape(writer: gguf.GGUFWriter, name: str, layers: int) -> None:
    writer.add_name(name)
    writer.add_block_count(layers)
    writer.add_context_length(32768)
    writer.add_embedding_length(EMBED)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)


def _adder(writer: gguf.GGUFWriter, rng: np.random.Generator) -> Callable[..., None]:
    """Adds the embedding, the head and the last norm. Returns a function that adds another tensor."""

    def add(name: str, *shape: int, scale: float = 0.15, base: float = 0.0) -> None:
        """`shape` outermost first, as numpy has it: llama.cpp prints it the other way round."""
        writer.add_tensor(name, (base + rng.standard_normal(shape) * scale).astype(np.float32))

    add("token_embd.weight", VOCAB, EMBED, scale=0.5)
    _add_output(writer, rng)
    add("output_norm.weight", EMBED, base=1.0)
    return add


def _add_output(writer: gguf.GGUFWriter, rng: np.random.Generator) -> None:
    """Only printable bytes are spoken, so that an answer is a text that is tokenised to itself again."""
    spoken = np.zeros((VOCAB, 1), dtype=np.float32)
    spoken[32:127] = spoken[ord("\n")] = 1.0
    writer.add_tensor("output.weight", (spoken * rng.standard_normal((VOCAB, EMBED)) * 0.5).astype(np.float32))


def _write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_vocabulary(writer: gguf.GGUFWriter) -> int:
    """Returns the number of its tokens."""
    characters = byte_characters()
    tokens = [*characters, characters[ord(" ")] + "t", *SPECIAL]
    kinds = [gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.CONTROL] * len(SPECIAL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([f"{characters[ord(' ')]} t"])
    writer.add_eos_token_id(259)
    writer.add_pad_token_id(257)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML)
    return VOCAB
