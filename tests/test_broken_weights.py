"""Weight files that are missing, damaged or of another model: one clear line, and nothing else."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from test_checkpoint import assert_same_weights
from tiny import make_tiny_model
from weight_files import flip, twin

from tinyvllm_cli.errors import ModelError
from tinyvllm_cli.model.checkpoint import open_checkpoint
from tinyvllm_cli.model.weights.safetensors import open_safetensors


def change_tensors(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


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
}


@pytest.mark.parametrize("name", BROKEN_TENSORS)
def test_a_tensor_that_does_not_fit_is_named(name: str, tmp_path: Path):
    change, message = BROKEN_TENSORS[name]
    folder = make_tiny_model(tmp_path / "model")
    change_tensors(folder, change)
    with pytest.raises(ModelError, match=message) as error:
        open_checkpoint(folder)
    assert str(error.value).startswith(str(folder))


def test_tensors_that_no_layer_owns_are_left_alone(tmp_path: Path):
    folder = make_tiny_model(tmp_path / "model")
    before = open_checkpoint(folder)
    extra = {
        "score.weight": np.ones(3, np.int64),
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
@settings(max_examples=200, deadline=None)
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
    ("name", "message"), [("nothing", "nothing there"), ("m.bin", "another file"), ("m.gguf", "empty")]
)
def test_a_path_that_is_no_model_is_named(name: str, message: str, tmp_path: Path):
    if name != "nothing":
        (tmp_path / name).touch()
    with pytest.raises(ModelError, match=message):
        open_checkpoint(tmp_path / name)


def test_a_folder_without_config_is_named(tmp_path: Path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        open_checkpoint(tmp_path)
