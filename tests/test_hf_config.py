"""config.json and its neighbours: old and new keys mean the same, and what is not supported is named."""

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import make_tiny_model, tiny_config

from tinyvllm_cli.config import ModelConfig, RopeConfig
from tinyvllm_cli.errors import ModelError
from tinyvllm_cli.model.checkpoint import open_checkpoint
from tinyvllm_cli.model.hf_config import HFConfig, model_config
from tinyvllm_cli.model.json_file import read_json

LLAMA, MISTRAL, QWEN2, QWEN3 = "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA3_ROPE = {"rope_parameters": {"rope_type": "llama3", **LLAMA3}}
REMOVED = object()
NAN, INFINITY = float("nan"), float("inf")


def read(folder: Path, architecture: str = LLAMA, **changes: Any) -> ModelConfig:
    """The config of a tiny model whose config.json has some keys replaced, or taken out."""
    config = {**tiny_config(architecture, vocab_size=320), **changes}
    path = folder / "config.json"
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not REMOVED}))
    return model_config(read_json(path, HFConfig), path)


@pytest.mark.parametrize(
    ("type", "scaling", "rope"),
    [
        ("default", {}, RopeConfig(5e5)),
        ("linear", {"factor": 2.0}, RopeConfig(5e5, "linear", 2.0)),
        ("llama3", LLAMA3, RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192)),
    ],
)
def test_old_and_new_rope_keys_mean_the_same(type: str, scaling: dict[str, Any], rope: RopeConfig, tmp_path: Path):
    new = {"rope_parameters": {"rope_type": type, "rope_theta": 5e5, **scaling}}
    old = {"rope_parameters": REMOVED, "rope_theta": 5e5, "rope_scaling": {"rope_type": type, **scaling}}
    oldest = {"rope_parameters": REMOVED, "rope_theta": 5e5, "rope_scaling": {"type": type, **scaling}}
    assert read(tmp_path, **new).rope == read(tmp_path, **old).rope == read(tmp_path, **oldest).rope == rope


def test_a_folder_without_rope_keys_has_the_default(tmp_path: Path):
    config = read(tmp_path, rope_parameters=REMOVED, rope_scaling=None)
    assert config.rope == RopeConfig(10_000.0)


@pytest.mark.parametrize("empty", [{}, None, {"rope_type": None}])
def test_of_the_two_keys_the_one_that_says_something_holds(empty: Any, tmp_path: Path):
    linear = {"type": "linear", "factor": 2.0}
    expected = RopeConfig(1e4, "linear", 2.0)
    assert read(tmp_path, rope_parameters=empty, rope_scaling=linear).rope == expected
    assert read(tmp_path, rope_parameters=linear, rope_scaling=empty).rope == expected
    assert read(tmp_path, rope_parameters={**linear, "rope_theta": 1e4}, rope_scaling=linear).rope == expected


def test_the_context_of_llama3_scaling_may_stand_elsewhere(tmp_path: Path):
    """As in standardize_rope_params of transformers: the top-level key, then the scaling's own, then the context."""
    bare = {"rope_type": "llama3", **LLAMA3}
    assert read(tmp_path, rope_parameters=bare, original_max_position_embeddings=64).rope.original_max_position == 64
    del bare["original_max_position_embeddings"]
    assert read(tmp_path, rope_parameters=bare, max_position_embeddings=99).rope.original_max_position == 99


def test_the_architecture_need_not_be_in_a_list(tmp_path: Path):
    assert read(tmp_path, architectures=LLAMA) == read(tmp_path, architectures=[LLAMA])


@pytest.mark.parametrize(
    ("architecture", "attention_bias", "expected"),  # qkv_bias, o_bias, qk_norm
    [
        (LLAMA, False, (False, False, False)),
        (LLAMA, True, (True, True, False)),
        (MISTRAL, True, (False, False, False)),  # the key is not one of this architecture
        (QWEN2, False, (True, False, False)),
        (QWEN3, False, (False, False, True)),
        (QWEN3, True, (True, True, True)),
    ],
)
def test_biases_and_norms_of_each_architecture(architecture, attention_bias, expected, tmp_path: Path):
    config = read(tmp_path, architecture, attention_bias=attention_bias)
    assert (config.qkv_bias, config.o_bias, config.qk_norm) == expected
    assert not config.mlp_bias


