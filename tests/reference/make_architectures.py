"""Store the logits that transformers gives for the tiny models of tests/architectures.py: tests/data/architectures.npz.

Run with the project's `reference` extra installed: python tests/reference/make_architectures.py
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

TESTS = Path(__file__).parent.parent
sys.path.insert(0, str(TESTS))

from architectures import ARCHITECTURES, prompts  # noqa: E402
from tiny import make_tiny_model  # noqa: E402


def reference_logits(folder: Path) -> np.ndarray:
    """Float32 logits [prompts, V] of the last row of each prompt, computed alone."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return np.stack([model(torch.tensor([ids])).logits[0, -1].numpy() for ids in prompts()])


def main() -> None:
    stored = {"versions": np.array([f"torch {torch.__version__}", f"transformers {transformers.__version__}"])}
    for name, arguments in ARCHITECTURES.items():
        with tempfile.TemporaryDirectory() as folder:
            stored[name] = reference_logits(make_tiny_model(Path(folder), **arguments))
    np.savez_compressed(TESTS / "data" / "architectures.npz", **stored)


if __name__ == "__main__":
    main()
