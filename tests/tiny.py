"""Tiny models with random weights in Hugging Face layout, made without torch: what most tests run on.

The tokenizer has no merges, so ids can be written down: SPECIAL_TOKENS, then byte b at id BYTE_OFFSET + b.
Ids from TOKENIZER_SIZE up to vocab_size have logits but no token: they must never come out.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

Array = npt.NDArray[Any]

BOS_ID = 1
EOS_IDS = (2, 7)
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<|im_start|>", "<think>", "</think>", "<|other|>", "<|im_end|>")
PLAIN_ADDED = ("<think>", "</think>")  # added tokens that are text: skip_special keeps them
BYTE_OFFSET = len(SPECIAL_TOKENS)
TOKENIZER_SIZE = BYTE_OFFSET + 256

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def byte_ids(text: str) -> list[int]:
    """The ids of text without control words, straight from its UTF-8 bytes."""
    return [BYTE_OFFSET + byte for byte in text.encode()]


def make_tiny_model(
    folder: Path,
    *,
    architecture: str = "LlamaForCausalLM",
    vocab_size: int = 320,
    eos_token_id: int | Sequence[int] = EOS_IDS,
    generation: Mapping[str, Any] | None = None,
    chat_template: str | None = None,
    adds_bos: bool = True,
    dtype: str = "float32",
    shards: int = 1,
    head_in_file: bool = False,
    seed: int = 0,
    **config: Any,
) -> Path:
    """Write a model folder and return it; the same arguments give the same bytes.

    config: any key of config.json (num_hidden_layers=3, tie_word_embeddings=True, rope_scaling={...} ...); None
        removes the key. With rope_theta or rope_scaling the folder has the old RoPE keys only.
    generation: more keys of generation_config.json. chat_template: the text of chat_template.jinja.
    shards: safetensors files, with an index where there are several.
    head_in_file: store lm_head.weight although the head is tied.
    """
    folder.mkdir(parents=True, exist_ok=True)
    eos = eos_token_id if isinstance(eos_token_id, int) else list(eos_token_id)
    ids = {"bos_token_id": BOS_ID, "eos_token_id": eos}
    full_config = tiny_config(architecture, vocab_size=vocab_size, dtype=dtype, **ids, **config)
    tensors = {name: array.astype(DTYPES[dtype]) for name, array in tiny_tensors(full_config, seed=seed)}
    if head_in_file and full_config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    _write_json(folder / "config.json", full_config)
    _write_json(folder / "generation_config.json", {**ids, **(generation or {})})
    _write_weights(folder, tensors, shards)
    _write_tokenizer(folder, adds_bos=adds_bos)
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    return folder


def tiny_config(architecture: str, **overrides: Any) -> dict[str, Any]:
    """config.json of a tiny model; see make_tiny_model."""
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": MODEL_TYPES[architecture],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
    }
    if not overrides.keys() & {"rope_theta", "rope_scaling"}:
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    if architecture == "MistralForCausalLM":
        config["sliding_window"] = None
    if architecture == "Qwen2ForCausalLM":
        config["use_sliding_window"] = False
    config.update(overrides)
    return {key: value for key, value in config.items() if value is not None or key == "sliding_window"}


def tiny_tensors(config: Mapping[str, Any], *, seed: int = 0) -> Iterator[tuple[str, Array]]:
    """Float32 tensors by Hugging Face name. Each depends on its own name, its shape and the seed alone."""
    for name, shape in tensor_shapes(config):
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        noise = rng.standard_normal(shape, dtype=np.float32)
        if name.endswith("norm.weight"):
            yield name, 1 + np.float32(0.2) * noise
        elif name.endswith(".bias"):
            yield name, np.float32(0.3) * noise
        elif name == "model.embed_tokens.weight":
            yield name, np.float32(0.5) * noise
        else:
            # Variance 4 / fan-in: every layer turns the residual stream, so that answers depend on the whole context;
            # the logits of normed rows have a deviation of 2, which keeps the top two apart.
            yield name, np.float32(2 / math.sqrt(shape[1])) * noise


def tensor_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor in the file."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    q_rows, kv_rows = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    model_type = config["model_type"]
    attention_bias = bool(config.get("attention_bias"))
    linears = {
        "self_attn.q_proj": (q_rows, hidden, attention_bias or model_type == "qwen2"),
        "self_attn.k_proj": (kv_rows, hidden, attention_bias or model_type == "qwen2"),
        "self_attn.v_proj": (kv_rows, hidden, attention_bias or model_type == "qwen2"),
        "self_attn.o_proj": (hidden, q_rows, attention_bias),
        "mlp.gate_proj": (inner, hidden, bool(config.get("mlp_bias"))),
        "mlp.up_proj": (inner, hidden, bool(config.get("mlp_bias"))),
        "mlp.down_proj": (hidden, inner, bool(config.get("mlp_bias"))),
    }
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, (rows, columns, has_bias) in linears.items():
            yield f"{prefix}{name}.weight", (rows, columns)
            if has_bias:
                yield f"{prefix}{name}.bias", (rows,)
        yield f"{prefix}input_layernorm.weight", (hidden,)
        yield f"{prefix}post_attention_layernorm.weight", (hidden,)
        if model_type == "qwen3":
            yield f"{prefix}self_attn.q_norm.weight", (head_dim,)
            yield f"{prefix}self_attn.k_norm.weight", (head_dim,)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def _write_weights(folder: Path, tensors: dict[str, Array], shards: int) -> None:
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file_name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[shard::shards])
        save_file(part, folder / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file_name)
    total = sum(array.nbytes for array in tensors.values())
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE (Radford et al., GPT-2, 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    stand_in = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [stand_in[byte] for byte in range(256)]


def _write_tokenizer(folder: Path, *, adds_bos: bool) -> None:
    tokens = [*SPECIAL_TOKENS, *byte_alphabet()]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [AddedToken(token, special=token not in PLAIN_ADDED, normalized=False) for token in SPECIAL_TOKENS]
    )
    if adds_bos:
        bos = SPECIAL_TOKENS[BOS_ID]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, BOS_ID)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL_TOKENS[BOS_ID],
            "eos_token": SPECIAL_TOKENS[EOS_IDS[0]],
            "pad_token": SPECIAL_TOKENS[0],
            "add_bos_token": adds_bos,
            "clean_up_tokenization_spaces": False,
        },
    )


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
