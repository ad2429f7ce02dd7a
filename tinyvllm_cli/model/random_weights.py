"""Models of random weights: the shape of a published one, and tensors that are a pure function of a seed.

Element i of tensor n (in the order of their names) is one word of Philox4x32-10, word i % 4 for the key (seed, n) and
the counter (i // 4, 0, 0, 0), as a signed integer times SCALE, rounded to float32 and then to bfloat16: uniform, with a
deviation of 0.02, under which the logits of any depth stay finite. Norms are ones and biases zeros. Where a tensor lies
and in how many pieces it is made changes none of its bits; cuda/random.cu makes the same ones on a GPU.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import msgspec
import numpy as np
import numpy.typing as npt

from tinyvllm_cli.config import DtypeName, ModelConfig
from tinyvllm_cli.model import hf_config
from tinyvllm_cli.model.checkpoint import Checkpoint
from tinyvllm_cli.model.generation import GenerationDefaults
from tinyvllm_cli.model.presets import PRESETS, HFConfig
from tinyvllm_cli.model.weights.layout import tensor_shapes
from tinyvllm_cli.model.weights.source import Array
from tinyvllm_cli.philox import philox4x32_10

DTYPE: DtypeName = "bfloat16"  # in which the weights are stored, as those of the published models
DEVIATION = 0.02
SCALE = np.float32(DEVIATION * math.sqrt(3) * 2.0**-31)  # of a signed word: uniform in [-a, a) deviates by a / sqrt(3)
CHUNK = 1 << 14  # elements made at once: their 64-bit lanes stay in a core's cache

BF16 = np.dtype(ml_dtypes.bfloat16)


def random_config(name: str) -> ModelConfig:
    """The model of a name of PRESETS; KeyError for another one."""
    return read_preset(PRESETS[name])


def read_preset(config: HFConfig) -> ModelConfig:
    """The model that a config.json with these keys describes, with weights of DTYPE. Errors as of a file's."""
    keys = msgspec.convert(dict(config), hf_config.HFConfig)
    return replace(hf_config.model_config(keys, Path("config.json")), dtype=DTYPE)


def random_checkpoint(name: str, seed: int = 0) -> Checkpoint:
    """A name of PRESETS in the place of a model's files. Its path is the name alone: nothing lies there."""
    config = random_config(name)
    return Checkpoint(
        path=Path(name),
        source=Path(name),
        format="random",
        quantization=None,
        config=config,
        tensors=RandomTensors(config, seed),
        generation=GenerationDefaults(eos_token_ids(PRESETS[name]), {}),
    )


def eos_token_ids(config: HFConfig) -> tuple[int, ...]:
    """Ascending; of one id or several."""
    ids = config["eos_token_id"]
    return (ids,) if isinstance(ids, int) else tuple(sorted(ids))


class RandomTensors:
    """TensorSource that makes a tensor where it is read."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        """seed: 0 to 2^31 - 1."""
        self.seed = seed
        self._shapes = tensor_shapes(config)
        self._numbers = {name: number for number, name in enumerate(sorted(self._shapes))}

    @property
    def nbytes(self) -> int:
        return sum(BF16.itemsize * math.prod(shape) for shape in self._shapes.values())

    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> DtypeName:  # noqa: ARG002
        return DTYPE

    def number(self, name: str) -> int:
        """That a tensor's values are drawn with."""
        return self._numbers[name]

    def read(self, name: str) -> Array:
        shape = self._shapes[name]
        if len(shape) == 1:
            return np.full(shape, 0 if name.endswith(".bias") else 1, BF16)
        return random_values(self.seed, self.number(name), math.prod(shape)).reshape(shape)

    def close(self) -> None:
        """Nothing is held."""


def random_values(seed: int, tensor: int, count: int) -> Array:
    """The first elements of a tensor: bfloat16[count]."""
    values = np.empty(count, BF16)
    for start in range(0, count, CHUNK):
        values[start : start + CHUNK] = _chunk(seed, tensor, start, min(CHUNK, count - start))
    return values


def _chunk(seed: int, tensor: int, start: int, count: int) -> npt.NDArray[np.float32]:
    """Elements from `start`, a multiple of 4, on: f32[count]."""
    counter = np.zeros((-(-count // 4), 4), np.uint32)
    counter[:, 0] = np.arange(start // 4, start // 4 + len(counter), dtype=np.uint32)
    words = philox4x32_10(counter, np.array([seed, tensor], np.uint32)).reshape(-1)[:count]
    values: npt.NDArray[np.float32] = words.view(np.int32).astype(np.float32) * SCALE
    return values
