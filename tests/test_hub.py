"""A model's name leads to its files, or to one line that says where else to look."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tinyvllm_cli.errors import ModelError, UsageError
from tinyvllm_cli.model import hub_repo
from tinyvllm_cli.model.catalogue import CATALOGUE, DEFAULT_MODEL
from tinyvllm_cli.model.hub import ModelFiles, cache_dir, find_model


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder and cache, and a Hub that must not be asked."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"the Hub was asked for {args}")

    monkeypatch.setattr(hub_repo, "fetch", refuse)
    monkeypatch.setattr(hub_repo, "find_cached", refuse)
    monkeypatch.setenv("TINYVLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TINYVLLM_OFFLINE", "1")
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return here


def test_a_folder_or_gguf_file_is_taken_where_it_stands(here):
    (here / "org" / "model").mkdir(parents=True)
    (here / "org" / "model" / "config.json").write_text("{}")
    (here / "m.gguf").write_bytes(b"GGUF and more")
    assert find_model("org/model") == ModelFiles(Path("org/model"), "org/model", "folder")
    assert find_model(str(here / "org/model")).path == here / "org/model"
    assert find_model("m.gguf") == ModelFiles(Path("m.gguf"), "m.gguf", "file")


def test_a_broken_link_is_said_to_be_one(here):
    (here / "m.gguf").symlink_to("gone.gguf")
    with pytest.raises(ModelError, match=r"cannot read m\.gguf: No such file"):
        find_model("m.gguf")


@pytest.mark.parametrize("name", ["a" * 300, "./" + "a" * 300, "a" * 300 + ".gguf"])
def test_a_name_too_long_for_a_path_is_a_name_like_others(here, name):
    with pytest.raises(ModelError, match=r"there is no (model|file or folder) "):
        find_model(name)


def test_the_home_folder_is_known(here, monkeypatch):
    monkeypatch.setenv("HOME", str(here))
    (here / "m.gguf").write_bytes(b"GGUF")
    assert find_model("~/m.gguf").path == here / "m.gguf"


def test_a_name_with_a_tilde_behind_a_folder_is_no_home(here, monkeypatch):
    (here / "~").mkdir()
    (here / "~" / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.setenv("HOME", "/no/such/home")
    assert find_model("./~/m.gguf").path.samefile(here / "~" / "m.gguf")


def test_a_folder_that_is_no_model_does_not_stand_before_the_catalogue(here):
    (here / DEFAULT_MODEL).mkdir()
    with pytest.raises(ModelError, match="TINYVLLM_OFFLINE"):  # the catalogue's answer
        find_model(DEFAULT_MODEL)
    (here / DEFAULT_MODEL / "config.json").write_text("{}")
    assert find_model(DEFAULT_MODEL).source == "folder"


@pytest.mark.parametrize(
    "name", ["./org", "/no/such/model", "org/model.gguf", "~/no-such", "~no-user/x", "a/b/c", "x.gguf"]
)
def test_a_path_that_does_not_exist_is_never_looked_up_on_the_hub(here, name):
    with pytest.raises(ModelError, match=f"no file or folder {name}"):
        find_model(name)


@pytest.mark.parametrize(("name", "nearest"), [("./my-modle", "my-model"), ("lama.gguf", "llama.gguf")])
def test_a_path_that_does_not_exist_names_the_nearest_that_does(here, name, nearest):
    (here / "my-model").mkdir()
    (here / "llama.gguf").touch()
    with pytest.raises(ModelError, match=rf"did you mean {nearest}\?"):
        find_model(name)


@pytest.mark.parametrize(("name", "near"), [("smollm", True), ("smollm2-135m-instrct", True), ("gpt2", False)])
def test_a_name_that_the_catalogue_lacks_gets_its_list_and_the_nearest(here, name, near):
    with pytest.raises(ModelError) as raised:
        find_model(name)
    message = str(raised.value)
    assert all(known in message for known in (name, *CATALOGUE, "org/name"))
    assert (f"did you mean {DEFAULT_MODEL}?" in message) == near


def test_what_is_there_but_no_model_is_refused_with_the_reason(here):
    (here / "empty").mkdir()
    (here / "gguf").mkdir()
    (here / "gguf" / "a.gguf").touch()
    (here / "text.txt").write_text("hello")
    (here / "model.safetensors").write_bytes(bytes(9))
    for name, reason in {
        "empty": "config.json",
        "gguf": "give the file: gguf/a.gguf",
        "text.txt": "not a GGUF file",
        "model.safetensors": "give the folder",
        "/dev/null": "not a GGUF file",
    }.items():
        with pytest.raises(ModelError, match=reason):
            find_model(name)


def test_a_revision_needs_a_hub_model(here):
    (here / "m.gguf").write_bytes(b"GGUF")
    for name in ("m.gguf", DEFAULT_MODEL):
        with pytest.raises(UsageError, match="revision v2 needs a model of the Hub"):
            find_model(name, revision="v2")


def test_a_model_that_is_not_here_is_not_fetched_unasked(here, monkeypatch):
    monkeypatch.delenv("TINYVLLM_OFFLINE")
    with pytest.raises(ModelError, match=f"tinyvllm models pull {DEFAULT_MODEL}"):
        find_model(DEFAULT_MODEL, fetch=False)


@given(name=st.one_of(st.text(max_size=30), st.text("~./\\-_:aG\0\n é", max_size=12), st.text("a/", min_size=300)))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
def test_whatever_the_name_the_error_is_one_line(here, monkeypatch, name):
    monkeypatch.setattr(hub_repo, "find_cached", lambda *args, **options: None)
    with pytest.raises(ModelError) as raised:
        find_model(name, fetch=False)
    assert "\n" not in str(raised.value)


def test_the_cache_is_where_the_environment_says_else_the_platforms(monkeypatch):
    monkeypatch.setenv("TINYVLLM_CACHE", "~/there")
    assert cache_dir() == Path.home() / "there"
    monkeypatch.setenv("TINYVLLM_CACHE", "")
    assert cache_dir().name == "tinyvllm"
    assert cache_dir().is_absolute()


def test_a_user_without_a_home_is_told_of_the_variable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TINYVLLM_CACHE", "~nobody-of-this-name/cache")
    with pytest.raises(ModelError, match="set TINYVLLM_CACHE"):
        cache_dir()
