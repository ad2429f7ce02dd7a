"""Logits that transformers gives on a GPU, for tests/test_gpu_models.py."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import transformers


def logits(
    folder: Path, prompts: Sequence[list[int]], dtype: str, device: str = "cuda"
) -> list[npt.NDArray[np.float32]]:
    """Float32 logits [tokens, V] of every position of each prompt, computed alone; dtype: of all weights and sums."""
    torch.set_float32_matmul_precision("highest")  # no TF32 where float32 is asked for
    transformers.logging.set_verbosity_error()
    attention = "eager" if dtype == "float32" else "sdpa"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation=attention
    ).to(device)
    with torch.inference_mode():
        return [model(torch.tensor([ids], device=device)).logits[0].float().cpu().numpy() for ids in prompts]
