"""The converted copy is the same model; it is made once, is never torn, and is never needed."""

import fcntl
import os
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
    """What is in the folder of copies: the lock, and the ending of each copy."""
    return sorted(path.suffix or path.name for path in (cache / "converted").iterdir())


def test_the_copy_is_the_model_and_is_made_once(quantized: Checkpoint, tmp_path: Path):
    first = converted(quantized, tmp_path)
    assert isinstance(first.tensors, SafeTensors)
    assert_same_weights(first, quantized)
    assert (first.config, first.quantization) == (quantized.config, quantized.quantization)
    second = converted(replace(quantized, tensors=Unreadable(quantized.tensors)), tmp_path)
    assert_same_weights(second, quantized)
    assert copies(tmp_path) == [".safetensors", "lock"]


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
    copy.with_name("part").write_bytes(b"what a killed process left")
    again = converted(quantized, tmp_path)
    assert isinstance(again.tensors, SafeTensors)
    assert_same_weights(again, quantized)
    assert copies(tmp_path) == [".safetensors", "lock"]


def test_a_failure_half_way_leaves_nothing_behind(quantized: Checkpoint, tmp_path: Path):
    with pytest.raises(AssertionError, match="read again"):
        converted(replace(quantized, tensors=Unreadable(quantized.tensors)), tmp_path)
    assert copies(tmp_path) == ["lock"]


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
    with (folder / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)  # a lock that only an exclusive one minds
        assert converted(quantized, tmp_path) is quantized
    assert copies(tmp_path) == ["lock"]


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
    assert copies(tmp_path) == [".safetensors", "lock"]


def change(path: Path, place: int, nanoseconds: int) -> None:
    """Turn a bit of the file where it lies, and say that it was written so much later."""
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + nanoseconds))


def test_the_key_is_of_the_content_and_of_what_the_file_system_says(
    quantized: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path, config = quantized.path, quantized.config
    keys = [source_key(path, config), source_key(path, replace(config, num_kv_heads=4))]
    for place in (0, path.stat().st_size // 2, path.stat().st_size - 1):
        change(path, place, 0)  # the time may be set back: the content tells
        keys.append(source_key(path, config))
    monkeypatch.setattr(module, "SAMPLES", 2)
    monkeypatch.setattr(module, "SAMPLE", 64)
    keys.append(source_key(path, config))
    change(path, path.stat().st_size // 2, 1)  # between the pieces: the time tells
    keys.append(source_key(path, config))
    shutil.copy2(path, tmp_path / "other.gguf")
    keys.append(source_key(tmp_path / "other.gguf", config))
    assert len(set(keys)) == len(keys)
    (tmp_path / "link.gguf").symlink_to(path)
    assert source_key(tmp_path / "link.gguf", config) == source_key(path, config)


def test_a_file_changed_in_place_is_converted_again_and_leaves_one_copy(
    quantized: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "SAMPLES", 2)
    monkeypatch.setattr(module, "SAMPLE", 64)
    converted(quantized, tmp_path)
    change(quantized.path, quantized.path.stat().st_size // 2, 1)
    changed = open_checkpoint(quantized.path)
    assert_same_weights(converted(changed, tmp_path), changed)
    assert copies(tmp_path) == [".safetensors", "lock"]


def test_copies_whose_source_is_gone_go_when_another_is_made(quantized: Checkpoint, tmp_path: Path):
    others = [open_checkpoint(Path(shutil.copy(quantized.path, tmp_path / f"{name}.gguf"))) for name in "ab\udcff"]
    for other in others:
        assert converted(other, tmp_path) is not other
    (tmp_path / "converted" / "of-an-older-version.safetensors").write_bytes(bytes(9))
    others[0].path.unlink()
    converted(quantized, tmp_path)
    assert copies(tmp_path) == [*[".safetensors"] * 3, "lock"]
    assert (
        converted(replace(others[2], tensors=Unreadable(others[2].tensors)), tmp_path).tensors is not others[2].tensors
    )
