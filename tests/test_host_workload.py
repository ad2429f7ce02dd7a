"""The script that times workloads on the host alone, here with the shortest of them."""

from __future__ import annotations

from idle_gpu import idle_backend
from scripts import script

from tinyvllm_cli.engine.engine import Engine

host_workload = script("host_workload")


def test_a_workload_s_steps_and_their_parts():
    step = Engine.step
    with idle_backend(4) as (backend, _):
        head, _, row, _, parts, _, values = host_workload.measure(backend, ["latency"], 2)
    assert Engine.step is step, "nothing is timed any more"
    assert len({line.count("|") for line in (head, row)}) == len({line.count("|") for line in (parts, values)}) == 1
    name, steps, run, *_ = map(str.strip, row.strip("|").split("|"))
    assert (name, steps) == ("latency", "256") and float(run.split()[0]) > 0
    told = dict(zip(parts.split("|"), values.split("|"), strict=True))
    assert (told[" steps "], told[" decode only "]) == (" 256 ", " 255 ")
