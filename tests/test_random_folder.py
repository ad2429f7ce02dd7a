"""A folder of random weights: what every command opens, whole or not there at all."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
from command import read_answers, run_here, write_lines
from gpu_subject import child_environment
from random_laws import MODELS, contents
from seam import Part, batch, prompt

from tinyvllm_cli import random_folder
from tinyvllm_cli.backends.cpu.backend import CpuBackend
from tinyvllm_cli.config import EngineConfig
from tinyvllm_cli.errors import ModelError, UsageError
from tinyvllm_cli.model.checkpoint import open_checkpoint
from tinyvllm_cli.model.random_weights import RandomTensors, read_preset
from tinyvllm_cli.random_folder import check_folder, write_folder
from tinyvllm_cli.text.random_tokenizer import random_tokenizer
from tinyvllm_cli.text.tokenizer import load_tokenizer

SHARDS = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]


def write(folder: Path, name: str = "tied", tensors: RandomTensors | None = None) -> RandomTensors:
    tensors = RandomTensors(read_preset(MODELS[name]), seed=4) if tensors is None else tensors
    write_folder(folder, MODELS[name], tensors, progress=False)
    return tensors


@pytest.mark.parametrize("name", MODELS)
def test_what_is_opened_is_what_was_written(name: str, tmp_path: Path):
    folder = tmp_path / "new" / "model"
    tensors = write(folder, name)
    checkpoint = open_checkpoint(folder)
    config = read_preset(MODELS[name])
    assert checkpoint.config == config
    assert checkpoint.generation.eos_token_ids == tuple(MODELS[name]["eos_token_id"])
    assert checkpoint.tensors.names() == tensors.names()
    for tensor in tensors.names():
        assert checkpoint.tensors.read(tensor).tobytes() == tensors.read(tensor).tobytes(), tensor
    assert contents(folder)["tokenizer.json"].decode() == random_tokenizer(MODELS[name]).core.to_str()
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.size, tokenizer.bos_token_id, tokenizer.eos_token_id) == (320, 1, 2)
    engine = EngineConfig(slots=1, max_batch_tokens=32, dtype="float32")
    logits = [
        CpuBackend(config, source, engine, tokenizer_size=320, num_blocks=3).logits(batch(Part(0, (1,), 0, prompt(9))))
        for source in (tensors, checkpoint.tensors)
    ]
    assert logits[0].tobytes() == logits[1].tobytes()


def test_the_shards_are_what_the_format_says_and_of_like_size(tmp_path: Path):
    """As the package of the format reads them."""
    tensors = write(tmp_path / "model")
    files = contents(tmp_path / "model")
    assert {name for name in files if name.endswith(".safetensors")} == set(SHARDS)
    index = json.loads(files["model.safetensors.index.json"])
    found: dict[str, str] = {}
    for shard in SHARDS:
        held = dict(safetensors.deserialize(files[shard]))
        found |= dict.fromkeys(held, shard)
        for name, entry in held.items():
            assert (entry["dtype"], tuple(entry["shape"])) == ("BF16", tensors.shape(name))
            assert bytes(entry["data"]) == tensors.read(name).tobytes()
    assert found == index["weight_map"] and index["metadata"]["total_size"] == tensors.nbytes
    largest = max(tensors.read(name).nbytes for name in tensors.names())
    assert abs(len(files[SHARDS[0]]) - len(files[SHARDS[1]])) <= largest + 10_000


def test_the_commands_open_it(tmp_path: Path, own_cache: None, capfd: Any):
    write(tmp_path / "model")
    lines = write_lines(tmp_path / "in.jsonl", [{"custom_id": 0, "prompt": "one", "max_tokens": 4, "ignore_eos": True}])
    assert run_here("run", lines, "-m", tmp_path / "model", "-o", tmp_path / "out.jsonl") == 0
    (answer,) = read_answers(tmp_path / "out.jsonl")
    assert answer["error"] is None and answer["usage"]["completion_tokens"] == 4
    capfd.readouterr()
    assert run_here("models", "show", tmp_path / "model") == 0
    assert "320 ids" in capfd.readouterr().out


# ---------------------------------------------------------------- whole, or not there


def test_an_empty_folder_is_taken_and_any_other_is_left_alone(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("mine")
    check_folder(tmp_path / "absent")
    write(tmp_path / "link")
    open_checkpoint(tmp_path / "empty")
    for name, message in (("full", "is not empty"), ("file", "is no folder"), ("empty", "is not empty")):
        for refused in (check_folder, write):
            with pytest.raises(UsageError, match=f"{name} {message}: give the name of a new one"):
                refused(tmp_path / name)
    with pytest.raises(UsageError, match="has a name with control characters, which no model has"):
        check_folder(tmp_path / "a\nb")
    assert contents(tmp_path / "full") == {"notes": b"mine"} and (tmp_path / "file").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "link", "file", "full"}


def test_a_folder_that_is_there_stays_the_one_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A process may be in it, and another disk may be mounted there, whose room counts."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    before, asked = (tmp_path / "empty").stat().st_ino, list[Path]()
    monkeypatch.setattr(random_folder, "free_bytes", lambda folder: asked.append(folder) or 1 << 40)
    write(Path())
    assert (tmp_path / "empty").stat().st_ino == before and asked == [tmp_path / "empty"]
    open_checkpoint(Path())
    assert [path.name for path in tmp_path.iterdir()] == ["empty"] and not list(Path().glob("*.part"))


def test_two_processes_do_not_fill_one_folder(tmp_path: Path):
    (tmp_path / "model").mkdir()

    def other() -> None:
        with pytest.raises(UsageError, match="is not empty"):
            write(tmp_path / "model")

    write(tmp_path / "model", tensors=Ending(other))
    open_checkpoint(tmp_path / "model")


def test_what_somebody_puts_into_the_folder_meanwhile_is_left_alone(tmp_path: Path):
    (tmp_path / "model").mkdir()
    notes = tmp_path / "model" / "config.json"
    with pytest.raises(ModelError, match=r"cannot be written to [^:]+: Directory not empty"):
        write(tmp_path / "model", tensors=Ending(lambda: notes.write_text("mine")))
    assert contents(tmp_path / "model") == {"config.json": b"mine"}


class Ending(RandomTensors):
    """Tensors of which the last cannot be read."""

    def __init__(self, end: Callable[[], object]) -> None:
        super().__init__(read_preset(MODELS["tied"]))
        self._end = end

    def read(self, name: str) -> Any:
        if name == "model.layers.1.mlp.down_proj.weight":
            self._end()
        return super().read(name)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ModelError])
def test_an_end_before_its_time_leaves_nothing(kind: type[BaseException], tmp_path: Path):
    def end() -> None:
        assert [path.name for path in tmp_path.iterdir()] != []
        raise kind

    for _ in range(2):
        with pytest.raises(kind):
            write(tmp_path / "model", tensors=Ending(end))
        assert [path for path in tmp_path.rglob("*") if path.name != "model"] == []
        (tmp_path / "model").mkdir(exist_ok=True)  # and again, in a folder that is there


def test_an_end_while_files_get_their_place_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    replace = Path.replace

    def ending(self: Path, target: Path) -> Path:
        if self.name == "config.json":
            raise KeyboardInterrupt
        return replace(self, target)

    (tmp_path / "model").mkdir()
    monkeypatch.setattr(Path, "replace", ending)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "model")
    assert [path.name for path in tmp_path.rglob("*")] == ["model"]


def test_a_killed_process_leaves_no_model(tmp_path: Path):
    code = (
        "import os, signal; from pathlib import Path; from test_random_folder import Ending, write\n"
        f"write(Path({str(tmp_path / 'model')!r}), tensors=Ending(lambda: os.kill(os.getpid(), signal.SIGKILL)))"
    )
    tests = Path(__file__).parent
    run = subprocess.run([sys.executable, "-c", code], cwd=tests, env=child_environment(), check=False)
    assert run.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.endswith(".part") and (left / SHARDS[1]).exists()
    with pytest.raises(ModelError, match=r"no config\.json"):
        open_checkpoint(left)
    write(tmp_path / "model")
    open_checkpoint(tmp_path / "model")


def test_a_disk_without_room_is_named_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(random_folder, "free_bytes", lambda folder: 1000)
    with pytest.raises(ModelError, match=rf"the model needs 50\.\d MB of disk and {tmp_path} has 1\.0 kB left"):
        write(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ModelError, match=f"cannot be written to {tmp_path / 'loop'}: "):
        write(tmp_path / "loop")
    for name in ("file/model", "file/model/of"):
        with pytest.raises(UsageError, match=f"{name} lies in {tmp_path / 'file'}, which is no folder"):
            check_folder(tmp_path / name)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "loop"}


def test_progress_is_that_of_all_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    done: list[int] = []
    original = random_folder.write_safetensors
    monkeypatch.setattr(
        random_folder, "write_safetensors", lambda *args, **kw: original(*args, **kw | {"written": done.append})
    )
    tensors = write(tmp_path / "model")
    assert sum(done) == tensors.nbytes and len(done) == len(tensors.names())
