"""The converted copy is the same model; it is made once, is never torn, and is never needed."""

import fcntl
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from test_checkpoint import assert_same_weights
from tiny import make_tiny_model
from weight_files import quantize_gguf, twin

from tinyvllm_cli.model.checkpoint import Checkpoint, open_checkpoint
from tinyvllm_cli.model.weights import converted as module
from tinyvllm_cli.model.weights.converted import converted, source_key
from tinyvllm_cli.model.weights.safetensors import SafeTensors
from tinyvllm_cli.model.weights.source import Array, TensorSource


@pytest.fixture
def quantized(tmp_path: Path) -> Checkpoint:
    plain = twin(make_tiny_model(tmp_path / "model"))
    return open_checkpoint(quantize_gguf(plain, tmp_path / "q.gguf", "Q4_1"))


class Unreadable:
    """A TensorSource that may not be read any more."""

    def __init__(self, source: TensorSource) -> None:
        self.names, self.shape, self.dtype = source.names, source.shape, source.dtype

    def read(self, name: str) -> Array:
        raise AssertionError(f"{name} was read again")


def copies(cache: Path) -> list[str]:
    return sorted(path.suffix for path in (cache / "converted").iterdir())


def test_the_copy_is_the_model_and_is_made_once(quantized: Checkpoint, tmp_path: Path):
    first = converted(quantized, tmp_path)
    assert isinstance(first.tensors, SafeTensors)
    assert_same_weights(first, quantized)
    assert (first.config, first.quantization) == (quantized.config, quantized.quantization)
    second = converted(replace(quantized, tensors=Unreadable(quantized.tensors)), tmp_path)
    assert_same_weights(second, quantized)
    assert copies(tmp_path) == [".lock", ".safetensors"]


def test_another_reader_reads_the_copy(quantized: Checkpoint, tmp_path: Path):
    converted(quantized, tmp_path)
    (copy,) = (tmp_path / "converted").glob("*.safetensors")
    loaded = load_file(copy)
    assert loaded.keys() == quantized.tensors.names()
    assert all(np.array_equal(array, quantized.tensors.read(name)) for name, array in loaded.items())


def test_a_plain_model_needs_no_copy(tmp_path: Path):
    checkpoint = open_checkpoint(twin(make_tiny_model(tmp_path / "model")))
    assert converted(checkpoint, tmp_path / "cache") is checkpoint
    assert not (tmp_path / "cache").exists()


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def spoil_header(path: Path) -> None:
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])


def other_tensors(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"model.norm.weight", b"model.nrom.weight"))


@pytest.mark.parametrize("damage", [tear, spoil_header, other_tensors, Path.unlink])
def test_a_copy_that_is_not_whole_is_made_again(damage: Callable[[Path], None], quantized: Checkpoint, tmp_path: Path):
    converted(quantized, tmp_path)
    (copy,) = (tmp_path / "converted").glob("*.safetensors")
    damage(copy)
    copy.with_suffix(".part").write_bytes(b"what a killed process left")
    again = converted(quantized, tmp_path)
    assert isinstance(again.tensors, SafeTensors)
    assert_same_weights(again, quantized)
    assert copies(tmp_path) == [".lock", ".safetensors"]


def test_a_failure_half_way_leaves_nothing_behind(quantized: Checkpoint, tmp_path: Path):
    with pytest.raises(AssertionError, match="read again"):
        converted(replace(quantized, tensors=Unreadable(quantized.tensors)), tmp_path)
    assert copies(tmp_path) == [".lock"]


def test_the_model_itself_is_used_where_no_copy_can_be(
    quantized: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").touch()
    assert converted(quantized, tmp_path / "file") is quantized  # the cache cannot be written
    with monkeypatch.context() as patch:
        patch.setattr(module, "ROOM", shutil.disk_usage(tmp_path).total)
        assert converted(quantized, tmp_path / "full") is quantized
    with monkeypatch.context() as patch:
        patch.setattr(module, "MAX_COPY", 1000)
        assert converted(quantized, tmp_path / "large") is quantized
    assert not list(tmp_path.rglob("*.safetensors"))[1:]  # the folder's own file alone


def test_a_copy_in_the_making_is_not_waited_for(quantized: Checkpoint, tmp_path: Path):
    folder = tmp_path / "converted"
    folder.mkdir()
    with (folder / f"{source_key(quantized.path, quantized.config)}.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)  # a lock that only an exclusive one minds
        assert converted(quantized, tmp_path) is quantized
    assert copies(tmp_path) == [".lock"]


def test_two_processes_at_once_both_have_the_model(quantized: Checkpoint, tmp_path: Path):
    code = (
        "import sys; from pathlib import Path; import numpy as np\n"
        "from tinyvllm_cli.model.checkpoint import open_checkpoint\n"
        "from tinyvllm_cli.model.weights.converted import converted\n"
        "from tinyvllm_cli.model.weights.layout import iter_weights\n"
        "model = converted(open_checkpoint(Path(sys.argv[1])), Path(sys.argv[2]))\n"
        "print(sum(float(np.abs(w.array).sum()) for w in iter_weights(model.config, model.tensors)))"
    )
    command = [sys.executable, "-c", code, str(quantized.path), str(tmp_path)]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    sums = {run.communicate()[0] for run in runs}
    assert [run.returncode for run in runs] == [0, 0]
    assert len(sums) == 1
    assert copies(tmp_path) == [".lock", ".safetensors"]


def test_the_key_is_of_the_content(quantized: Checkpoint, tmp_path: Path):
    key = source_key(quantized.path, quantized.config)
    moved = shutil.copy(quantized.path, tmp_path / "moved.gguf")
    assert source_key(Path(moved), quantized.config) == key
    data = quantized.path.read_bytes()
    for place in (0, len(data) // 2, len(data) - 1):
        Path(moved).write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        assert source_key(Path(moved), quantized.config) != key
    assert source_key(quantized.path, replace(quantized.config, num_kv_heads=4)) != key
