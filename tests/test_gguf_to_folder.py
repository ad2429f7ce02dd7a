"""examples/gguf_to_folder.py: the folder is the model of the GGUF file, or there is none."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from architectures import ARCHITECTURES, LLAMA3_ROPE
from scripts import EXAMPLES, script
from test_checkpoint import assert_same_weights
from tiny import make_tiny_model
from weight_files import twin

from tinyvllm_cli import LLM, ModelError, SamplingParams
from tinyvllm_cli.model.checkpoint import open_checkpoint
from tinyvllm_cli.text.tokenizer import load_tokenizer

gguf_to_folder = script("gguf_to_folder", EXAMPLES)

# As published, e.g. of Llama 3.2: in a GGUF file only the factors stand that follow from it.
ROPE = LLAMA3_ROPE | {"rope_theta": 5e5, "factor": 32.0, "original_max_position_embeddings": 8192}
MODELS = {name: ARCHITECTURES[name] for name in ("llama", "llama_biases", "llama_9_heads_over_3", "qwen2", "qwen3")}
MODELS["llama_3.2"] = {"head_dim": 128, "rope_parameters": ROPE, "tie_word_embeddings": True}
TEXTS = ["plums", "<s>two <|im_start|> pears", " 彼女 🙂\n", ""]


@pytest.mark.parametrize("name", MODELS)
def test_the_folder_that_a_file_was_made_of_comes_back(name: str, tmp_path: Path):
    folder, again = make_tiny_model(tmp_path / "first", **MODELS[name]), tmp_path / "second"
    gguf_to_folder.write_folder(str(twin(folder)), again)
    first, second = map(open_checkpoint, (folder, again))
    assert_same_weights(first, second)
    eps = float(np.float32(first.config.rms_norm_eps))  # so a GGUF file has it
    assert second.config == replace(first.config, rms_norm_eps=eps)
    assert second.generation == first.generation
    for add_bos in (True, False):
        ids = [[load_tokenizer(path).encode(text, add_bos=add_bos) for text in TEXTS] for path in (folder, again)]
        assert ids[0] == ids[1]


@pytest.mark.model
def test_the_default_model_answers_the_same_from_its_folder(default_model: Path, tmp_path: Path):
    folder = tmp_path / "folder"
    try:
        gguf_to_folder.write_folder(str(default_model), folder)
        answers = []
        for path in (default_model, folder):
            with LLM(path, backend="cpu", slots=4, max_model_len=256) as llm:
                params = SamplingParams(max_tokens=12, logprobs=0)
                answers.append([answer.choices for answer in llm.chat(["Name a fruit.", "What is 2 + 3?"], params)])
        assert answers[0] == answers[1] and all(choices[0].token_ids for choices in answers[0])
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # half a gigabyte


def test_what_a_config_cannot_say_is_refused_before_anything_is_written(tmp_path: Path):
    other_rope = make_tiny_model(tmp_path / "rope", head_dim=128, rope_parameters=LLAMA3_ROPE)
    with pytest.raises(ModelError, match=r"its RoPE factors are not those of a scaling that config\.json has"):
        gguf_to_folder.write_folder(str(twin(other_rope)), tmp_path / "out")
    config = replace(open_checkpoint(twin(make_tiny_model(tmp_path / "plain"))).config, qkv_bias=True)
    with pytest.raises(ModelError, match=r"a config\.json of LlamaForCausalLM cannot say its qkv_bias"):
        gguf_to_folder.config_keys(config, tmp_path)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("source", ["folder", "file"])
def test_errors_are_one_line(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = make_tiny_model(tmp_path / "model")
    model, message = {"folder": (folder, "is no GGUF file"), "file": (twin(folder), "is not empty")}[source]
    monkeypatch.setattr(sys, "argv", ["gguf_to_folder.py", str(model), str(folder)])
    with pytest.raises(SystemExit, match=rf"^error: \S+ {message}[^\n]*$"):
        gguf_to_folder.main()
