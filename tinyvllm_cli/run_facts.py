"""What a run states about itself: the facts of its record, and the three lines it starts with."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyvllm_cli import __version__
from tinyvllm_cli.backends.machine import available_cpus
from tinyvllm_cli.config import KVDtypeName
from tinyvllm_cli.io.constraints import as_field
from tinyvllm_cli.io.fields import shown
from tinyvllm_cli.io.prompts import Defaults
from tinyvllm_cli.io.scan import Scan
from tinyvllm_cli.io.source import Source
from tinyvllm_cli.types import GREEDY_BELOW, BackendFacts, SamplingParams

if TYPE_CHECKING:
    from tinyvllm_cli.load import LoadedModel

LIBRARIES = ("click", "jinja2", "llguidance", "ml-dtypes", "msgspec", "numpy", "threadpoolctl", "tokenizers")


def run_facts(
    command: Sequence[str], options: Mapping[str, Any], origins: Mapping[str, str], source: Source, scan: Scan | None
) -> dict[str, Any]:
    """What is known before the model is: for the record. Digest and lines are those of a regular input file."""
    return {
        "tinyvllm": __version__,
        "command": list(command),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "pid": os.getpid(),
        "input": {
            "name": source.name,
            "sha256": None if scan is None else scan.sha256,
            "lines": None if scan is None else scan.lines,
        },
        "options": {name: {"value": value, "from": origins.get(name, "default")} for name, value in options.items()},
        "machine": machine_facts(),
    }


def machine_facts() -> dict[str, Any]:
    """The machine, and the versions on it."""
    return {
        "platform": platform.platform(),
        "processor": platform.machine(),
        "cpu_model": _cpu_model(),
        "cpus": os.cpu_count(),
        "available_cpus": available_cpus(),
        "python": platform.python_version(),
        "libraries": {name: _version(name) for name in LIBRARIES},
    }


def model_facts(loaded: LoadedModel) -> dict[str, Any]:
    """What the model adds to the record."""
    checkpoint = loaded.checkpoint
    return {
        "model": {
            "name": loaded.files.name,
            "path": str(loaded.files.path),
            "source": loaded.files.source,
            "commit": loaded.files.commit,
            "architecture": checkpoint.config.architecture,
            "format": checkpoint.format,
            "quantization": checkpoint.quantization,
        },
        "backend": backend_facts(loaded.backend.facts),
        "engine": asdict(loaded.config),
        "limits": asdict(loaded.backend.limits),
    }


def answer_facts(loaded: LoadedModel, defaults: Defaults) -> dict[str, Any]:
    """How prompts are given and answered where a line says nothing else, for the record."""
    template = loaded.codec.template
    facts: dict[str, Any] = {"answers": _answer_fields(defaults.params), "chat_template": None}
    if template is not None:
        facts["chat_template"] = {
            "in_force": not defaults.raw,
            "sha256": hashlib.sha256(template.source.encode()).hexdigest(),
            "source": template.source,
        }
    return facts


def _answer_fields(params: SamplingParams) -> dict[str, Any]:
    """As a line gives them."""
    values = asdict(params)
    del values["constraint"]
    if params.constraint is not None:
        name, value = as_field(params.constraint)
        values[name] = value
    return values


def backend_facts(facts: BackendFacts) -> dict[str, Any]:
    """What computes, flat: name, device, dtype, bytes of K and V a token, and what the backend says of itself."""
    return {name: value for name, value in asdict(facts).items() if name != "details"} | dict(facts.details)


def model_line(loaded: LoadedModel) -> str:
    checkpoint, limits, facts = loaded.checkpoint, loaded.backend.limits, loaded.backend.facts
    commit = f", commit {loaded.files.commit[:12]}" if loaded.files.commit else ""
    stored = checkpoint.quantization or checkpoint.config.dtype
    return (
        f"model:   {loaded.files.name}{commit}, {checkpoint.config.architecture}, {stored} weights as {facts.dtype} on"
        f" the {facts.device}{kv_note(loaded.config.kv_dtype)}, {limits.max_slots} slots,"
        f" context {limits.max_seq_len}, loaded in {loaded.load_s:.1f} s"
    )


def kv_note(kv_dtype: KVDtypeName) -> str:
    """What a line about a model says of its KV cache, after what it says of the weights."""
    return ", K and V in FP8" if kv_dtype == "fp8" else ""


def prompts_line(loaded: LoadedModel, source: Source, scan: Scan | None, *, raw: bool) -> str:
    return f"prompts: {input_name(source, scan)}; {loaded.codec.describe_prompts(raw=raw)}"


def input_name(source: Source, scan: Scan | None) -> str:
    """With the number of its requests, where that is known."""
    return source.name if scan is None else f"{source.name}, {scan.requests} request{'s' * (scan.requests != 1)}"


def answers_line(loaded: LoadedModel, output: str, params: SamplingParams, *, seed: int, model_sampling: bool) -> str:
    """What a line gets that says nothing itself, and whether the sampling of generation_config.json is in force."""
    how = "greedy" if params.temperature < GREEDY_BELOW else f"temperature {params.temperature:g}, run seed {seed}"
    plain = _answer_fields(SamplingParams())
    more = [
        f", {name} {shown(value)}"
        for name, value in _answer_fields(params).items()
        if (name not in plain or value != plain[name]) and name not in {"temperature", "max_tokens"}
    ]
    suggested = ", ".join(f"{name} {value:g}" for name, value in loaded.checkpoint.generation.sampling.items())
    if suggested:
        holds = "used" if model_sampling else "not used without --model-sampling"
        note = f"; generation_config.json suggests {suggested}: {holds}"
    else:
        note = "; the model suggests no sampling, so --model-sampling changes nothing" if model_sampling else ""
    limit = f"at most {params.max_tokens} tokens{''.join(more)}"
    return f"answers: {output}; where a line says nothing else: {how}, {limit}{note}"


def _cpu_model() -> str | None:
    """As the kernel calls it; None where nothing names it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or None


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None
