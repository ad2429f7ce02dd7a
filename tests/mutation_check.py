"""Break the code in the ways that matter most, one at a time in a copy, and see that a test fails each time.

    python tests/mutation_check.py

Exit code 1 where a broken copy passes its tests, or the whole one does not.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Mutation:
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]  # those that must notice; without the default model


MUTATIONS = (
    Mutation(
        "llama3's RoPE scaling is left out",
        "tinyvllm_cli/model/rope.py",
        'rope.type == "llama3"',
        'rope.type == "other"',
        ("tests/test_rope.py", "tests/test_architectures.py"),
    ),
    Mutation(
        "rows see the tokens after them",
        "tinyvllm_cli/backends/cpu/ops.py",
        "scores.reshape(-1, t, group.length)[:, :, -t:] += CAUSAL[:t, :t]",
        "pass",
        ("tests/test_architectures.py", "tests/test_cpu_backend.py"),
    ),
    Mutation(
        "K and V go into the block before",
        "tinyvllm_cli/backends/cpu/rows.py",
        "batch.block_tables[sequence, positions // BLOCK_SIZE]",
        "batch.block_tables[sequence, np.maximum(positions - 1, 0) // BLOCK_SIZE]",
        ("tests/test_cpu_backend.py",),
    ),
    Mutation(
        "the batcher hands out a stale block table",
        "tinyvllm_cli/engine/kv_memory.py",
        "self.tables[sequence.slot, len(held) : len(held) + len(blocks)] = blocks",
        "self.tables[sequence.slot, len(held) : len(held) + len(blocks)] = sorted(blocks)[::-1]",
        ("tests/test_batcher.py", "tests/test_engine_laws.py"),
    ),
    Mutation(
        "Philox's key grows by another number",
        "tinyvllm_cli/philox.py",
        "0x9E3779B9",
        "0x9E3779B8",
        ("tests/test_sample.py",),
    ),
    Mutation(
        "EOS ends no answer",
        "tinyvllm_cli/engine/intake.py",
        "self._eos_token_ids if eos_ends else ()",
        "()",
        ("tests/test_engine.py",),
    ),
    Mutation(
        "an answer's matcher is not told of its tokens",
        "tinyvllm_cli/text/grammars.py",
        "matcher.token_ids.append(token_id)",
        "matcher.token_ids.append(0)",
        ("tests/test_grammars.py",),
    ),
    Mutation(
        "EOS is not masked before min_tokens",
        "tinyvllm_cli/engine/sampling.py",
        "prompt_len + params.min_tokens",
        "prompt_len",
        ("tests/test_sampling.py",),
    ),
)


def passes(folder: Path, tests: tuple[str, ...]) -> bool:
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-m", "not model", *tests]
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if run.returncode not in (0, 1):
        sys.exit(f"the tests could not run:\n{run.stdout}{run.stderr}")
    return run.returncode == 0


def main() -> None:
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name in ("tinyvllm_cli", "tests"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        if not passes(folder, tuple(sorted({test for mutation in MUTATIONS for test in mutation.tests}))):
            sys.exit("the tests fail before anything is broken")
        for mutation in MUTATIONS:
            path = folder / mutation.file
            text = path.read_text()
            if text.count(mutation.old) != 1:
                sys.exit(f"{mutation.file} holds {mutation.old!r} {text.count(mutation.old)} times, wanted once")
            path.write_text(text.replace(mutation.old, mutation.new))
            survived = passes(folder, mutation.tests)
            path.write_text(text)
            failed |= survived
            print(f"{'SURVIVED' if survived else 'noticed '}  {mutation.name}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
