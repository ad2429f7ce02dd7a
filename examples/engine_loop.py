"""The engine from Python: the loop that `tinyvllm run` is, with the text shown as it comes.

python examples/engine_loop.py "What is the capital of France?"
"""

import sys

from tinyvllm_cli import Completion, Request, SamplingParams
from tinyvllm_cli.config import DEFAULT_MODEL, EngineOptions
from tinyvllm_cli.load import open_engine


def main(prompt: str) -> None:
    loaded = open_engine(DEFAULT_MODEL, config=EngineOptions(slots=1), report=lambda line: print(line, file=sys.stderr))
    engine = loaded.engine
    engine.add(Request(request_id=0, custom_id="example", prompt=prompt, params=SamplingParams(max_tokens=64)))
    while not engine.idle:
        for event in engine.step():
            if isinstance(event, Completion):
                print(f"\n[{event.usage or event.error}]", file=sys.stderr)
            else:
                print(event.text, end="", flush=True)
    loaded.close()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "What is the capital of France?")
