"""What the GPU backend refuses before it starts: a vocabulary too large for its kernels, a library too old for it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tinyvllm_cli.backends.gpu.checks import SMALL
from tinyvllm_cli.backends.gpu.kernels import kernel_sources
from tinyvllm_cli.backends.gpu.libraries import open_library
from tinyvllm_cli.backends.gpu.sample import MAX_VOCAB
from tinyvllm_cli.backends.gpu.supported import check_model
from tinyvllm_cli.errors import DeviceError, ModelError


def test_a_vocabulary_that_ranks_cannot_count_is_refused():
    """cuda/select.cuh puts the id into the lowest bits of a rank: one more would run over into the logit."""
    (bits,) = re.findall(r"ID_BITS = (\d+)", kernel_sources()["select.cuh"])
    assert 1 << int(bits) == MAX_VOCAB
    check_model(replace(SMALL, vocab_size=MAX_VOCAB))
    with pytest.raises(ModelError, match=rf"vocab_size is {MAX_VOCAB + 1}, .*at most {MAX_VOCAB}: give --backend cpu"):
        check_model(replace(SMALL, vocab_size=MAX_VOCAB + 1))


def test_a_library_without_a_function_is_too_old():
    """Said with what mends it: it is the user's packages that are wrong, not this program."""
    with pytest.raises(
        DeviceError, match=r"library nvrtc is too old \(.*nvrtcOfTomorrow.*\): run `.*install"
    ) as caught:
        open_library("nvrtc", {"nvrtcVersion": (), "nvrtcOfTomorrow": ()})
    assert "\n" not in str(caught.value)
