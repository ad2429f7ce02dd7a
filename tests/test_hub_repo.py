"""A Hub id gives the files that a model is read from and no others, and an error that says what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hub_server import COMMIT, FakeHub, serve_hub
from huggingface_hub import constants

from tinyvllm_cli.errors import ModelError
from tinyvllm_cli.model.hub import ModelFiles, find_model
from tinyvllm_cli.model.inventory import known_models

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = json.dumps({"weight_map": {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[0]}}).encode()
TEXT = {"config.json": b"{}", "tokenizer.json": b"{ }", "tokenizer_config.json": b"{  }", "chat_template.jinja": b"x"}
OTHERS = {"consolidated.safetensors": b"1", "pytorch_model.bin": b"2", "original/params.json": b"3", "README.md": b"4"}
SHARDED = {**TEXT, **OTHERS, "model.safetensors.index.json": INDEX, SHARDS[0]: b"s" * 3000, SHARDS[1]: b"t" * 2000}
GGUF = {"tiny-Q4_0.gguf": b"GGUF4", "tiny-Q8_0.gguf": b"GGUF8", "README.md": b"4"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with serve_hub() as hub:
        # The library reads its environment when it is first imported.
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("TINYVLLM_CACHE", str(tmp_path / "cache"))
        monkeypatch.delenv("TINYVLLM_OFFLINE", raising=False)
        monkeypatch.chdir(tmp_path)
        hub.repos = {"org/sharded": dict(SHARDED), "org/gguf": dict(GGUF), "org/gated": dict(SHARDED)}
        hub.gated = {"org/gated"}
        yield hub


def find(name: str, lines: list[str] | None = None, **options: object) -> ModelFiles:
    return find_model(name, report=[].append if lines is None else lines.append, **options)


def unplug(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the Hub away: its names stay, nobody answers."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"
    )


def test_the_files_that_are_needed_come_once_and_no_others(hub, capfd):
    lines: list[str] = []
    found = find("org/sharded", lines)
    needed = {*TEXT, "model.safetensors.index.json", *SHARDS}
    assert sorted(hub.downloads) == sorted(needed)
    assert {path.name for path in found.path.iterdir()} == needed
    assert all((found.path / name).read_bytes() == SHARDED[name] for name in needed)
    assert found == ModelFiles(found.path, "org/sharded", "hub", COMMIT)
    assert len(lines) == 1
    assert all(part in lines[0] for part in ("org/sharded", "5.", "kB", hub.url, COMMIT[:12]))
    assert find("org/sharded", lines) == found
    assert len(lines) == 1
    assert len(hub.downloads) == len(needed)
    assert capfd.readouterr() == ("", "")


def test_one_weight_file_is_taken_without_an_index(hub):
    hub.repos["org/one"] = {**TEXT, **OTHERS, "model.safetensors": b"w"}
    assert {path.name for path in find("org/one").path.iterdir()} == {*TEXT, "model.safetensors"}


def test_one_gguf_file_of_a_repository(hub):
    found = find("org/gguf/tiny-Q8_0.gguf")
    assert found.path.read_bytes() == b"GGUF8"
    assert found.path.name == "tiny-Q8_0.gguf"
    assert hub.downloads == ["tiny-Q8_0.gguf"]
    assert (found.source, found.commit) == ("hub", COMMIT)


def test_a_file_of_any_folder_and_ending_belongs_to_its_commit(hub):
    name = "snapshots/deep/tiny.GGUF"
    hub.repos["org/deep"] = {name: b"GGUF"}
    found = find(f"org/deep/{name}")
    assert found == find(f"org/deep/{name}", fetch=False)
    assert (found.path.read_bytes(), found.commit) == (b"GGUF", COMMIT)


def test_a_cache_that_is_no_folder_is_named(hub, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=f"the Hub cache cannot be read: .*{tmp_path}/file"):
        known_models()


def test_a_token_is_sent_where_there_is_one(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    find("org/sharded")
    assert hub.tokens == {"Bearer hf_secret"}


@pytest.mark.parametrize("how", ["TINYVLLM_OFFLINE", "HF_HUB_OFFLINE", "unplugged", "fetch=False"])
def test_a_whole_copy_in_the_cache_needs_no_network(hub, monkeypatch, how):
    lines: list[str] = []
    names = ("org/sharded", "org/gguf/tiny-Q4_0.gguf")
    found = [find(name) for name in names]
    before = len(hub.downloads)
    if how == "TINYVLLM_OFFLINE":
        monkeypatch.setenv(how, "1")
    elif how == "HF_HUB_OFFLINE":
        monkeypatch.setattr(constants, how, True)
    unplug(hub, monkeypatch)
    assert [find(name, lines, fetch=how != "fetch=False") for name in names] == found
    assert [find(name, revision=COMMIT) for name in names] == found
    assert len(hub.downloads) == before
    assert len(lines) == (2 if how == "unplugged" else 0)
    assert all("Hub cache" in line for line in lines)


def test_half_a_copy_in_the_cache_is_not_a_model(hub, monkeypatch):
    path = find("org/sharded").path
    unplug(hub, monkeypatch)
    for name in (SHARDS[1], "tokenizer.json", "model.safetensors.index.json"):
        aside = path / name
        target = aside.readlink()
        aside.unlink()
        with pytest.raises(ModelError, match="org/sharded, and no whole copy is in the Hub cache: the Hub could not"):
            find("org/sharded")
        aside.symlink_to(target)
    assert find("org/sharded").path == path


@pytest.mark.parametrize(
    ("name", "options", "parts"),
    [
        ("org/gated", {}, ("accept its terms at {url}/org/gated", "HF_TOKEN")),
        ("org/missing", {}, ("{url}/org/missing does not exist", "HF_TOKEN", "model folder")),
        ("org/sharded", {"revision": "v9"}, ("no revision v9",)),
        ("org/gguf", {}, ("org/gguf/tiny-Q4_0.gguf", "name one")),
        ("org/gguf/tiny-Q8_1.gguf", {}, ("no file tiny-Q8_1.gguf", "did you mean org/gguf/tiny-Q8_0.gguf?")),
        ("org/sharded/a.gguf", {}, ("no file a.gguf", "none")),
        ("org/sharded", {"fetch": False}, ("not on this machine", "tinyvllm models pull org/sharded")),
        ("org--x/y", {}, ("org--x/y/config.json is no name",)),
        ("org/gguf/../x.gguf", {"fetch": False}, ("org/gguf/../x.gguf is no name",)),
        ("org/gguf//x.gguf", {"fetch": False}, ("org/gguf//x.gguf is no name",)),
        ("org/gguf/../x.gguf", {}, ("no file ../x.gguf",)),
    ],
)
def test_a_refusal_says_what_to_do(hub, name, options, parts):
    with pytest.raises(ModelError) as raised:
        find(name, **options)
    message = str(raised.value)
    assert "\n" not in message
    assert not [part for part in parts if part.format(url=hub.url) not in message]


@pytest.mark.parametrize(
    ("files", "parts"),
    [
        ({**TEXT, "pytorch_model.bin": b"x"}, ("model.safetensors", "pytorch_model.bin")),
        ({"README.md": b"x"}, ("config.json", "README.md")),
        ({name: SHARDED[name] for name in SHARDED if name != SHARDS[0]}, ("lacks", SHARDS[0])),
        ({**TEXT, "model.safetensors.index.json": b"[]"}, ("weight_map",)),
        ({**TEXT, "model.safetensors.index.json": b"\xff{"}, ("weight_map",)),
    ],
)
def test_a_repository_that_is_no_model_is_refused_before_its_weights_come(hub, files, parts):
    hub.repos["org/odd"] = files
    with pytest.raises(ModelError) as raised:
        find("org/odd")
    assert not [part for part in ("org/odd", *parts) if part not in str(raised.value)]
    assert not [name for name in hub.downloads if not name.endswith("index.json")]


def test_without_room_nothing_is_downloaded(hub, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=5_000))
    with pytest.raises(ModelError, match=r"org/sharded .* needs 5\.\d kB of disk and .* has 5\.0 kB left: .*HF_HOME"):
        find("org/sharded")
    assert hub.downloads == ["model.safetensors.index.json"]