def test_keys_that_may_be_missing(tmp_path: Path):
    config = read(tmp_path, head_dim=REMOVED, num_key_value_heads=REMOVED, tie_word_embeddings=REMOVED)
    assert (config.head_dim, config.num_kv_heads, config.tied_head) == (16, 4, False)
    assert read(tmp_path, head_dim=32).head_dim == 32
    assert read(tmp_path, mlp_bias=True).mlp_bias


def test_a_window_that_the_context_never_reaches_is_harmless(tmp_path: Path):
    assert read(tmp_path, MISTRAL, sliding_window=None) == read(tmp_path, MISTRAL, sliding_window=4096)
    assert read(tmp_path, QWEN2, sliding_window=128, use_sliding_window=False).architecture == QWEN2


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (LLAMA, {"architectures": ["GemmaForCausalLM"]}, "architecture 'GemmaForCausalLM', wanted LlamaForCausalLM or"),
    (LLAMA, {"architectures": REMOVED}, "architecture not named"),
    (LLAMA, {"hidden_act": "gelu"}, "hidden_act is 'gelu', wanted 'silu'"),
    (LLAMA, {"quantization_config": {"quant_method": "gptq"}}, "quantization_config 'gptq'"),
    (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    (
        LLAMA,
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
        "partial_rotary_factor is 0.25",
    ),
    (
        LLAMA,
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        "RoPE type 'yarn', wanted default, linear or llama3",
    ),
    (LLAMA, {"rope_parameters": REMOVED, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "RoPE type 'dynamic'"),
    (LLAMA, {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}, "RoPE type 'longrope'"),
    (LLAMA, {"rope_parameters": {"factor": 4.0}}, "RoPE type not named"),
    (LLAMA, {"rope_parameters": {"rope_type": "linear"}}, "no factor"),
    (LLAMA, {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "no low_freq_factor"),
    (LLAMA, {"rope_parameters": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, "not above"),
    (LLAMA, {"rope_parameters": {"rope_theta": 0}}, ": rope_theta is 0"),
    (MISTRAL, {"sliding_window": 1024}, "sliding_window is 1024, wanted null"),
    (MISTRAL, {"sliding_window": REMOVED, "max_position_embeddings": 32768}, "sliding_window is 4096"),
    (QWEN2, {"use_sliding_window": True}, "use_sliding_window true"),
    (QWEN3, {"layer_types": ["full_attention", "sliding_attention"]}, "layer type 'sliding_attention'"),
    (LLAMA, {"hidden_size": REMOVED}, "hidden_size"),
    (LLAMA, {"hidden_size": "64"}, r"Expected `int`, got `str` - at `\$.hidden_size`"),
    (LLAMA, {"rms_norm_eps": None}, "rms_norm_eps"),
    (LLAMA, {"architectures": "GemmaForCausalLM"}, "architecture 'GemmaForCausalLM', wanted LlamaForCausalLM or"),
    (LLAMA, {"rms_norm_eps": NAN}, "rms_norm_eps is nan"),
    (LLAMA, {"rope_parameters": {"rope_theta": INFINITY}}, ": rope_theta is inf"),
    (LLAMA, {"partial_rotary_factor": NAN}, "partial_rotary_factor is nan"),
    (LLAMA, {"rope_parameters": {"rope_theta": "x"}}, r"Expected `float | null`, got `str` - at `\$.rope_theta`"),
    (LLAMA, {"original_max_position_embeddings": 10**400, **LLAMA3_ROPE}, ": original_max_position_embeddings is 1000"),
    (LLAMA, {"rope_scaling": {"alpha": 1000}}, "RoPE type not named beside 'alpha'"),
    (LLAMA, {"rope_scaling": {"mrope_section": [1, 2]}}, "RoPE type not named beside 'mrope_section'"),
    (LLAMA, {"rope_parameters": {"full_attention": {"rope_type": "linear"}}}, "their own for 'full_attention'"),
    (LLAMA, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling and rope_parameters do not say"),
    (LLAMA, {"rope_scaling": {"rope_type": "default", "rope_theta": 5e5}}, "rope_scaling and rope_parameters do not"),
    (LLAMA, {"rope_scaling": {"rope_type": "yarn"}}, "RoPE type 'yarn'"),
    (LLAMA, {"num_attention_heads": 0}, ": num_attention_heads is 0, wanted 1 to 2147483647"),
    (
        LLAMA,
        {"num_key_value_heads": 3},
        ": num_attention_heads is 4, wanted a multiple of num_key_value_heads, which is 3",
    ),
    (LLAMA, {"head_dim": 15}, "head_dim is 15, wanted an even number"),
    (LLAMA, {"intermediate_size": 100}, "intermediate_size is 100, wanted a multiple of 8"),
    (LLAMA, {"num_hidden_layers": 10**9}, ": num_hidden_layers is 1000000000, wanted 1 to 1000"),
    (LLAMA, {"num_key_value_heads": 0}, ": num_key_value_heads is 0"),
    (LLAMA, {"max_position_embeddings": -1}, ": max_position_embeddings is -1"),
    (LLAMA, {"hidden_size": 0}, ": hidden_size is 0"),
    (LLAMA, {"head_dim": REMOVED, "hidden_size": 3}, ": hidden_size // num_attention_heads is 0"),
    (LLAMA, {"rope_parameters": {"rope_type": "linear", "factor": -1}}, ": RoPE factor is -1"),
    (LLAMA, {"vocab_size": -1}, "vocab_size is -1"),
]


@pytest.mark.parametrize(("architecture", "changes", "message"), REFUSED)
def test_what_is_not_supported_is_named(architecture: str, changes: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises(ModelError, match=message) as error:
        read(tmp_path, architecture, **changes)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(str(tmp_path / "config.json"))


def test_another_architecture_is_named_before_the_keys_that_it_lacks(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"], "d_model": 64}')
    with pytest.raises(ModelError, match="architecture 'MambaForCausalLM'"):
        open_checkpoint(tmp_path)


OUR_NAMES = {field.name for field in fields(ModelConfig) if "_" in field.name} - set(HFConfig.__struct_fields__)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "factor", "x"]), inner),
    max_leaves=5,
)


@given(key=st.sampled_from([*HFConfig.__struct_fields__, "architectures"]), value=JSON)
@settings(max_examples=300)
def test_any_value_of_any_key_is_read_or_refused(tmp_path_factory, key: str, value: Any):
    try:
        config = read(tmp_path_factory.getbasetemp(), **{key: value})
    except ModelError as error:
        assert "\n" not in str(error)
        assert not OUR_NAMES & set(re.findall(r"\w+", str(error))), "the file's own are wanted"
        return
    assert config.num_heads % config.num_kv_heads == 0


@pytest.mark.parametrize("text", ["", "[]", "{", '{"hidden_size": NaN}', "[" * 100_000, "\udcff"])
def test_a_config_that_is_no_json_object_is_refused(text: str, tmp_path: Path):
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelError, match=r"config\.json"):
        open_checkpoint(tmp_path)


def eos_of(folder: Path) -> tuple[int, ...]:
    return open_checkpoint(folder).generation.eos_token_ids


def rewrite(path: Path, **changes: Any) -> None:
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not REMOVED}))


