"""The digest of a model: each byte of its small files and of the samples of its weights counts, and nothing else."""

import io
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CHAT_TEMPLATE, make_tiny_model
from tiny_gguf import write_gguf_twin

from tinyvllm_cli.errors import ModelError
from tinyvllm_cli.model.checkpoint import Checkpoint, open_checkpoint
from tinyvllm_cli.model.digest import model_digest
from tinyvllm_cli.model.weights.gguf import GGUFFile
from tinyvllm_cli.text.chat_template import load_chat_template
from tinyvllm_cli.text.tokenizer import load_tokenizer

KIB = 1024
SMALL = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]


def make_folder(folder: Path, shards: int = 1) -> Path:
    """Weights of about 450 KB, more than is sampled of a file; the map is one that older tokenizers have."""
    make_tiny_model(folder, shards=shards, chat_template=CHAT_TEMPLATE)
    (folder / "special_tokens_map.json").write_text('{"bos_token": "<s>"}')
    return folder


def make_gguf(folder: Path) -> Path:
    return write_gguf_twin(make_tiny_model(folder / "twin"), folder / "model.gguf")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("digest") / "one")


@pytest.fixture(scope="module")
def opened(folder: Path) -> dict[str, Checkpoint]:
    """A model of each layout. Its headers are read once, so that a test may break what is on disk."""
    parts = make_folder(folder.parent / "parts", shards=3)
    return {
        "one file": open_checkpoint(folder),
        "shards": open_checkpoint(parts),
        "gguf": open_checkpoint(make_gguf(folder.parent)),
    }


def files_of(checkpoint: Checkpoint) -> list[Path]:
    """Of the weights."""
    return [checkpoint.path] if checkpoint.path.is_file() else sorted(checkpoint.path.glob("*.safetensors"))


def header_bytes(checkpoint: Checkpoint, file: Path) -> int:
    """Up to the first tensor: of a safetensors file by its own account, of a GGUF file by that of its reader."""
    if isinstance(checkpoint.source, GGUFFile):
        return min(tensor.offset for tensor in checkpoint.source.tensors.values())
    return 8 + int.from_bytes(file.read_bytes()[:8], "little")


class Changed:
    """A byte of a file that is another one inside the block."""

    def __init__(self, path: Path, at: int) -> None:
        self._path, self._at = path, at

    def __enter__(self) -> None:
        self._flip()

    def __exit__(self, *error: object) -> None:
        self._flip()

    def _flip(self) -> None:
        with self._path.open("r+b") as file:
            file.seek(self._at)
            (byte,) = file.read(1)
            file.seek(self._at)
            file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("layout", ["one file", "shards", "gguf"])
