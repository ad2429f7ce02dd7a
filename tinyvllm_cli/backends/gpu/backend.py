"""The CUDA backend: the seam of backends/base.py over the GPU's ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np

from tinyvllm_cli.backends.gpu import ops
from tinyvllm_cli.backends.gpu.cublas import Blas
from tinyvllm_cli.backends.gpu.device import Card, Device, open_card
from tinyvllm_cli.backends.gpu.drawn import Landing
from tinyvllm_cli.backends.gpu.graphs import Graphs
from tinyvllm_cli.backends.gpu.in_flight import InFlight
from tinyvllm_cli.backends.gpu.kernels import load_kernels
from tinyvllm_cli.backends.gpu.kv import KVCache
from tinyvllm_cli.backends.gpu.loading import allocate_parameters, load_weights
from tinyvllm_cli.backends.gpu.masks import Masks
from tinyvllm_cli.backends.gpu.memory import (
    Buffers,
    MemoryPlan,
    device_view,
    fit_memory,
    open_arena,
    pool_room,
    table_rooms,
)
from tinyvllm_cli.backends.gpu.nvrtc import load_nvrtc
from tinyvllm_cli.backends.gpu.packages import installed_cupy
from tinyvllm_cli.backends.gpu.pinned import PinnedRing
from tinyvllm_cli.backends.gpu.random_weights import DeviceTensors, fill_random
from tinyvllm_cli.backends.gpu.rows import Rows, Upload, resolve_rows
from tinyvllm_cli.backends.gpu.slots import Slots
from tinyvllm_cli.backends.gpu.streams import Stream
from tinyvllm_cli.backends.gpu.supported import check_held, check_model
from tinyvllm_cli.backends.gpu.tuning import is_tuned, recall, tune
from tinyvllm_cli.backends.row_layout import check_mask, within
from tinyvllm_cli.config import BLOCK_SIZE, EngineConfig, ModelConfig
from tinyvllm_cli.errors import DeviceError
from tinyvllm_cli.model.llama import forward
from tinyvllm_cli.model.parameters import Array, Parameters
from tinyvllm_cli.model.random_weights import RandomTensors
from tinyvllm_cli.model.rope import rope_tables
from tinyvllm_cli.model.weights.source import TensorSource
from tinyvllm_cli.types import F32, I32, U32, BackendFacts, Batch, Limits, SlotOptions, StepOutput

DRAWN_OUTSIDE = 1  # of the shape of a graph: draws are no part of it
CHUNK_COST = 3  # of decode steps, by which one that is no captured one takes longer
# Of the slots, the part that is filled in one step, and how many at least: the host takes 100 us for a long prompt.
ADMIT_SHARE, ADMIT_LEAST = 8, 32
REFILL_SHARE = 16  # of the slots, the part that is free when prompts come in: a step with prompts is no captured one


class GpuBackend:
    """A model on an NVIDIA GPU (backends/base.py is the contract).

    A step is checked, laid out and enqueued by the host, which then goes on; results are waited for where they are
    read. All calls come from one thread. ValueError for a bug of the caller, with nothing changed; a fault of CUDA is a
    DeviceError, of this call and of every later one.
    """

    def __init__(
        self,
        config: ModelConfig,
        fill: Callable[[Parameters, Device], AbstractContextManager[object]],
        engine: EngineConfig,
        *,
        tokenizer_size: int,
        num_blocks: int | None = None,
        max_in_flight: int = 2,
        cache: Path | None = None,
    ) -> None:
        """Take the memory, compile or find the kernels, fill the weights.

        fill: writes the parameters, which lie on this device and hold anything, by the end of its block.
        tokenizer_size: ids from here on are padding and never come out. num_blocks: None is what engine.gpu_memory
        leaves for the KV pool. cache: the user's folder, for compiled kernels; None: nothing is kept.
        ModelError where the model, or any sequence, does not fit or is not supported; DeviceError where the GPU cannot
        be used; whatever fill raises.
        """
        check_model(config)
        self._config = config
        self._num_ids = min(tokenizer_size, config.vocab_size)
        self._closing, self._closed = ExitStack(), False
        self._fault: str | None = None
        self._last: InFlight | None = None
        self._card = open_card()
        check_held(engine.dtype, config, self._card)
        try:
            with self._running():
                plan = fit_memory(config, engine, self._card.free_bytes(), num_blocks)
                self._open(plan, engine, max_in_flight, cache)
                products = (self._device, self._parameters, engine.slots, cache)
                remembered = is_tuned(*products)
                if not remembered:
                    tune(*products)  # it overwrites the parameters
                with fill(self._parameters, self._device):
                    if remembered:
                        recall(*products)
                # Copies of pageable memory may be under way still, and our stream waits for no other.
                self._card.cuda.deviceSynchronize()
                self._device.kernels.counts.clear()  # what was tried and filled is no part of any step
        except BaseException:
            self.close()
            raise

    def _open(self, plan: MemoryPlan, engine: EngineConfig, max_in_flight: int, cache: Path | None) -> None:
        config, card, cuda, length = self._config, self._card, self._card.cuda, plan.max_seq_len
        arena, address = open_arena(card, plan)
        self._closing.callback(cuda.free, address)
        self._parameters = allocate_parameters(config, arena, engine)
        buffers = Buffers.take(arena, config, engine, length)
        tables = arena.take_all(table_rooms(config, engine, length))
        workspace = arena.take((plan.workspace,), np.uint8)
        region = arena.take((plan.uploads,), np.uint8)
        self._cache = KVCache(arena.take(*pool_room(config, engine, plan.num_blocks)), engine.kv_dtype)
        assert arena.used == plan.total, f"{arena.used} bytes used, {plan.total} planned"

        closed_later = self._closing.enter_context  # in the reverse order
        stream, copies = (closed_later(closing(Stream(cuda))) for _ in range(2))
        built_for = (card.compute_capability, engine.elem, config.head_dim, engine.kv_dtype)
        kernels = closed_later(closing(load_kernels(*built_for, cache, shared_limit=card.block_shared_bytes)))
        blas = closed_later(closing(Blas.create(stream, workspace, kernels)))
        self._device = Device(card, stream, kernels, blas, engine.elem, buffers)
        for zeros in (tables["blocks"], buffers.tickets, buffers.draw_ticket):
            cuda.memsetAsync(zeros.data.ptr, 0, zeros.nbytes, stream.ptr)
        self._slots = closed_later(closing(Slots(cuda, tables["tokens"], tables["blocks"], stream.ptr)))
        ring = closed_later(closing(PinnedRing(cuda, max_in_flight, region.nbytes)))
        view = device_view(region.data.ptr)
        self._upload = Upload(cuda, ring, view, region.nbytes)
        self._masks = closed_later(closing(Masks(cuda, buffers.masks, copies, stream)))
        landing = partial(Landing, cuda, buffers.drawn, stream.ptr)
        self._landings = [closed_later(closing(landing())) for _ in range(max_in_flight)]  # those that no step has
        self._graphs = Graphs(stream, kernels.counts)
        self._closing.callback(self._graphs.close)
        self._rope = (tables["cos"], tables["sin"])
        for table, values in zip(self._rope, rope_tables(config.rope, config.head_dim, length), strict=True):
            cuda.memcpy(table.data.ptr, values.ctypes.data, values.nbytes, cuda.memcpyHostToDevice)
        self._limits = Limits(
            num_blocks=plan.num_blocks,
            block_size=BLOCK_SIZE,
            max_batch_tokens=engine.max_batch_tokens,
            max_slots=engine.slots,
            max_seq_len=length,
            vocab_size=config.vocab_size,
            max_in_flight=max_in_flight,
            refill_slots=max(1, engine.slots // REFILL_SHARE),
            admit_slots=max(ADMIT_LEAST, engine.slots // ADMIT_SHARE),
            chunk_cost=CHUNK_COST,
        )
        details = _details(card, blas, plan)
        self._facts = BackendFacts("gpu", card.name, engine.dtype, self._cache.token_bytes, details)
        self._closing.callback(stream.synchronize)  # comes first: no memory may go that is still being used

    @property
    def limits(self) -> Limits:
        return self._limits

    @property
    def facts(self) -> BackendFacts:
        return self._facts

    def bind(self, slot: int, token_ids: Seq[int] | I32, options: SlotOptions) -> None:
        known = np.ascontiguousarray(token_ids, np.int32)
        if not within(known, 0, self._limits.vocab_size):
            raise ValueError(f"token ids of slot {slot} are not in the vocabulary")
        with self._running():
            self._require_drawn()
            self._slots.bind(slot, known, options)

    def mask_memory(self) -> U32:
        return self._masks.host

    def step(self, batch: Batch) -> InFlight:
        with self._running():
            if not self._landings:
                raise ValueError(f"{self._limits.max_in_flight} steps are in flight: read one before the next")
            rows = self._resolve(batch, pads_decoding=True)
            waits = rows.draw.masks is not None
            self._compute(rows)
            landing, num_top = self._landings.pop(), batch.top_logprobs
            if not waits:
                landing.copy(num_top)
        draw = partial(self._draw_masked, rows, landing, num_top)
        read = partial(self._read, landing, len(batch.sample_slots), num_top)
        self._last = InFlight(draw, read, waits=waits)
        return self._last

    def run(self, batch: Batch, module: ModuleType) -> tuple[Array, Array]:
        """Enqueue a step through a module of ops: tokens i32[R] and logprobs f32[R], the GPU's until the next step.

        For comparisons of ops; step() says what else there is to a step.
        """
        with self._running():
            return self._enqueue(self._resolve(batch), module)

    def logits(self, batch: Batch) -> F32:
        with self._running():
            logits = self._forward(self._resolve(batch), ops)
            host = np.empty(logits.shape, np.float32)
            width, cuda, stream = 4 * host.shape[1], self._card.cuda, self._device.stream
            if len(host):
                pitch = logits.strides[0]
                target, source, kind = host.ctypes.data, logits.data.ptr, cuda.memcpyDeviceToHost
                cuda.memcpy2DAsync(target, width, source, pitch, width, len(host), kind, stream.ptr)
            stream.synchronize()
            return host

    def copy_blocks(self, pairs: Seq[tuple[int, int]]) -> None:
        with self._running():
            self._cache.copy(self._card.cuda, pairs, self._device.stream.ptr)

    def counts(self) -> dict[str, int]:
        return dict(self._graphs.counts())

    def tensors(self) -> DeviceTensors:
        """The weights as they lie on the GPU, for as long as the backend is open; to be read between steps."""
        return DeviceTensors(self._parameters, self._config, self._device)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with suppress(Exception):  # nothing that still goes wrong may hide why a run ends
            self._closing.close()

    def _resolve(self, batch: Batch, *, pads_decoding: bool = False) -> Rows:
        """Lay a step out, and enqueue the copy of what its kernels read, and what comes before the step itself."""
        self._require_drawn()
        config = self._config
        rows = resolve_rows(
            batch,
            self._limits,
            self._slots,
            self._upload,
            group=config.num_heads // config.num_kv_heads,
            head_dim=config.head_dim,
            fp8=self._cache.kv_dtype == "fp8",
            num_ids=self._num_ids,
            pads_decoding=pads_decoding,
        )
        self._upload.send(self._device.stream.ptr)
        ops.place_blocks(self._device, rows)
        return rows

    def _forward(self, rows: Rows, module: ModuleType) -> Array:
        """Enqueue all but the sampling: tokens, K and V of all rows are written; the logits of the sampled ones."""
        eps = self._config.rms_norm_eps
        return forward(module, self._device, self._parameters, self._cache, rows, eps=eps, rope=self._rope)

    def _enqueue(self, rows: Rows, module: ModuleType) -> tuple[Array, Array]:
        logits = self._forward(rows, module)
        drawn: tuple[Array, Array] = module.sample(self._device, logits, rows, self._slots, num_ids=self._num_ids)
        return drawn

    def _compute(self, rows: Rows) -> None:
        """Enqueue a step, captured as far as it has the shape of others; where it waits for its mask, all but its
        draws."""
        shape = rows.shape
        if shape is not None and rows.draw.follows_shape:
            self._graphs.run(shape, partial(self._enqueue, rows, ops))
            return
        if shape is None:
            self._forward(rows, ops)
        else:
            self._graphs.run((*shape, DRAWN_OUTSIDE), partial(self._forward, rows, ops))
        if rows.draw.masks is None:
            self._draw(rows)

    def _draw(self, rows: Rows) -> None:
        logits = self._device.buffers.logits[: rows.num_sampled, : self._config.vocab_size]
        ops.sample(self._device, logits, rows, self._slots, num_ids=self._num_ids)

    def _draw_masked(self, rows: Rows, landing: Landing, num_top: int, bits: U32) -> None:
        assert rows.draw.masks is not None
        with self._running():
            check_mask(bits, rows.draw.masks, self._config.vocab_size)
            self._masks.send(bits, rows.draw.masks)
            self._draw(rows)
            self._masks.were_read()
            landing.copy(num_top)

    def _require_drawn(self) -> None:
        """What comes after a step may not change what its tokens are drawn from."""
        if self._last is not None and self._last.waits:
            raise ValueError("a step waits for its mask: call its mask() before bind() and the next step()")

    def _read(self, landing: Landing, count: int, num_top: int) -> StepOutput:
        with self._running():
            output = landing.read(count, num_top)
        self._landings.append(landing)
        return output

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Around everything that touches the GPU. After a fault nothing on it can be trusted."""
        if self._closed:
            raise RuntimeError("the backend is closed")
        if self._fault is not None:
            raise DeviceError(self._fault)
        try:
            yield
        except self._card.faults as error:
            self._fault = self._name(error)
            raise DeviceError(self._fault) from error

    def _name(self, error: Exception) -> str:
        """What failed, in CUDA's words where it has any: a library on it often says no more than that it failed."""
        try:
            self._card.cuda.deviceSynchronize()
        except self._card.faults as cause:
            error = cause
        return str(error) if isinstance(error, DeviceError) else f"{self._card.name} failed: {error}"


