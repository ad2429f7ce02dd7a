"""Weight files that are missing, damaged or of another model: one clear line, and nothing else."""

import json
import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import run_apart, write_lines
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from test_checkpoint import assert_same_weights
from tiny import CHAT_TEMPLATE, make_tiny_model
from weight_files import flip, twin

from tinyvllm_cli.errors import ModelError
from tinyvllm_cli.model.checkpoint import open_checkpoint
from tinyvllm_cli.model.gguf_config import gguf_config
from tinyvllm_cli.model.hub import find_model
from tinyvllm_cli.model.weights.gguf import read_gguf
from tinyvllm_cli.model.weights.gguf_tensors import GGUFTensors
from tinyvllm_cli.model.weights.layout import check_tensors
from tinyvllm_cli.model.weights.safetensors import open_safetensors


def change_tensors(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "model.safetensors",
        "model.safetensors.index.json",
        "model-00002-of-00002.safetensors",
    ],
)
def test_a_pipe_in_the_place_of_a_file_is_named_and_not_waited_for(name: str, tmp_path: Path):
    shards = 2 if "index" in name or "-of-" in name else 1
    folder = make_tiny_model(tmp_path / "model", chat_template=CHAT_TEMPLATE, shards=shards)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "x"}])
    ended = run_apart("run", source, "-m", folder, "--dry-run")
    assert (ended.returncode, ended.stdout, ended.stderr.count(b"\n")) == (1, b"", 1)
    assert name.encode() in ended.stderr and b"regular file" in ended.stderr


Q = "model.layers.0.self_attn.q_proj.weight"
BROKEN_TENSORS = {
    "missing": (lambda t: t.pop(Q), rf"tensor '{Q}' is missing, wanted \[64, 64\]"),
    "shape": (lambda t: t.update({Q: t[Q][:32]}), rf"tensor '{Q}' is \[32, 64\], wanted \[64, 64\]"),
    "float64": (lambda t: t.update({Q: t[Q].astype(np.float64)}), f"tensor '{Q}' has dtype 'F64', wanted one of F32"),
    "int8": (lambda t: t.update({Q: t[Q].astype(np.int8)}), f"tensor '{Q}' has dtype 'I8'"),
    "no head": (lambda t: t.pop("lm_head.weight"), "tensor 'lm_head.weight' is missing"),
    "a bias": (
        lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": t["model.norm.weight"]}),
        "q_proj.bias' is not part of LlamaForCausalLM with 2 layers",
    ),
    "a layer more": (
        lambda t: t.update({"model.layers.2.input_layernorm.weight": t["model.norm.weight"]}),
        "layers.2.input_layernorm.weight' is not part of",
    ),
    **{
        name: (lambda t, name=name: t.update({name: t["model.norm.weight"]}), f"'{name}' is not part of")
        for name in ("lm_head.bias", "model.norm.bias", "base_model.model.lm_head.lora_A.weight", "score.weight")
    },
}


@pytest.mark.parametrize("name", BROKEN_TENSORS)
def test_a_tensor_that_does_not_fit_is_named(name: str, tmp_path: Path):
    change, message = BROKEN_TENSORS[name]
    folder = make_tiny_model(tmp_path / "model")
    change_tensors(folder, change)
    with pytest.raises(ModelError, match=message) as error:
        open_checkpoint(folder)
    assert str(error.value).count(str(folder)) == 1
    assert str(error.value).startswith(str(folder))


def test_tensors_that_follow_from_the_configuration_are_left_alone(tmp_path: Path):
    folder = make_tiny_model(tmp_path / "model")
    before = open_checkpoint(folder)
    extra = {
        "model.rotary_emb.inv_freq": np.ones(8, np.float32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32),
    }
    change_tensors(folder, lambda tensors: tensors.update(extra))
    assert_same_weights(before, open_checkpoint(folder))


