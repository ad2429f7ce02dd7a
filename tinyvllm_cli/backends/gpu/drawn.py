"""What is drawn for the rows of a step: where it lies on the GPU, and how it comes back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tinyvllm_cli.backends.gpu.pinned import Pinned
from tinyvllm_cli.model.parameters import Array
from tinyvllm_cli.types import MAX_TOP_LOGPROBS, StepOutput


def drawn_words(num_rows: int) -> int:
    """Words of 32 bits for so many rows: see drawn_parts."""
    return num_rows * (2 + 2 * MAX_TOP_LOGPROBS)


def drawn_parts(drawn: Any) -> dict[str, Any]:
    """What lies in i32[drawn_words(R)], on the GPU or the host: token_ids i32[R] and logprobs f32[R], which come first
    because mostly they are all that is wanted; top_ids i32 and top_logprobs f32[R, MAX_TOP_LOGPROBS]."""
    num_rows = len(drawn) // drawn_words(1)
    tops = drawn[2 * num_rows :].reshape(2, num_rows, MAX_TOP_LOGPROBS)
    return {
        "token_ids": drawn[:num_rows],
        "logprobs": drawn[num_rows : 2 * num_rows].view(np.float32),
        "top_ids": tops[0],
        "top_logprobs": tops[1].view(np.float32),
    }


class Landing:
    """Pinned memory in which what a step has drawn arrives."""

    def __init__(self, cuda: Any, drawn: Array, stream: int) -> None:
        """drawn: on the device, as drawn_parts has it; the stream's next step overwrites it."""
        self._cuda = cuda
        self._drawn = drawn
        self._stream = stream
        self._memory = Pinned(cuda, drawn.nbytes)
        self._parts = drawn_parts(self._memory.bytes.view(np.int32))
        self._bytes_without_tops = drawn.nbytes // drawn_words(1) * 2

    def copy(self, num_top: int) -> None:
        """Enqueue the copy of what was drawn, of the likeliest ids only where some are wanted."""
        nbytes = self._drawn.nbytes if num_top else self._bytes_without_tops
        kind = self._cuda.memcpyDeviceToHost
        self._cuda.memcpyAsync(self._memory.address, self._drawn.data.ptr, nbytes, kind, self._stream)
        self._memory.record(self._stream)

    def read(self, count: int, num_top: int) -> StepOutput:
        """Wait for the copy: the first `count` rows of it."""
        self._memory.wait()
        parts = self._parts
        output = StepOutput(parts["token_ids"][None, :count].copy(), parts["logprobs"][None, :count].copy())
        if num_top:
            tops = {name: parts[name][None, :count, :num_top].copy() for name in ("top_ids", "top_logprobs")}
            output = replace(output, **tops)
        return output

    def close(self) -> None:
        self._memory.close()
