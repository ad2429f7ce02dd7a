"""The lockstep names the op that is wrong and no other, within tolerances that rounding keeps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from architectures import ARCHITECTURES
from broken_ops import OPS, broken
from emulated_cuda import Runtime
from gpu_subject import TINY, gpu_backend
from gpu_tools import DTYPES, NUMPY_DTYPE
from tiny import make_tiny_model

from tinyvllm_cli.backends.gpu import ops
from tinyvllm_cli.backends.gpu.parity import Comparison, compare_arrays, compare_prompts, worst_by_op
from tinyvllm_cli.backends.gpu.tolerance import ROUNDOFF
from tinyvllm_cli.config import DtypeName
from tinyvllm_cli.model.checkpoint import open_checkpoint


def lockstep(folder: Path, dtype: DtypeName, lengths: tuple[int, ...], module: Any = ops) -> list[Comparison]:
    ids = np.random.default_rng(3).integers(8, 264, max(lengths)).tolist()
    with closing(gpu_backend(open_checkpoint(folder), dtype=dtype, max_batch_tokens=128, num_blocks=20)) as gpu:
        return compare_prompts(gpu, [ids[:length] for length in lengths], 2, module)


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("name", "dtype"), [(name, DTYPES[index % 2]) for index, name in enumerate(ARCHITECTURES)], ids=str
)
def test_sound_ops_are_within_their_tolerances_and_not_far_below(
    name: str, dtype: DtypeName, cuda: Runtime, tmp_path: Path
):
    folder = make_tiny_model(tmp_path, **ARCHITECTURES[name] | TINY)
    worst = worst_by_op(lockstep(folder, dtype, (37, 90)))
    assert list(worst) == OPS
    assert not [f"{op}: {found}" for op, found in worst.items() if not found.ok]
    rounding = ["qkv_rope_write", "attention", "gate_up_silu", "norm_lm_head"]
    assert all(worst[op].ratio > 0.1 for op in rounding), "a tolerance that nothing comes near finds no fault"


# ---------------------------------------------------------------- faults


def on_host(device: Any, array: Any) -> np.ndarray:
    """The memory of a device array, once all that was enqueued has run."""
    device.stream.synchronize()
    return array.view(np.ndarray)


def one_element(op: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
    """One element of the result is another."""
    result = op(device, *args, **kwargs)
    if len(result):  # a step samples no row
        host = on_host(device, result)
        host[(-1,) * host.ndim] = np.abs(host.astype(np.float32)).max() * 1.05
    return result


def row_left_out(product_add: Any, device: Any, x: Any, h: Any, **kwargs: Any) -> None:
    before = on_host(device, x)[-1].copy()
    product_add(device, x, h, **kwargs)
    on_host(device, x)[-1] = before


def term_left_out(product_add: Any, device: Any, x: Any, h: Any, **kwargs: Any) -> None:
    kept = on_host(device, h).copy()
    on_host(device, h)[:, -1] = 0
    product_add(device, x, h, **kwargs)
    on_host(device, h)[:] = kept


def last_key_unseen(attention: Any, device: Any, q: Any, cache: Any, rows: Any, *, layer: int) -> Any:
    blocks = on_host(device, cache.blocks)
    kept = blocks[:, layer].copy()
    blocks[:, layer, :, :, 5] = 0
    h = attention(device, q, cache, rows, layer=layer)
    on_host(device, cache.blocks)[:, layer] = kept
    return h


def position_behind(write: Any, device: Any, *args: Any, rope: Any, **kwargs: Any) -> Any:
    kept = [on_host(device, table).copy() for table in rope]
    for table in rope:
        on_host(device, table)[1:] = on_host(device, table)[:-1].copy()
    q = write(device, *args, rope=rope, **kwargs)
    for table, values in zip(rope, kept, strict=True):
        on_host(device, table)[:] = values
    return q


def past_overwritten(write: Any, device: Any, x: Any, cache: Any, rows: Any, *, layer: int, **kwargs: Any) -> Any:
    q = write(device, x, cache, rows, layer=layer, **kwargs)
    if on_host(device, rows.positions)[0]:  # not the first step
        on_host(device, cache.blocks)[1, layer, 1, 0, 0, 0] += 1
    return q


def other_token(embed: Any, device: Any, table: Any, rows: Any) -> Any:
    """Of the rows whose token the step brings."""
    token_ids = on_host(device, rows.token_ids)
    token_ids[:] = np.where(token_ids < 0, token_ids, token_ids ^ 1)
    return embed(device, table, rows)


def next_token(sample: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
    token_ids, logprobs = sample(device, *args, **kwargs)
    on_host(device, token_ids)[:] ^= 1
    return token_ids, logprobs


def unnormed_logprob(sample: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
    token_ids, logprobs = sample(device, *args, **kwargs)
    on_host(device, logprobs)[:] += np.float32(1e-4)
    return token_ids, logprobs


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("op", "spoil", "output"),
    [
        ("embed", other_token, "x"),
        ("qkv_rope_write", position_behind, "q"),
        ("qkv_rope_write", past_overwritten, "V"),
        ("attention", last_key_unseen, "h"),
        ("attention", one_element, "h"),
        ("out_proj_add", row_left_out, "x"),
        ("out_proj_add", term_left_out, "x"),
        ("gate_up_silu", one_element, "h"),
        ("down_proj_add", term_left_out, "x"),
        ("norm_lm_head", one_element, "logits"),
        ("sample", next_token, "token ids"),
        ("sample", unnormed_logprob, "logprobs"),
    ],
)
def test_a_faulty_op_is_named_and_no_other(
    op: str, spoil: Callable[..., Any], output: str, cuda: Runtime, tmp_path: Path
):
    folder = make_tiny_model(tmp_path, **TINY)
    faults = [found for found in lockstep(folder, "bfloat16", (7, 40), broken(op, spoil, ops)) if not found.ok]
    assert {fault.op for fault in faults} == {op}
    assert output in {fault.output for fault in faults}


# ---------------------------------------------------------------- comparing


def test_the_worst_place_is_the_one_furthest_beyond_its_own_tolerance():
    wanted = np.zeros((2, 3), np.float32)
    found = np.array([[0, 5, 0], [0.5, 0, 0]], np.float32)
    allowed = np.array([[1, 10, 1], [0.25, 1, 1]])
    worst = compare_arrays("op", "x", 3, found, wanted, allowed)
    assert (worst.index, worst.error, worst.tolerance, worst.ok) == ((1, 0), 0.5, 0.25, False)
    assert str(worst) == "error 0.5, tolerance 0.25 (x of layer 3 at [1, 0])"


@pytest.mark.parametrize(
    ("found", "wanted", "ok"),
    [
        (np.nan, np.nan, True),
        (np.inf, np.inf, True),
        (np.nan, 1, False),
        (1, np.nan, False),
        (np.inf, -np.inf, False),
        (np.inf, 1, False),
        (2, 1, True),
        (2.5, 1, False),
    ],
)
def test_what_is_no_number_equals_only_itself(found, wanted, ok):
    arrays = (np.array([1, value], np.float32) for value in (found, wanted))
    assert compare_arrays("op", "x", None, *arrays, np.float32(1)).ok is ok


def test_without_tolerance_only_equals_are_fine():
    ids = np.array([3, 4], np.int32)
    assert compare_arrays("op", "ids", None, ids, ids, 0).ok
    assert compare_arrays("op", "ids", None, ids, ids + 1, 0).ratio == np.inf


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-6, 1e-3, 1, 1e4])
def test_roundoff_is_the_greatest_error_of_rounding(dtype, size):
    values = (size * np.random.default_rng(0).standard_normal(10**5)).astype(np.float32)
    errors = np.abs(values.astype(NUMPY_DTYPE[dtype]).astype(np.float32) - values).astype(np.float64)
    allowed = ROUNDOFF[dtype].of(values.astype(np.float64))
    assert (errors <= allowed).all()
    assert (errors > 0.9 * allowed).any()
