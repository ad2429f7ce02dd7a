"""`tinyvllm bench --random-weights`: a shape without its files, measured as it is or written as a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import read_answers, run_here, write_lines

from tinyvllm_cli.backends.cpu.backend import CpuBackend
from tinyvllm_cli.bench import bench
from tinyvllm_cli.bench.workloads import NAMED
from tinyvllm_cli.cli.options import RANDOM_WEIGHTS
from tinyvllm_cli.cli.signals import Interrupted
from tinyvllm_cli.model import presets

pytestmark = pytest.mark.usefixtures("own_cache")

CPU = ("--backend", "cpu", "--threads", "1")
RANDOM = ("--random-weights", "smollm2-135m", "--trials", "1", *CPU)
VOCAB_SIZE = 300


def test_the_names_of_the_options_are_those_of_the_files():
    lengths = json.loads((Path(bench.__file__).parent / "workloads.json").read_text())
    assert tuple(lengths) == NAMED and tuple(presets.PRESETS) == RANDOM_WEIGHTS


@pytest.fixture
def small_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of the name is small."""
    preset = {
        **presets.PRESETS["smollm2-135m"],
        **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": VOCAB_SIZE},
        **{"num_attention_heads": 4, "num_key_value_heads": 2},
    }
    monkeypatch.setattr(presets, "PRESETS", {"smollm2-135m": preset})
    monkeypatch.setattr("tinyvllm_cli.model.random_weights.PRESETS", {"smollm2-135m": preset})


@pytest.mark.usefixtures("small_preset")
def test_random_weights_are_measured_and_written_as_a_model(tmp_path: Path, capfd: Any):
    folder, out = tmp_path / "model", tmp_path / "out.json"
    assert run_here("bench", *RANDOM, "--json", out, "--write", folder) == 0
    assert capfd.readouterr().err == ""
    found = json.loads(out.read_bytes())
    assert found["workload"]["output_tokens"] == 256 and found["start"]["first_s"] > 0
    assert len(list(folder.glob("*.safetensors"))) == 2
    assert run_here("bench", "-m", folder, "--trials", "1", *CPU) == 0
    assert "start to first token, again" in capfd.readouterr().out
    assert run_here("bench", *RANDOM, "--json", out) == 0
    assert "not measured" in capfd.readouterr().out and json.loads(out.read_bytes())["start"] is None


@pytest.mark.usefixtures("small_preset", "no_start")
def test_a_file_of_ids_is_measured_and_ids_beyond_the_vocabulary_are_refused_as_in_a_run(tmp_path: Path, capfd: Any):
    folder, out, answers = (tmp_path / name for name in ("model", "out.json", "answers.jsonl"))
    last, beyond = VOCAB_SIZE - 1, VOCAB_SIZE
    good = [{"prompt_token_ids": [0, last][:count], "max_tokens": 5} for count in (1, 2)]
    source = write_lines(tmp_path / "good.jsonl", good)
    assert run_here("bench", *RANDOM, "--workload", source, "--json", out, "--write", folder) == 0
    workload = json.loads(out.read_bytes())["workload"]
    assert [workload[name] for name in ("requests", "prompt_tokens", "output_tokens")] == [2, 3, 10]
    for bad in (
        {"prompt_token_ids": [beyond]},
        {"prompt_token_ids": []},
        {"prompt_token_ids": [1], "stop_token_ids": [beyond]},
        {"prompt_token_ids": [1], "logit_bias": {str(beyond): 1}},
    ):
        source = write_lines(tmp_path / "bad.jsonl", [good[0], {"custom_id": "b", **bad}])
        run_here("run", source, "-m", folder, "-o", answers, "--overwrite", *CPU)
        (message,) = [answer["error"]["message"] for answer in read_answers(answers) if answer["error"]]
        capfd.readouterr()
        assert run_here("bench", *RANDOM, "--workload", source) == 1
        assert capfd.readouterr() == ("", f"error: request b, line 2 failed: {message}\n")


@pytest.mark.usefixtures("small_preset", "no_start")
def test_an_interrupt_leaves_the_model_that_was_written_and_says_how_to_use_it(tmp_path: Path, capfd: Any, monkeypatch):
    def interrupted(*arguments: Any) -> None:
        raise Interrupted(2)

    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(CpuBackend, "step", interrupted)
        with pytest.raises(Interrupted):
            run_here("bench", *RANDOM, "--write", "written")
        assert capfd.readouterr().err.endswith("; the model in written is whole: -m ./written uses it\n")
        with pytest.raises(Interrupted):
            run_here("bench", *RANDOM)
        assert capfd.readouterr().err == "stopped before the end: no figures are kept\n"
    assert run_here("bench", *RANDOM, "--write", "written") == 2
    assert capfd.readouterr().err.endswith("or use the model in it with -m ./written\n")
    assert run_here("bench", "-m", "./written", "--trials", "1", *CPU) == 0
