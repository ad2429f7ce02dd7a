"""`tinyvllm bench`: workloads through the engine of a run, beside the limit that the machine sets."""
