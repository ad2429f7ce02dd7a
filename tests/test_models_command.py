"""`tinyvllm models`: what is shown is what the files say, and nothing is fetched unasked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from tiny import CHAT_TEMPLATE, make_tiny_model
from tiny_wheel import CONTENT, make_entry

from tinyvllm_cli.cli.models import models
from tinyvllm_cli.errors import ModelError
from tinyvllm_cli.model.catalogue import CATALOGUE, DEFAULT_MODEL


@pytest.fixture(autouse=True)
def empty_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINYVLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TINYVLLM_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(models, arguments, catch_exceptions=True)


def fields(result: Result) -> dict[str, str]:
    """The lines of `show` by their labels."""
    assert result.exception is None
    rows = [line.split("  ", 1) for line in result.stdout.splitlines()]
    return {label: value.strip() for label, value in rows}


def test_show_says_what_a_folder_holds(tmp_path):
    folder = make_tiny_model(
        tmp_path / "tiny",
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        rope_theta=500000.0,
        rope_scaling={"rope_type": "linear", "factor": 2.0},
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        dtype="bfloat16",
        chat_template=CHAT_TEMPLATE,
        generation={"do_sample": True, "temperature": 0.6, "top_p": 0.9},
    )
    shown = fields(run("show", str(folder)))
    assert shown["architecture"] == "LlamaForCausalLM, 3 layers"
    assert shown["context"] == "2048 tokens"
    assert shown["RoPE"] == "linear, theta 500000, factor 2"
    assert "6 query heads, 2 KV heads, 16 wide" in shown["attention"]
    assert "tied" in shown["sizes"]
    assert shown["chat template"].startswith(f"{len(CHAT_TEMPLATE)} characters")
    assert shown["BOS"].startswith("<s> (1), added")
    assert shown["EOS"] == "</s> (2), <|im_end|> (7)"
    assert shown["suggests"] == "temperature 0.6, top_p 0.9"
    (folder / "generation_config.json").write_text('{"temperature": 0.7, "top_k": -1}')  # no word on do_sample
    assert fields(run("show", str(folder)))["suggests"] == "temperature 0.7"
    head = [("codes", np.uint8, 16), ("scale", np.float16)]  # in FP8
    on_cpu, on_gpu, in_fp8 = (  # K and V, 3 layers
        3 * 2 * np.zeros(shape, dtype).nbytes for shape, dtype in (((2, 16), "f4"), ((2, 16), "f2"), (2, head))
    )
    gpu = f"{on_gpu} on a GPU (16 bits), {in_fp8} there with --kv-dtype fp8"
    assert shown["KV cache"] == f"{on_cpu} bytes a token on the CPU (float32), {gpu}"
    assert "bfloat16" in shown["weights"]


def test_show_tells_parts_that_most_models_lack(tmp_path):
    qwen = fields(run("show", str(make_tiny_model(tmp_path / "qwen3", architecture="Qwen3ForCausalLM"))))
    assert "q and k normed" in qwen["attention"]
    assert "head of its own" in qwen["sizes"]
    assert qwen["chat template"].startswith("none")
    assert qwen["suggests"] == "greedy"
    biased = fields(run("show", str(make_tiny_model(tmp_path / "qwen2", architecture="Qwen2ForCausalLM"))))
    assert "biases on q, k, v" in biased["attention"]


def test_show_fetches_nothing():
    for name in (DEFAULT_MODEL, "org/name", "org/name/file.gguf"):
        result = run("show", name)
        assert isinstance(result.exception, ModelError)
        assert f"tinyvllm models pull {name}" in str(result.exception)


def test_pull_prints_where_the_file_is_and_then_it_is_listed(tmp_path, monkeypatch):
    entry = make_entry(tmp_path / "index", monkeypatch)
    assert listed()[entry.name][:4] == ["10.2", "kB", "Apache-2.0", "no"]
    result = run("pull", entry.name)
    assert Path(result.stdout.strip()).read_bytes() == CONTENT
    assert "fetching tiny-model" in result.stderr
    assert listed()[entry.name][3] == "yes"


def test_pull_fetches_a_damaged_file_again(tmp_path, monkeypatch):
    entry = make_entry(tmp_path / "index", monkeypatch)
    path = Path(run("pull", entry.name).stdout.strip())
    path.write_bytes(CONTENT[::-1])
    result = run("pull", entry.name)
    assert path.read_bytes() == CONTENT
    assert f"{path} is not the file it should be" in result.stderr


def listed() -> dict[str, list[str]]:
    """The rows of `list` by name, in words."""
    result = run("list")
    assert result.exception is None
    return {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines()}


def test_list_has_the_catalogue_and_the_models_in_the_hub_cache(tmp_path):
    assert set(listed()) == {"NAME", *CATALOGUE}
    repo = tmp_path / "hub" / "models--org--name"
    snapshot = repo / "snapshots" / ("0" * 40)
    for folder in (snapshot, repo / "blobs", repo / "refs"):
        folder.mkdir(parents=True)
    (repo / "refs" / "main").write_text("0" * 40)
    (repo / "blobs" / "abc").write_bytes(bytes(1500))
    (snapshot / "model.safetensors").symlink_to(repo / "blobs" / "abc")
    rows = listed()
    assert set(rows) == {"NAME", *CATALOGUE, "org/name"}
    assert rows["org/name"][:4] == ["1.5", "kB", "-", "yes"]


@pytest.mark.model
def test_show_the_default_model(default_model):
    shown = fields(run("show", str(default_model)))
    # The model's card: 135M parameters, 30 layers, 9 heads with 3 for KV, 64 wide, context 8192.
    assert shown["architecture"].endswith("30 layers")
    assert "9 query heads, 3 KV heads, 64 wide" in shown["attention"]
    assert "134.5 M parameters" in shown["weights"]
    assert "Q4_1" in shown["weights"]
    assert shown["context"] == "8192 tokens"
    assert "<|im_end|> (2)" in shown["EOS"]
