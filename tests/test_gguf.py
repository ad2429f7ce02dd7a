"""The GGUF reader: what the gguf package writes comes back; whatever is broken is a ModelError, and nothing else."""

import math
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from clock import units
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import make_tiny_model
from weight_files import finish, flip, twin

from tinyvllm_cli.errors import ModelError
from tinyvllm_cli.model.checkpoint import open_checkpoint
from tinyvllm_cli.model.gguf_config import gguf_config, gguf_quantization
from tinyvllm_cli.model.weights.gguf import BLOCKS, TYPES, GGUFFile, read_gguf

SCALARS = {
    "uint8": st.integers(0, 2**8 - 1),
    "int8": st.integers(-(2**7), 2**7 - 1),
    "uint16": st.integers(0, 2**16 - 1),
    "int16": st.integers(-(2**15), 2**15 - 1),
    "uint32": st.integers(0, 2**32 - 1),
    "int32": st.integers(-(2**31), 2**31 - 1),
    "uint64": st.integers(0, 2**64 - 1),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "float32": st.floats(width=32, allow_nan=False),
    "float64": st.floats(allow_nan=False),
    "bool": st.booleans(),
    "string": st.text(min_size=1),  # the writer leaves empty strings out
}
ENTRY = st.one_of([st.tuples(st.just(type), values) for type, values in SCALARS.items()])


@given(
    entries=st.lists(ENTRY, max_size=8), strings=st.lists(st.text(), min_size=1), floats=st.lists(st.floats(width=32))
)
@settings(max_examples=50)
def test_metadata_comes_back_as_it_was_written(tmp_path_factory, entries, strings, floats):
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for i, (type, value) in enumerate(entries):
        getattr(writer, f"add_{type}")(f"key.{i}", value)
    writer.add_array("strings", strings)
    writer.add_array("floats", [0.5, *floats])
    finish(writer)
    metadata = read_gguf(path).metadata
    for i, (type, value) in enumerate(entries):
        assert (metadata[f"key.{i}"], metadata[f"key.{i}"].__class__) == (value, value.__class__), type
    assert metadata["strings"] == strings
    assert np.array_equal(metadata["floats"], np.array([0.5, *floats], np.float32), equal_nan=True)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 32, 64])
def test_tensors_come_back_with_numpy_shapes(tmp_path: Path, version: int, alignment: int):
    rng = np.random.default_rng(0)
    arrays = {
        "a": rng.standard_normal((5, 3), dtype=np.float32),
        "b": rng.standard_normal(7).astype(np.float16),
        "c": rng.standard_normal((2, 3, 4), dtype=np.float32),
    }
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_custom_alignment(alignment)
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    finish(writer)
    data = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(data[:4] + version.to_bytes(4, "little") + data[8:])
    file = read_gguf(tmp_path / "m.gguf")
    assert list(file.tensors) == list(arrays)
    for name, array in arrays.items():
        assert file.tensors[name].shape == array.shape
        assert file.data(name).tobytes() == array.tobytes()


def small_gguf(folder: Path) -> bytes:
    """A whole small model with every kind of metadata that a config is read from, and few strings."""
    path = twin(make_tiny_model(folder / "model", num_hidden_layers=1, hidden_size=32, vocab_size=264))
    return path.read_bytes()


@pytest.fixture(scope="module")
def model_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return small_gguf(tmp_path_factory.mktemp("small"))


def header_length(data: bytes, folder: Path) -> int:
    (folder / "whole.gguf").write_bytes(data)
    return min(tensor.offset for tensor in read_gguf(folder / "whole.gguf").tensors.values())


def assert_whole_or_refused(path: Path) -> None:
    """Opening gives a ModelError of one line, or a model whose every tensor lies in the file with its shape."""
    try:
        checkpoint = open_checkpoint(path)
    except ModelError as error:
        assert "\n" not in str(error)
        return
    for name in checkpoint.tensors.names():
        assert checkpoint.tensors.read(name).shape == checkpoint.tensors.shape(name)


@given(data=st.data())
@settings(max_examples=300)
def test_a_header_with_flipped_bits_is_refused_or_read(tmp_path_factory, model_bytes: bytes, data: st.DataObject):
    folder = tmp_path_factory.getbasetemp()
    end = header_length(model_bytes, folder)
    # Half of the draws go to the first bytes and to the tensor list at the end, the rest anywhere.
    place = data.draw(st.one_of(st.integers(0, 200), st.integers(0, end - 1), st.integers(end - 1200, end - 1)))
    (folder / "flipped.gguf").write_bytes(flip(model_bytes, place, data.draw(st.integers(0, 7))))
    assert_whole_or_refused(folder / "flipped.gguf")


