"""Which backend is taken, what comes with it, and what is said where a GPU is meant and cannot be used."""

import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from tiny import make_tiny_model
from weight_files import quantize_gguf, twin

from tinyvllm_cli.backends.choose import (
    choose_backend,
    engine_config,
    engine_defaults,
    open_backend,
    resolve_dtype,
)
from tinyvllm_cli.backends.gpu import driver, packages
from tinyvllm_cli.backends.gpu.driver import Driver
from tinyvllm_cli.config import EngineConfig, EngineOptions
from tinyvllm_cli.errors import DeviceError, ModelError, UsageError
from tinyvllm_cli.model.checkpoint import Checkpoint, open_checkpoint

SOUND = Driver((13, 0), 1, None)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(make_tiny_model(tmp_path_factory.mktemp("models") / "model"))


def machine(monkeypatch: pytest.MonkeyPatch, found: Driver | None, fault: str | None = None) -> None:
    """A machine with this driver, and packages that fit or have this fault."""

    def require(asked: Driver) -> None:
        assert asked is found
        if fault is not None:
            raise DeviceError(fault)

    monkeypatch.setattr(driver, "find_driver", lambda: found)
    monkeypatch.setattr(packages, "check_packages", require)


# ---------------------------------------------------------------- the choice


@pytest.mark.parametrize(("found", "chosen"), [(None, "cpu"), (SOUND, "gpu"), (replace(SOUND, num_devices=8), "gpu")])
def test_auto_is_the_gpu_wherever_one_is_visible(monkeypatch: pytest.MonkeyPatch, found: Driver | None, chosen: str):
    machine(monkeypatch, found)
    assert choose_backend("auto") == chosen


def test_the_cpu_that_is_asked_for_needs_no_look_at_the_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(driver, "find_driver", lambda: pytest.fail("asked"))
    assert choose_backend("cpu") == "cpu"


@pytest.mark.parametrize("name", ["auto", "gpu"])
def test_a_gpu_that_cannot_be_used_is_an_error_and_never_the_cpu(monkeypatch: pytest.MonkeyPatch, name: str):
    machine(monkeypatch, SOUND, "CuPy is missing: run `pip install x`")
    with pytest.raises(DeviceError) as caught:
        choose_backend(name)
    assert str(caught.value) == "CuPy is missing: run `pip install x`; or give --backend cpu"
    machine(monkeypatch, SOUND, "too old: another card, or --backend cpu")
    with pytest.raises(DeviceError) as caught:
        choose_backend(name)
    assert str(caught.value).count("--backend cpu") == 1


def test_a_driver_that_cannot_be_used_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(driver, "find_driver", lambda: Driver((0, 0), 2, "libcuda.so.1 cannot be opened: mend it"))
    with pytest.raises(DeviceError, match=r"libcuda\.so\.1 cannot be opened: mend it; or give --backend cpu"):
        choose_backend("auto")


def test_a_gpu_that_is_asked_for_and_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch):
    machine(monkeypatch, None)
    with pytest.raises(DeviceError, match=r"no NVIDIA device is visible.*CUDA_VISIBLE_DEVICES.*--backend cpu"):
        choose_backend("gpu")


# ---------------------------------------------------------------- what comes with it


@pytest.mark.parametrize(("backend", "slots", "tokens"), [("gpu", 256, 8192), ("cpu", 32, 512)])
def test_what_is_asked_for_wins_over_what_suits_the_backend(checkpoint: Checkpoint, backend, slots: int, tokens: int):
    assert engine_defaults(backend) == (slots, tokens)
    plain = engine_config(backend, EngineOptions(), checkpoint)
    assert (plain.slots, plain.max_batch_tokens) == (slots, tokens)
    assert plain.threads is not None and plain.threads >= 1
    given = {"slots": 3, "max_batch_tokens": 77, "max_model_len": 99, "threads": 5, "gpu_memory": 10**9, "seed": 4}
    given |= {"prefix_cache": False, "kv_dtype": "fp8"}
    found = engine_config(backend, EngineOptions(**given, dtype="float16"), checkpoint)
    assert asdict(found) == {**given, "dtype": "float16"} and type(found) is EngineConfig


@pytest.mark.parametrize(("stored", "gpu"), [("float32", "bfloat16"), ("bfloat16", "bfloat16"), ("float16", "float16")])
def test_the_dtype_of_the_weights(checkpoint: Checkpoint, stored, gpu: str):
    checkpoint = replace(checkpoint, config=replace(checkpoint.config, dtype=stored))
    assert resolve_dtype("cpu", "auto", checkpoint) == "float32"
    assert resolve_dtype("gpu", "auto", checkpoint) == gpu
    for asked in ("bfloat16", "float16"):
        assert resolve_dtype("cpu", asked, checkpoint) == resolve_dtype("gpu", asked, checkpoint) == asked
    assert resolve_dtype("cpu", "float32", checkpoint) == "float32"
    with pytest.raises(UsageError, match=r"float32 is for the CPU.*bfloat16"):
        resolve_dtype("gpu", "float32", checkpoint)


def test_a_quantized_file_becomes_bfloat16_on_a_gpu(tmp_path: Path):
    plain = twin(make_tiny_model(tmp_path / "model"))
    quantized = open_checkpoint(quantize_gguf(plain, tmp_path / "q.gguf", "Q4_1"))
    assert resolve_dtype("gpu", "auto", quantized) == "bfloat16"


# ---------------------------------------------------------------- how it is opened


def test_only_the_cpu_reads_the_converted_copy(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    copy, opened = SimpleNamespace(config="copied", tensors="copied"), []

    def opening(*args: object, tokenizer_size: int, **kept: object) -> str:
        opened.append((args, tokenizer_size, kept))
        return "a backend"

    monkeypatch.setattr("tinyvllm_cli.model.weights.converted.converted", lambda checkpoint, cache: copy)
    monkeypatch.setattr("tinyvllm_cli.backends.cpu.backend.CpuBackend", opening)
    gpu = ModuleType("tinyvllm_cli.backends.gpu.backend")
    gpu.open_gpu_backend = opening
    monkeypatch.setitem(sys.modules, gpu.__name__, gpu)
    engine = EngineConfig(slots=1, max_batch_tokens=16, dtype="bfloat16")
    for backend, cache in (("cpu", tmp_path), ("cpu", None), ("gpu", tmp_path)):
        assert open_backend(backend, checkpoint, engine, 9, cache) == "a backend"
    own = (checkpoint.config, checkpoint.tensors, engine)
    assert opened == [(("copied", "copied", engine), 9, {}), (own, 9, {}), (own, 9, {"cache": tmp_path})]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (DeviceError("the card is busy"), "the card is busy; or give --backend cpu"),
        (ModelError("the model needs 9 GiB"), "the model needs 9 GiB"),
    ],
)
def test_a_gpu_that_cannot_be_opened_names_the_way_out(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, fault: Exception, said: str
):
    def opening(*args: object, tokenizer_size: int, cache: Path | None) -> None:
        raise fault

    gpu = ModuleType("tinyvllm_cli.backends.gpu.backend")
    gpu.open_gpu_backend = opening
    monkeypatch.setitem(sys.modules, gpu.__name__, gpu)
    with pytest.raises(type(fault)) as caught:
        open_backend("gpu", checkpoint, EngineConfig(slots=1, max_batch_tokens=16, dtype="bfloat16"), 9, None)
    assert str(caught.value) == said