def test_eos_ids_come_from_three_files(tmp_path: Path):
    model = make_tiny_model(tmp_path / "model", eos_token_id=5)
    assert eos_of(model) == (2, 5)  # 2 is </s>, the tokenizer's own
    rewrite(model / "generation_config.json", eos_token_id=[7, 6])
    assert eos_of(model) == (2, 6, 7)
    (model / "generation_config.json").unlink()
    assert eos_of(model) == (2, 5)
    rewrite(model / "tokenizer_config.json", eos_token={"content": "<|im_end|>", "lstrip": False})
    assert eos_of(model) == (5, 7)
    rewrite(model / "tokenizer_config.json", added_tokens_decoder={"9": {"content": "<|im_end|>"}})
    assert eos_of(model) == (5, 9)
    rewrite(model / "tokenizer_config.json", eos_token=None)
    assert eos_of(model) == (5,)
    (model / "tokenizer_config.json").unlink()
    rewrite(model / "config.json", eos_token_id=[-1, 320])  # ids that no token has
    assert eos_of(model) == ()


def test_sampling_is_suggested_only_by_a_model_that_samples(tmp_path: Path):
    def suggested(name: str, **generation: Any) -> dict[str, Any]:
        return dict(open_checkpoint(make_tiny_model(tmp_path / name, generation=generation)).generation.sampling)

    assert suggested("a", do_sample=True, temperature=0.6, top_p=0.9) == {"temperature": 0.6, "top_p": 0.9}
    assert suggested("b", do_sample=True, top_k=20, min_p=0.05) == {"temperature": 1.0, "top_k": 20, "min_p": 0.05}
    assert suggested("c", do_sample=False, temperature=0.6) == {}
    assert suggested("d", temperature=0.6) == {"temperature": 0.6}
    assert suggested("f") == {}
    assert suggested("g", repetition_penalty=1.1) == {"repetition_penalty": 1.1}, "of greedy answers"
    assert suggested("h", do_sample=True, repetition_penalty=1.1) == {"temperature": 1.0, "repetition_penalty": 1.1}


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-1, NAN, INFINITY, "0.6", True, [], None]),
        ("top_p", [0, 1.5, -0.1, NAN, "1", None]),
        ("top_k", [-1, 50.5, 2**40, INFINITY, "50", False, None]),
        ("min_p", [-0.1, 2, NAN, {}, None]),
        ("repetition_penalty", [0, -1, NAN, INFINITY, "1.1", True, None]),
        ("eos_token_id", [[None], "2", 2.5, True, {}, [[3]], None]),
    ],
)
def test_what_cannot_be_used_of_a_generation_config_is_not_suggested(field: str, values: list[Any], tmp_path: Path):
    model = make_tiny_model(tmp_path / "model", eos_token_id=5)
    for value in values:
        rewrite(model / "generation_config.json", do_sample=True, **{"eos_token_id": 7, field: value})
        generation = open_checkpoint(model).generation
        assert generation.sampling == {"temperature": 1.0}, value
        assert generation.eos_token_ids == ((2, 5) if field == "eos_token_id" else (2, 7)), value