@given(fraction=st.floats(0, 1, exclude_max=True))
@settings(max_examples=50)
def test_a_file_that_is_cut_short_is_refused(tmp_path_factory, model_bytes: bytes, fraction: float):
    path = tmp_path_factory.getbasetemp() / "cut.gguf"
    path.write_bytes(model_bytes[: int(fraction * len(model_bytes))])
    with pytest.raises(ModelError, match=r"cut\.gguf"):
        read_gguf(path)


def test_a_header_that_is_cut_short_anywhere_is_refused(tmp_path: Path):
    strings = struct.pack("<IQ", 8, 2) + struct.pack("<Q", 1) + b"x" + struct.pack("<Q", 3) + b"xyz"
    numbers = struct.pack("<IQ", 4, 2) + bytes(8)
    entries = [entry(b"number", 10, bytes(8)), entry(b"array", 9, numbers), entry(b"strings", 9, strings)]
    vocabulary = header(entries=b"".join(entries), count=3)
    model = header(tensors=1, entries=entries[0] + tensor_entry(b"w", [4], 0), count=1)
    model += bytes(-len(model) % 32 + 16)
    for data in (vocabulary, model):
        (tmp_path / "whole.gguf").write_bytes(data)
        read_gguf(tmp_path / "whole.gguf")
        for length in range(len(data)):
            (tmp_path / "cut.gguf").write_bytes(data[:length])
            with pytest.raises(ModelError):
                read_gguf(tmp_path / "cut.gguf")


@given(count=st.integers(2**20, 2**64 - 1), place=st.sampled_from([8, 16]))
@settings(max_examples=50)
def test_absurd_counts_are_refused_at_once(tmp_path_factory, model_bytes: bytes, count: int, place: int):
    path = tmp_path_factory.getbasetemp() / "count.gguf"
    path.write_bytes(model_bytes[:place] + count.to_bytes(8, "little") + model_bytes[place + 8 :])
    with pytest.raises(ModelError, match=f"says it holds {count} .*, too many"):
        read_gguf(path)


def header(*, version: int = 3, tensors: int = 0, entries: bytes = b"", count: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, count) + entries