@settings(max_examples=40)
@given(data=st.data())
def test_a_byte_of_the_weights_counts_where_it_is_sampled(
    opened: dict[str, Checkpoint], layout: str, data: st.DataObject
):
    checkpoint = opened[layout]
    file = data.draw(st.sampled_from(files_of(checkpoint)))
    size, start = file.stat().st_size, header_bytes(checkpoint, file)
    borders = [start, start + 64 * KIB, size // 2, size // 2 + 64 * KIB, size - 64 * KIB, size]
    near = st.sampled_from([border + d for border in borders for d in (-1, 0) if 8 <= border + d < size])
    at = data.draw(near | st.integers(8, size - 1), label="byte")  # the first 8 are the length of the header
    first, middle, last = borders[:2], borders[2:4], borders[4:]
    sampled = at < start or any(begin <= at < end for begin, end in (first, middle, last))
    before = model_digest(checkpoint)
    with Changed(file, at):
        assert (model_digest(checkpoint) != before) is sampled
    assert model_digest(checkpoint) == before


@settings(max_examples=40)
@given(data=st.data())
def test_each_byte_of_the_small_files_counts(opened: dict[str, Checkpoint], data: st.DataObject):
    checkpoint = opened[data.draw(st.sampled_from(["one file", "shards"]))]
    file = checkpoint.path / data.draw(st.sampled_from([*SMALL, "special_tokens_map.json"]))
    before = model_digest(checkpoint)
    with Changed(file, data.draw(st.integers(0, file.stat().st_size - 1))):
        assert model_digest(checkpoint) != before
    assert model_digest(checkpoint) == before


def test_all_that_is_read_of_a_folder_before_its_weights_counts(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Whatever decides how texts become tokens, and tokens texts."""
    read: set[str] = set()
    plain_open = io.open

    def watched(file: object, *args: object, **options: object) -> object:
        read.add(Path(str(file)).name)
        return plain_open(file, *args, **options)

    monkeypatch.setattr(io, "open", watched)
    checkpoint = open_checkpoint(folder)
    load_tokenizer(folder)
    load_chat_template(folder)
    read = {"tokenizer.json", *read} - {"model.safetensors"}  # the one that is not opened by Python
    assert read == {*SMALL, "special_tokens_map.json"}
    before = model_digest(checkpoint)
    for name in sorted(read):
        with Changed(folder / name, 0):
            assert model_digest(checkpoint) != before, name


CHANGES: dict[str, Callable[[Path], object]] = {
    "no generation config": lambda folder: (folder / "generation_config.json").unlink(),
    "an empty template": lambda folder: (folder / "chat_template.jinja").write_text(""),
    "no template": lambda folder: (folder / "chat_template.jinja").unlink(),
    "a byte moves to the next file": lambda folder: move_byte(folder / "tokenizer_config.json", folder),
    "two files change places": lambda folder: swap(folder / "config.json", folder / "generation_config.json"),
    "longer weights": lambda folder: append(folder / "model-00002-of-00003.safetensors"),
    "weights of another name": lambda folder: rename(folder, "model-00002-of-00003.safetensors", "m.safetensors"),
}


def move_byte(source: Path, folder: Path) -> None:
    text = source.read_text()
    source.write_text(text[:-1])
    target = folder / "chat_template.jinja"
    target.write_text(text[-1] + target.read_text())


def swap(one: Path, other: Path) -> None:
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def append(file: Path) -> None:
    """A tail that is like the one before it."""
    data = file.read_bytes()
    file.write_bytes(data + data[-64 * KIB :])


def rename(folder: Path, old: str, new: str) -> None:
    """And the index with it."""
    (folder / old).rename(folder / new)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(old, new))


@pytest.mark.parametrize("change", CHANGES)
def test_another_model_has_another_digest(tmp_path: Path, change: str):
    folder = make_folder(tmp_path / "m", shards=3)
    checkpoint = open_checkpoint(folder)
    before = model_digest(checkpoint)
    CHANGES[change](folder)
    assert model_digest(checkpoint) != before


def test_a_gguf_file_counts_with_its_name_and_its_size(tmp_path: Path):
    model = make_gguf(tmp_path)
    before = model_digest(open_checkpoint(model))
    other = model.rename(tmp_path / "other.gguf")
    assert model_digest(open_checkpoint(other)) != before
    moved = Path(shutil.move(other, (tmp_path / "twin" / "model.gguf")))
    assert model_digest(open_checkpoint(moved)) == before, "not with its folder"
    checkpoint = open_checkpoint(moved)
    append(moved)
    assert model_digest(checkpoint) != before


@pytest.mark.parametrize("shards", [1, 3])
def test_where_a_folder_lies_and_what_else_is_in_it_is_no_difference(tmp_path: Path, shards: int):
    folder = make_folder(tmp_path / "m", shards)
    before = model_digest(open_checkpoint(folder))
    (folder / "README.md").write_text("# A model")
    (folder / "training_args.bin").write_bytes(b"\0")
    (folder / "out.jsonl").write_text("{}\n")
    folder = folder.rename(tmp_path / "another name")
    link = tmp_path / "link"
    link.symlink_to(folder)
    for path in (folder, link):
        assert model_digest(open_checkpoint(path)) == before
    again = make_folder(tmp_path / "again", shards)
    assert model_digest(open_checkpoint(again)) == before, "a copy is the same model"


def test_a_file_that_goes_away_is_an_error_that_names_it(tmp_path: Path):
    model = make_gguf(tmp_path)
    checkpoint = open_checkpoint(model)
    model.unlink()
    with pytest.raises(ModelError, match=r"model\.gguf: cannot be read: No such file"):
        model_digest(checkpoint)
    folder = make_folder(tmp_path / "m", shards=3)
    checkpoint = open_checkpoint(folder)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00003\.safetensors"):
        model_digest(checkpoint)