def test_integral_numbers_are_integers_however_they_are_written(tmp_path: Path):
    model = make_tiny_model(tmp_path / "model", eos_token_id=5)
    rewrite(model / "generation_config.json", do_sample=True, top_k=50.0, eos_token_id=[7.0, None, 6])
    generation = open_checkpoint(model).generation
    assert generation.sampling["top_k"] == 50
    assert isinstance(generation.sampling["top_k"], int)
    assert generation.eos_token_ids == (2, 6, 7)
    assert read(tmp_path, hidden_size=64.0, rope_parameters=REMOVED).hidden_size == 64


@pytest.mark.parametrize("number", ["9" * 5000, "-", "x", ""])
def test_an_added_token_whose_number_is_none_is_passed_over(number: str, tmp_path: Path):
    model = make_tiny_model(tmp_path / "model", eos_token_id=5)
    rewrite(model / "tokenizer_config.json", added_tokens_decoder={number: {"content": "</s>"}})
    assert eos_of(model) == (2, 5)


NAMES = ("generation_config.json", "tokenizer_config.json", "config.json", "model.safetensors")


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_cannot_be_read_is_not_an_absent_one(name: str, tmp_path: Path):
    model = make_tiny_model(tmp_path / "model")
    (model / name).unlink()
    for spoil in (lambda path: path.symlink_to("gone"), lambda path: (path.unlink(), path.mkdir())):
        spoil(model / name)
        with pytest.raises(ModelError, match=rf"{name}: cannot be read: "):
            open_checkpoint(model)


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "config.json"])
def test_json_as_python_writes_it_is_read(name: str, tmp_path: Path):
    model = make_tiny_model(tmp_path / "model")
    rewrite(model / name, not_ours=[NAN, INFINITY, -INFINITY], length=10**30)
    assert eos_of(model) == (2, 7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (r'{"eos_token": "\ud800"}', "surrogates"),
        (f'{{"eos_token": {"9" * 5000}}}', "4300 digits"),
        ('{"eos_token": 5}', r"got `int` - at `\$.eos_token`"),
        ('{"eos_token": ', "line 1 column 15"),
    ],
)
def test_json_that_is_no_json_is_refused_by_file_and_place(text: str, message: str, tmp_path: Path):
    model = make_tiny_model(tmp_path / "model")
    (model / "tokenizer_config.json").write_text(text)
    with pytest.raises(ModelError, match=rf"tokenizer_config\.json: .*{message}") as error:
        open_checkpoint(model)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "{", '{"a": 1', "[1,]"])
def test_a_file_that_is_no_json_is_told_with_what_mends_it(tmp_path: Path, text: str):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json: found no JSON \(.+\): is it whole\? Take the file again"):
        read_json(tmp_path / "config.json", HFConfig)
