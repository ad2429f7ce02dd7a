"""Write the model of a GGUF file as a folder in Hugging Face layout with weights in float32, for other tools to read.

python examples/gguf_to_folder.py MODEL FOLDER
"""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from tokenizers.processors import TemplateProcessing

from tinyvllm_cli.config import ModelConfig, RopeConfig
from tinyvllm_cli.errors import ModelError, TinyvllmError
from tinyvllm_cli.model.checkpoint import Checkpoint, open_checkpoint
from tinyvllm_cli.model.hf_config import HFConfig, model_config
from tinyvllm_cli.model.hub import find_model
from tinyvllm_cli.model.rope import inverse_frequencies
from tinyvllm_cli.model.weights.gguf import GGUFFile
from tinyvllm_cli.model.weights.layout import tensor_shapes
from tinyvllm_cli.model.weights.safetensors_writer import write_safetensors
from tinyvllm_cli.random_folder import check_folder
from tinyvllm_cli.text.chat_template import load_chat_template
from tinyvllm_cli.text.gguf_tokenizer import special_tokens
from tinyvllm_cli.text.tokenizer import CONFIG_FILE, TOKENIZER_FILE, load_tokenizer

MODEL_TYPES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def write_folder(model: str, folder: Path) -> None:
    """config.json, generation_config.json, tokenizer.json, tokenizer_config.json and model.safetensors.

    ModelError where it is no GGUF file, or what its metadata say has no place in a config.json; UsageError where the
    folder is not empty.
    """
    checkpoint = open_checkpoint(find_model(model).path)
    if not isinstance(checkpoint.source, GGUFFile):
        raise ModelError(f"{checkpoint.path} is no GGUF file")
    check_folder(folder)
    keys = config_keys(checkpoint.config, checkpoint.path)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder, checkpoint, checkpoint.source)
    shapes = tensor_shapes(checkpoint.config)
    write_safetensors(folder / "model.safetensors", shapes, checkpoint.tensors, "float32", metadata={"format": "pt"})
    write_json(folder / "config.json", keys)  # last: without it the folder is no model
    checkpoint.tensors.close()


def config_keys(config: ModelConfig, path: Path) -> dict[str, Any]:
    """A config.json that means this model."""
    rope = without_factors(config.rope, config.head_dim, path)
    keys = {
        "architectures": [MODEL_TYPES[config.architecture]],
        "model_type": config.architecture,
        "torch_dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": rope.theta,
        "rope_scaling": rope_scaling(rope),
        "tie_word_embeddings": config.tied_head,
        "attention_bias": config.o_bias,
        "mlp_bias": config.mlp_bias,
    }
    meant = model_config(msgspec.convert(keys, HFConfig), path)
    wanted = dataclasses.replace(config, architecture=meant.architecture, dtype=meant.dtype, rope=rope)
    if lost := [f.name for f in dataclasses.fields(ModelConfig) if getattr(meant, f.name) != getattr(wanted, f.name)]:
        raise ModelError(f"{path}: a config.json of {meant.architecture} cannot say its {', '.join(lost)}")
    return keys


def without_factors(rope: RopeConfig, head_dim: int, path: Path) -> RopeConfig:
    """The scaling of Llama 3.1 and later by its parameters, where the file has the factors that follow from them.

    All published models have the same parameters but for `factor`, which is the greatest of the factors.
    """
    if rope.freq_factors is None:
        return rope
    scaled = dataclasses.replace(rope, type="llama3", factor=max(rope.freq_factors), freq_factors=None)
    if not np.allclose(inverse_frequencies(scaled, head_dim), inverse_frequencies(rope, head_dim), rtol=1e-5, atol=0):
        raise ModelError(f"{path}: its RoPE factors are not those of a scaling that config.json has")
    return scaled


def rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.type == "default":
        return None
    keys: dict[str, Any] = {"rope_type": rope.type, "factor": rope.factor}
    if rope.type == "llama3":
        keys["low_freq_factor"], keys["high_freq_factor"] = rope.low_freq_factor, rope.high_freq_factor
        keys["original_max_position_embeddings"] = rope.original_max_position
    return keys


def write_text(folder: Path, checkpoint: Checkpoint, file: GGUFFile) -> None:
    """Tokenizer, chat template, and what ends an answer."""
    tokenizer, template = load_tokenizer(file), load_chat_template(file)
    if tokenizer.adds_bos:
        bos, special = tokenizer.bos_token, [(tokenizer.bos_token, tokenizer.bos_token_id)]
        tokenizer.core.post_processor = TemplateProcessing([bos, "$A"], [bos, "$A", bos, "$B"], special_tokens=special)
    tokenizer.core.save(str(folder / TOKENIZER_FILE))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", **special_tokens(file.metadata)}
    own: dict[str, Any] = {"model_max_length": checkpoint.config.max_position, "clean_up_tokenization_spaces": False}
    if template is not None:
        own["chat_template"] = template.source
    write_json(folder / CONFIG_FILE, names | own)
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": checkpoint.generation.eos_token_ids or None}
    write_json(folder / "generation_config.json", ids)


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description="A GGUF file as a float32 folder in Hugging Face layout.")
    parser.add_argument("model", help="a .gguf file, or a name of `tinyvllm models list`")
    parser.add_argument("folder", type=Path, help="a new one, or one that is empty")
    args = parser.parse_args()
    try:
        write_folder(args.model, args.folder)
    except TinyvllmError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
