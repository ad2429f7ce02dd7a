"""What a model is, in lines for people: its shape, sizes, context, template and special tokens."""

from __future__ import annotations

import hashlib
import math

from tinyvllm_cli.config import ModelConfig, RopeConfig
from tinyvllm_cli.model.checkpoint import Checkpoint, open_checkpoint
from tinyvllm_cli.model.hub import ModelFiles
from tinyvllm_cli.said import format_bytes
from tinyvllm_cli.text.chat_template import ChatTemplate, load_chat_template
from tinyvllm_cli.text.tokenizer import Tokenizer, load_tokenizer


def describe(files: ModelFiles) -> list[tuple[str, str]]:
    """Labels and values, in order. Reads headers and the tokenizer, no weights. Raises ModelError."""
    checkpoint = open_checkpoint(files.path)
    try:
        config = checkpoint.config
        return [
            ("model", files.name),
            ("files", f"{files.path}" + (f", commit {files.commit}" if files.commit else "")),
            ("architecture", f"{config.architecture}, {config.num_layers} layers"),
            ("sizes", _sizes(config)),
            ("attention", _attention(config)),
            ("weights", _weights(checkpoint)),
            ("context", f"{config.max_position} tokens"),
            ("KV cache", _kv_cache(config)),
            ("RoPE", _rope(config.rope)),
            *_text_lines(checkpoint, load_tokenizer(checkpoint.source), load_chat_template(checkpoint.source)),
        ]
    finally:
        checkpoint.tensors.close()


def _sizes(config: ModelConfig) -> str:
    head = "head tied to the embedding" if config.tied_head else "head of its own"
    return f"hidden {config.hidden_size}, MLP {config.intermediate_size}, vocabulary {config.vocab_size}, {head}"


def _attention(config: ModelConfig) -> str:
    flags = {
        "biases on q, k, v": config.qkv_bias,
        "bias on the output": config.o_bias,
        "q and k normed": config.qk_norm,
    }
    heads = f"{config.num_heads} query heads, {config.num_kv_heads} KV heads, {config.head_dim} wide"
    return ", ".join([heads, *(name for name, present in flags.items() if present)])


def _kv_cache(config: ModelConfig) -> str:
    """Bytes of K and V that one token of a sequence keeps, over all layers; in FP8 each head has a scale of 16 bits."""
    heads = 2 * config.num_layers * config.num_kv_heads
    numbers = heads * config.head_dim
    gpu = f"{2 * numbers} on a GPU (16 bits), {numbers + 2 * heads} there with --kv-dtype fp8"
    return f"{4 * numbers} bytes a token on the CPU (float32), {gpu}"


def _weights(checkpoint: Checkpoint) -> str:
    tensors = checkpoint.tensors
    parameters = sum(math.prod(tensors.shape(name)) for name in tensors.names())
    kind = checkpoint.quantization or checkpoint.config.dtype
    return f"{parameters / 1e6:.1f} M parameters, {format_bytes(tensors.nbytes)}, {kind}, {checkpoint.format}"


def _rope(rope: RopeConfig) -> str:
    parts = [f"{rope.type}, theta {rope.theta:g}"]
    if rope.type != "default":
        parts.append(f"factor {rope.factor:g}")
    if rope.freq_factors is not None:
        parts.append("frequency factors from the file")
    return ", ".join(parts)


def _template(template: ChatTemplate | None) -> str:
    if template is None:
        return "none: prompts are given as they are"
    digest = hashlib.sha256(template.source.encode()).hexdigest()
    return f"{len(template.source)} characters, SHA-256 {digest[:16]}"


def _text_lines(checkpoint: Checkpoint, tokenizer: Tokenizer, template: ChatTemplate | None) -> list[tuple[str, str]]:
    generation = checkpoint.generation
    bos = "none" if tokenizer.bos_token is None else f"{tokenizer.bos_token} ({tokenizer.bos_token_id})"
    eos = ", ".join(f"{tokenizer.decode([id], skip_special=False)} ({id})" for id in generation.eos_token_ids)
    added = "added to raw prompts" if tokenizer.adds_bos else "not added to raw prompts"
    return [
        ("tokenizer", f"{tokenizer.size} ids"),
        ("chat template", _template(template)),
        ("BOS", f"{bos}, {added}"),
        ("EOS", eos or "none"),
        ("suggests", ", ".join(f"{name} {value:g}" for name, value in generation.sampling.items()) or "greedy"),
    ]
