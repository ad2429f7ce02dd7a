"""How a run goes on where an earlier one ended: what it takes over, and what it says when the two differ."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyvllm_cli.engine.fingerprint import Answerer
from tinyvllm_cli.io.fields import shown
from tinyvllm_cli.model.digest import model_digest

if TYPE_CHECKING:
    from tinyvllm_cli.load import Prepared

Record = Mapping[str, Any]


def frozen_date(record: Record | None) -> datetime:
    """That of the earlier run, so that its answers and the ones to come show one date; now, where there is none."""
    with suppress(ValueError, TypeError, KeyError, OverflowError):
        if record is not None:
            date = datetime.fromisoformat(record["frozen_date"])
            return date if date.tzinfo else date.astimezone()
    return datetime.now().astimezone().replace(microsecond=0)


def answerer(prepared: Prepared, *, system: str | None, seed: int, date: str | None) -> Answerer:
    """What the answers of a run depend on besides its lines."""
    return Answerer(
        model=model_digest(prepared.text.checkpoint),
        dtype=prepared.config.dtype,
        kv_dtype=prepared.config.kv_dtype,
        system=system,
        date=date,
        seed=seed,
        context=prepared.config.max_model_len,
    )


def differences(
    record: Record | None, options: Mapping[str, Any], now: Answerer, telling: Sequence[str], *, path: Path | None
) -> str:
    """For people: in what the run of the record at this path was another one than a run with these options, of which
    the `telling` ones are those on which answers depend."""
    if record is None:
        return " (the run record, which would tell in what, is not there)"
    found = [
        f"{'--' + name.replace('_', '-') if len(name) > 1 else '-' + name} was {_said(before)} and is {_said(value)}"
        for name in telling
        if ((before := _option(record, name)) or None) != ((value := json.loads(json.dumps(options[name]))) or None)
    ]
    answers = record.get("answerer")
    answers = answers if isinstance(answers, Mapping) else asdict(now)
    if answers.get("system") != now.system:  # as it was read: a file of the same name may have changed
        found.append(f"--system was {_said(answers.get('system'))} and is {_said(now.system)}")
    for name, what in (("model", "the model's files"), ("dtype", "the dtype"), ("date", "the frozen date")):
        if answers.get(name) != getattr(now, name):
            found.append(f"{what} changed")
    if not found:
        files = ["--template"] if str(options.get("template")).startswith("@") else []
        files += ["--json-schema"] if options.get("json_schema") is not None else []
        file = f", or the file of {' or '.join(files)}," if files else ""
        same = f"all options are as in the run record {path}"
        return f" ({same}, so it is the line{file} that changed, unless that record is another run's)"
    return f" ({'; '.join(found)})"


def _said(value: Any) -> str:
    return "not given" if value is None or value == [] else shown(value)


def _option(record: Record, name: str) -> Any:
    try:
        return record["options"][name]["value"]
    except (KeyError, TypeError):
        return None


def resume_command(command: Sequence[str]) -> str:
    """The command line that goes on with what `command` began."""
    words = [word for word in command[1:] if word not in {"--overwrite", "--resume"}]
    return shlex.join(["tinyvllm", *words[:1], "--resume", *words[1:]])  # not behind a "--" that ends the options
