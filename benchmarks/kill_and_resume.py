"""Kill a run (SIGKILL) at a random moment, resume it, and compare it with one that nothing disturbed; again and again.

    python benchmarks/kill_and_resume.py
    python benchmarks/kill_and_resume.py --kills 3 --model ./my-model --input prompts.jsonl --backend gpu --slots 64

The moments are spread over the whole of a run, from the start of the process on. Other options are those of
`tinyvllm run`. Without --model it is a tiny one with random weights, without --input 200 short prompts.
What must hold after each kill: the whole lines that were there are still there, byte for byte at their place, each
request has one line, and the lines are those of the undisturbed run but for their times. Exit code 1 where not.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KILLS, LINES = 50, 200
ENDED = (0, 3)  # exit codes of a run that has come to its end


@dataclass(frozen=True)
class Round:
    """What one kill came to."""

    killed_s: float | None  # after the start; None: the run had ended before
    lines: int  # whole ones that were there
    torn: int  # bytes behind them
    resumed_s: float
    faults: list[str]


class Killer:
    """One input, one model, one set of options: runs that are killed, and one that is not."""

    def __init__(self, source: Path, model: Path | str, folder: Path, options: Sequence[str] = ()) -> None:
        self._command = [sys.executable, "-m", "tinyvllm_cli", "run", str(source), "-m", str(model), *options]
        self._folder = folder
        self._out = folder / "killed.jsonl"
        self.whole: list[dict[str, Any]] = []
        self.whole_s = 0.0

    def undisturbed(self) -> None:
        """Once, before all others."""
        out = self._folder / "whole.jsonl"
        self.whole_s = self._finish(out, "--overwrite")
        self.whole = comparable(out.read_bytes())

    def round(self, after_s: float) -> Round:
        """Begin anew, kill that run after so many seconds, resume it to its end."""
        for path in self._folder.glob(f"{self._out.name}*"):
            path.unlink()
        killed = self._kill(after_s)
        there = self._out.read_bytes() if self._out.exists() else b""
        end = there.rfind(b"\n") + 1
        resumed_s = self._finish(self._out, "--resume")
        faults = self.faults(there[:end])
        return Round(after_s if killed else None, there.count(b"\n"), len(there) - end, resumed_s, faults)

    def _kill(self, after_s: float) -> bool:
        with subprocess.Popen([*self._command, "-o", str(self._out)], stderr=subprocess.DEVNULL) as run:
            try:
                run.wait(after_s)
                return False
            except subprocess.TimeoutExpired:
                run.kill()
                return True

    def _finish(self, out: Path, how: str) -> float:
        """Seconds that the run took."""
        started = time.monotonic()
        ended = subprocess.run([*self._command, "-o", str(out), how], stderr=subprocess.PIPE, check=False)
        if ended.returncode not in ENDED:
            raise SystemExit(f"a run ended with {ended.returncode}:\n{ended.stderr.decode(errors='replace')}")
        return time.monotonic() - started

    def faults(self, kept: bytes) -> list[str]:
        """Of the resumed output. kept: the whole lines that it held before; those of them that failed come again."""
        data = self._out.read_bytes()
        answered = b"".join(line for line in kept.splitlines(keepends=True) if json.loads(line)["error"] is None)
        faults = [] if data.startswith(answered) else ["lines that were there have changed"]
        found = comparable(data)
        if len(found) != len(self.whole):
            faults.append(f"{len(found)} lines, wanted {len(self.whole)}")
        differ = [line for line, wanted in zip(found, self.whole, strict=False) if line != wanted]
        if differ:
            faults.append(f"{len(differ)} lines differ, the first one {json.dumps(differ[0])}")
        return faults


def comparable(output: bytes) -> list[dict[str, Any]]:
    """The lines in the order of the input, without what the clock decides."""
    lines = [json.loads(line) for line in output.splitlines()]
    for line in lines:
        line.get("tinyvllm", line).pop("stats")
        line.get("response", {}).get("body", {}).pop("created", None)
    return sorted(lines, key=lambda line: int(line.get("tinyvllm", line)["index"]))


def spread(kills: int, seconds: float, seed: int) -> list[float]:
    """One random moment in each of so many equal parts of the time."""
    chance = random.Random(seed)
    return [(i + chance.random()) / kills * seconds for i in range(kills)]


def write_lines(path: Path, count: int) -> None:
    """Answers that a wrong seed or a wrong place would change, of many lengths."""
    with path.open("w") as file:
        for i in range(count):
            line = {"custom_id": f"r-{i}", "prompt": f"What is {i} times 7?", "max_tokens": 4 + i % 97}
            file.write(json.dumps(line | {"temperature": 1.0, "ignore_eos": True}) + "\n")


def write_model(folder: Path) -> None:
    from tinyvllm_cli.model.presets import PRESETS
    from tinyvllm_cli.model.random_weights import RandomTensors, read_preset
    from tinyvllm_cli.random_folder import write_folder

    tiny = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
    shape = {**PRESETS["smollm2-135m"], **tiny, "num_attention_heads": 4, "num_key_value_heads": 2}
    write_folder(folder, shape, RandomTensors(read_preset(shape)), progress=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--input", type=Path)
    parser.add_argument("--model")
    options, others = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, model = options.input or folder / "in.jsonl", options.model or folder / "model"
        if options.input is None:
            write_lines(source, LINES)
        if options.model is None:
            write_model(folder / "model")
        killer = Killer(source, model, folder, others)
        killer.undisturbed()
        print(f"undisturbed: {len(killer.whole)} lines in {killer.whole_s:.1f} s; seed {options.seed}")
        print("round  killed after  lines then  torn bytes  resumed in  differences")
        faults = 0
        for number, moment in enumerate(spread(options.kills, killer.whole_s, options.seed), 1):
            found = killer.round(moment)
            killed = "too late" if found.killed_s is None else f"{found.killed_s:.2f} s"
            said = "; ".join(found.faults) or "none"
            print(
                f"{number:5}  {killed:>12}  {found.lines:10}  {found.torn:10}  {found.resumed_s:8.2f} s  {said}",
                flush=True,
            )
            faults += bool(found.faults)
        print(f"{options.kills} kills, {faults} with differences")
    sys.exit(faults > 0)


if __name__ == "__main__":
    main()