def entry(key: bytes, type: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", type) + value


def tensor_entry(name: bytes, shape: list[int], type: int, offset: int = 0) -> bytes:
    dims = b"".join(struct.pack("<Q", n) for n in shape)
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", type, offset)


REFUSED = {
    "empty": (b"", "empty"),
    "no GGUF": (b"PK\3\4" + bytes(40), "not a GGUF file"),
    "Git LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "git lfs pull"),
    "version 1": (header(version=1), "version 1, wanted 2 or 3"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "split": (header(entries=entry(b"split.count", 2, b"\3\0"), count=1), "split into 3 files"),
    "alignment": (header(entries=entry(b"general.alignment", 4, bytes(4)), count=1), "general.alignment is 0"),
    "key twice": (header(entries=entry(b"k", 0, b"\1") * 2, count=2), "'k' stands twice"),
    "unknown value type": (header(entries=entry(b"k", 13, bytes(8)), count=1), "type 13"),
    "array of arrays": (header(entries=entry(b"k", 9, struct.pack("<IQ", 9, 0)), count=1), "type 9"),
    "no UTF-8": (header(entries=entry(b"\xff", 0, b"\1"), count=1), "not UTF-8"),
    "tensor type": (header(tensors=1, entries=tensor_entry(b"w", [256], 11)), "'w' has type Q3_K, wanted one of F32"),
    "new tensor type": (header(tensors=1, entries=tensor_entry(b"w", [256], 99)), "type number 99"),
    "part of a block": (
        header(tensors=1, entries=tensor_entry(b"w", [33, 2], 8)),
        r"Q8_0 \[2, 33\], wanted rows of whole",
    ),
    "five dimensions": (header(tensors=1, entries=tensor_entry(b"w", [1] * 5, 0)), "5 dimensions"),
    "past the end": (header(tensors=1, entries=tensor_entry(b"w", [8], 0, 64)) + bytes(64), "cut short or damaged"),
    "between the lines": (header(tensors=1, entries=tensor_entry(b"w", [1], 0, 4)) + bytes(64), "aligned to 32"),
    "tensor twice": (header(tensors=2, entries=tensor_entry(b"w", [1], 0) * 2) + bytes(64), "'w' stands twice"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_error_names_what_was_found(name: str, tmp_path: Path):
    data, message = REFUSED[name]
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(ModelError, match=message) as error:
        read_gguf(tmp_path / "m.gguf")
    assert str(error.value).startswith(str(tmp_path / "m.gguf"))


def test_tensor_types_have_the_numbers_of_ggml():
    known = {member.name: member.value for member in gguf.GGMLQuantizationType}
    assert {name: known[name] for name in TYPES.values()} == {name: number for number, name in TYPES.items()}
    assert {t: gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[t]] for t in BLOCKS} == BLOCKS


def test_a_large_vocabulary_is_read_in_little_time(tmp_path: Path):
    tokens, merges = [f"Ġtoken{i}" for i in range(150_000)], [f"Ġ{i % 999} w{i}" for i in range(280_000)]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_array("tokenizer.ggml.tokens", tokens)
    writer.add_array("tokenizer.ggml.merges", merges)
    writer.add_array("tokenizer.ggml.token_type", [1] * 150_000)
    finish(writer)
    metadata = read_gguf(tmp_path / "m.gguf").metadata
    assert metadata["tokenizer.ggml.tokens"] == tokens and metadata["tokenizer.ggml.merges"] == merges
    assert units(lambda: read_gguf(tmp_path / "m.gguf")) < 30


def config_of(folder: Path, **changes: Any) -> GGUFFile:
    """The GGUF file of a tiny model with some of its metadata replaced; None takes a key out."""
    file = read_gguf(twin(make_tiny_model(folder / "model")))
    file.metadata.update(changes)
    for key in [key for key, value in changes.items() if value is None]:
        del file.metadata[key]
    return file


BAD_METADATA = [
    ("general.architecture", "gemma2", "architecture 'gemma2', wanted one of llama, qwen2, qwen3"),
    ("general.architecture", np.array([1, 2]), "architecture"),
    ("general.architecture", None, "architecture None"),
    ("llama.rope.scaling.type", "yarn", "RoPE scaling 'yarn'"),
    ("llama.rope.scaling.type", np.array([1, 2]), "RoPE scaling"),
    ("llama.rope.dimension_count", 8, "rope.dimension_count is 8, wanted the head size 16"),
    ("llama.attention.value_length", 32, "attention.value_length is 32"),
    ("llama.attention.head_count", 0, ": metadata llama.attention.head_count is 0, wanted 1 to 2147483647"),
    ("llama.attention.head_count", "4", "llama.attention.head_count is '4', wanted an integer"),
    (
        "llama.attention.head_count_kv",
        3,
        "head_count is 4, wanted a multiple of metadata llama.attention.head_count_kv, which is 3",
    ),
    ("llama.attention.head_count_kv", np.array([2, 1]), "head_count_kv"),
    ("llama.attention.sliding_window", 128, "sliding-window"),
    ("llama.expert_count", 8, "8 experts"),
    ("llama.block_count", None, "llama.block_count is missing"),
    ("llama.block_count", 10**12, ": metadata llama.block_count is 1000000000000, wanted 1 to 1000"),
    ("llama.context_length", 0, ": metadata llama.context_length is 0"),
    ("llama.embedding_length", 0, ": metadata llama.embedding_length is 0"),
    ("llama.feed_forward_length", -8, ": metadata llama.feed_forward_length is -8"),
    ("llama.rope.freq_base", math.nan, ": metadata llama.rope.freq_base is nan"),
    ("llama.attention.layer_norm_rms_epsilon", math.inf, ": metadata llama.attention.layer_norm_rms_epsilon is inf"),
    ("llama.logit_scale", 16.0, "llama.logit_scale is 16.0, wanted 1"),
    ("llama.logit_scale", "1", "llama.logit_scale is '1', wanted 1"),
    ("llama.embedding_scale", 12.0, "llama.embedding_scale is 12.0, wanted 1"),
    ("llama.residual_scale", 0.22, "llama.residual_scale is 0.22, wanted 1"),
    ("llama.attention.scale", 0.0078125, "llama.attention.scale is 0.0078125, wanted 0.25"),
    ("llama.attention.clamp_kqv", 8.0, "llama.attention.clamp_kqv is 8.0, wanted 0"),
    ("llama.attention.causal", False, "llama.attention.causal is False, wanted 1"),
    ("llama.use_parallel_residual", True, "llama.use_parallel_residual is True, wanted 0"),
    ("llama.rope.scaling.attn_factor", math.nan, "llama.rope.scaling.attn_factor is nan, wanted 1"),
]


@pytest.mark.parametrize(("key", "value", "message"), BAD_METADATA)
def test_metadata_that_makes_no_supported_model_is_named(key: str, value: Any, message: str, tmp_path: Path):
    file = config_of(tmp_path, **{key: value})
    with pytest.raises(ModelError, match=message):
        gguf_config(file)


@pytest.mark.parametrize(
    ("key", "value"),
    [("logit_scale", 1.0), ("attention.scale", 0.25), ("attention.scale", 0.0), ("attention.causal", True)],
)
def test_metadata_that_changes_no_answer_is_no_reason_to_refuse(key: str, value: float, tmp_path: Path):
    assert gguf_config(config_of(tmp_path, **{f"llama.{key}": value})) == gguf_config(config_of(tmp_path))


def test_metadata_that_may_be_missing(tmp_path: Path):
    optional = ("attention.key_length", "attention.value_length", "rope.dimension_count", "vocab_size")
    file = config_of(tmp_path, **{f"llama.{key}": None for key in optional})
    assert gguf_config(file) == gguf_config(config_of(tmp_path))
    del file.metadata["llama.attention.head_count_kv"], file.metadata["llama.rope.freq_base"]
    config = gguf_config(file)
    assert (config.num_kv_heads, config.rope.theta) == (config.num_heads, 10_000.0)


def test_linear_scaling_with_and_without_its_type(tmp_path: Path):
    new = config_of(tmp_path, **{"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    old = config_of(tmp_path, **{"llama.rope.scale_linear": 4.0})
    assert gguf_config(new).rope == gguf_config(old).rope
    assert (gguf_config(new).rope.type, gguf_config(new).rope.factor) == ("linear", 4.0)
    none = config_of(tmp_path, **{"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0})
    assert gguf_config(none).rope.type == "default"


@pytest.mark.parametrize(
    ("change", "factors", "message"),
    [
        ({}, [0.0] * 8, "RoPE frequency factors hold 0.0"),
        ({}, [1.0] * 7 + [math.nan], "RoPE frequency factors hold"),
        ({"shape": (4,), "nbytes": 16}, [1.0] * 8, "4 RoPE frequency factors, wanted 8"),
        ({"type": "F16"}, [1.0] * 8, "rope_freqs.weight has type F16, wanted F32"),
    ],
)
def test_frequency_factors_that_fit_no_head_are_refused(change, factors, message: str, tmp_path: Path):
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 64
    path = twin(make_tiny_model(tmp_path / "model", rope_parameters=rope))
    tensor = read_gguf(path).tensors["rope_freqs.weight"]
    data = path.read_bytes()
    path.write_bytes(data[: tensor.offset] + struct.pack("<8f", *factors) + data[tensor.offset + tensor.nbytes :])
    file = read_gguf(path)
    file.tensors["rope_freqs.weight"] = replace(tensor, **change)
    with pytest.raises(ModelError, match=message):
        gguf_config(file)


def test_a_number_a_layer_that_is_always_the_same_is_one_number(tmp_path: Path):
    file = config_of(tmp_path, **{"llama.feed_forward_length": np.array([128, 128], np.int32)})
    assert gguf_config(file).intermediate_size == 128


@pytest.mark.model
def test_the_default_model_is_read_from_its_headers(default_model: Path):
    checkpoint = open_checkpoint(default_model)
    config = checkpoint.config
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.rope.theta, config.vocab_size, config.max_position, config.tied_head) == (1e5, 49152, 8192, True)
    assert (checkpoint.quantization, checkpoint.generation.eos_token_ids) == ("Q4_1", (2,))


@pytest.mark.parametrize("type", ["F32", "F16", "BF16"])
def test_plain_types_are_views_of_the_file(type: str, tmp_path: Path):
    dtype = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}[type]
    array = np.arange(64, dtype=np.float32).reshape(2, 32).astype(dtype)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("w", array.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType[type])
    finish(writer)
    file = read_gguf(tmp_path / "m.gguf")
    assert file.tensors["w"].shape == array.shape
    assert file.data("w").tobytes() == array.tobytes()
    assert np.shares_memory(file.data("w"), file.raw)
    assert gguf_quantization(file) is None