def open_gpu_backend(
    config: ModelConfig, tensors: TensorSource, engine: EngineConfig, *, tokenizer_size: int, cache: Path | None
) -> GpuBackend:
    """A checkpoint's model on the GPU, ready for the first step. Errors as of GpuBackend."""
    if isinstance(tensors, RandomTensors):
        fill = partial(fill_random, config=config, tensors=tensors)
    else:
        fill = partial(load_weights, config=config, tensors=tensors)
    return GpuBackend(config, fill, engine, tokenizer_size=tokenizer_size, cache=cache)


def _details(card: Card, blas: Blas, plan: MemoryPlan) -> dict[str, str | int]:
    """Versions, and bytes of the memory by what it is for."""
    return {
        "compute_capability": ".".join(map(str, card.compute_capability)),
        "driver": _version(card.cuda.driverGetVersion()),
        "cuda_runtime": _version(card.cuda.runtimeGetVersion()),
        "cublas": str(blas.version),
        "nvrtc": ".".join(map(str, load_nvrtc().version)),
        "cupy": next(iter(installed_cupy().values()), "unknown"),
        **{f"{name}_bytes": getattr(plan, name) for name in ("weights", "pool", "total")},
    }


def _version(number: int) -> str:
    """CUDA's own form: 13000 -> 13.0."""
    return f"{number // 1000}.{number % 1000 // 10}"