def test_a_gguf_tensor_that_no_layer_owns_is_named(tmp_path: Path):
    path = twin(make_tiny_model(tmp_path / "model"))
    path.write_bytes(path.read_bytes().replace(b"blk.0.attn_q.weight", b"blk.0.attn_z.weight"))
    with pytest.raises(ModelError, match=r"q_proj\.weight' is missing"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"no model\.safetensors and no model\.safetensors\.index\.json"),
        ({"pytorch_model.bin": b""}, r"pytorch_model\.bin: .*safe_serialization"),
        ({"consolidated.00.pth": b""}, r"consolidated\.00\.pth"),
        ({"m.gguf": b""}, r"m\.gguf: name the \.gguf file"),
        ({"other.safetensors": b""}, r"other\.safetensors: wanted the name model\.safetensors"),
        ({"model.safetensors": b""}, "empty"),
        ({"model.safetensors": b"version https://git-lfs.github.com/spec/v1\noid"}, "git lfs pull"),
        ({"model.safetensors": b"abc"}, "not a safetensors file"),
        ({"model.safetensors": b"\xff" * 64}, "not a safetensors file"),
        ({"model.safetensors": struct.pack("<Q", 4) + b"{]}]"}, "damaged safetensors header"),
        ({"model.safetensors": struct.pack("<Q", 90_000) + b"[" * 90_000}, "damaged safetensors header"),
        ({"model.safetensors.index.json": b"{}"}, "weight_map"),
        ({"model.safetensors.index.json": b'{"weight_map": {"a": "../b"}}'}, "'../b' is not a file of this folder"),
        ({"model.safetensors.index.json": b'{"weight_map": {"a": "b.safetensors"}}'}, r"b\.safetensors' is missing"),
    ],
)
def test_a_folder_without_usable_weights_says_why(files: dict[str, bytes], message: str, tmp_path: Path):
    folder = make_tiny_model(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    with pytest.raises(ModelError, match=message) as error:
        open_checkpoint(folder)
    assert "\n" not in str(error.value)


def test_a_shard_without_a_tensor_that_the_index_promises_is_named(tmp_path: Path):
    folder = make_tiny_model(tmp_path / "model", shards=2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"][Q] = next(file for file in index["weight_map"].values() if file != index["weight_map"][Q])
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=f"tensor '{Q}' is not in it"):
        open_checkpoint(folder)


def safetensors_file(entries: dict[str, Any], data: bytes) -> bytes:
    header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header + data


def f32(shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"a": f32([2], 0, 8), "b": f32([2], 4, 12)}, "tensor 'b' lies at 4 to 12, wanted its start at 8"),
        ({"a": f32([2], 0, 8), "b": f32([1], 12, 16)}, "wanted its start at 8"),
        ({"a": f32([4], 4, 20)}, "wanted its start at 0"),
        ({"a": f32([2], 0, 16)}, r"tensor 'a' has 16 bytes, wanted 8 for F32 \[2\]"),
        ({"a": f32([-2, -2], 0, 16)}, "tensor 'a' has 16 bytes"),
        ({"a": f32([8], 0, 32)}, "16 bytes of tensors, wanted 32"),
        ({"a": f32([2], 0, 8)}, "16 bytes of tensors, wanted 8"),
        ({"a": f32([0], 0, -16)}, "lies at 0 to -16"),
        ({"a": f32([2**62, 4], 0, 16)}, "tensor 'a' has 16 bytes"),
        ({"a": {"dtype": "F32", "shape": [4]}}, "data_offsets"),
        ({"a": {"dtype": 1, "shape": [4], "data_offsets": [0, 16]}}, "dtype"),
    ],
)
def test_places_that_do_not_fit_the_file_are_refused(entries: dict[str, Any], message: str, tmp_path: Path):
    (tmp_path / "m.safetensors").write_bytes(safetensors_file(entries, bytes(16)))
    with pytest.raises(ModelError, match=message):
        open_safetensors(tmp_path / "m.safetensors")


@given(data=st.data())
@settings(max_examples=200)
def test_a_safetensors_file_with_flipped_bits_or_cut_short_is_refused_or_read(tmp_path_factory, data: st.DataObject):
    path = tmp_path_factory.getbasetemp() / "m.safetensors"
    whole = safetensors_file({"a": f32([3], 0, 12), "b": f32([1, 1], 12, 16), "__metadata__": {"x": "y"}}, bytes(16))
    if data.draw(st.booleans()):
        changed = whole[: data.draw(st.integers(0, len(whole) - 1))]
    else:
        changed = flip(whole, data.draw(st.integers(0, len(whole) - 17)), data.draw(st.integers(0, 7)))
    path.write_bytes(changed)
    try:
        tensors = open_safetensors(path)
        for name in tensors.names():
            tensors.dtype(name)
            assert tensors.read(name).shape == tensors.shape(name)
    except ModelError as error:
        assert "\n" not in str(error)
        return
    assert len(changed) == len(whole)


def test_data_at_an_odd_address_is_read_aligned(tmp_path: Path):
    data = np.arange(4, dtype=np.float32)
    for pad in range(4):
        entries = {"__metadata__": {"pad": " " * pad}, "a": f32([4], 0, 16)}
        (tmp_path / "m.safetensors").write_bytes(safetensors_file(entries, data.tobytes()))
        array = open_safetensors(tmp_path / "m.safetensors").read("a")
        assert array.flags.aligned
        assert np.array_equal(array, data)


@pytest.mark.parametrize(
    ("data", "message"), [(None, "No such file"), (b"", "the file is empty"), (b"PK\3\4" * 9, "not a GGUF file")]
)
def test_a_path_that_is_no_model_is_named(data: bytes | None, message: str, tmp_path: Path):
    if data is not None:
        (tmp_path / "m").write_bytes(data)
    with pytest.raises(ModelError, match=f"{tmp_path}/m: .*{message}"):
        open_checkpoint(tmp_path / "m")


@pytest.mark.parametrize("name", ["m", "m.GGUF", "m.gguf.bak", "sha256-0f4ac8"])
def test_a_gguf_file_may_have_any_name(name: str, tmp_path: Path):
    plain = twin(make_tiny_model(tmp_path / "model"))
    before = open_checkpoint(plain)
    assert_same_weights(open_checkpoint(plain.rename(tmp_path / name)), before)
    assert find_model(str(tmp_path / name)).path == tmp_path / name


def test_a_tensor_that_the_index_leaves_out_is_not_overlooked(tmp_path: Path):
    folder = make_tiny_model(tmp_path / "model", shards=2)
    shard = folder / "model-00001-of-00002.safetensors"
    save_file({**load_file(shard), "lm_head.bias": np.ones(320, np.float32)}, shard)
    with pytest.raises(ModelError, match=r"lm_head\.bias' is not part of"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("output.bias", r"lm_head\.bias' is not part of"),
        ("output_norm.bias", r"model\.norm\.bias' is not part of"),
        ("rope_factors_long.weight", r"rope_factors_long\.weight' is not part of"),
        ("model.norm.weight", r"tensors 'output_norm\.weight' and 'model\.norm\.weight' are the same one"),
    ],
)
def test_a_tensor_more_in_a_gguf_file_is_named(name: str, message: str, tmp_path: Path):
    file = read_gguf(twin(make_tiny_model(tmp_path / "model")))
    file.tensors[name] = replace(file.tensors["output_norm.weight"], name=name)
    config = gguf_config(file)
    with pytest.raises(ModelError, match=message):
        check_tensors(config, GGUFTensors(file, config))


def test_a_folder_without_config_is_named(tmp_path: Path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        open_checkpoint(tmp_path)
