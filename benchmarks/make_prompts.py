"""Write prompts of real text as JSON lines: four tasks over passages of the pages that Python's help() shows.

    python benchmarks/make_prompts.py > prompts.jsonl
    python benchmarks/make_prompts.py --reverse > reversed.jsonl

The same lines every time with one version of Python. Another version brings other pages, so other passages and another
number of tokens: compare figures of one version only.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pydoc_data.topics import topics

NUM_PROMPTS = 2000
SHORTEST, LONGEST = 40, 260  # words of a passage
SEED = 7
TASKS = (
    "Summarize in one sentence:",
    "List three keywords, separated by commas:",
    "Write one question that this text answers:",
    "Explain this to a beginner in two sentences:",
)


def prompts(count: int = NUM_PROMPTS) -> Iterator[dict[str, str]]:
    """Lines of an input file. The tasks take turns; each passage has a length and a place drawn at random."""
    words = " ".join(text for _, text in sorted(topics.items())).split()
    rng = random.Random(SEED)
    for i in range(count):
        length = rng.randint(SHORTEST, LONGEST)
        start = rng.randrange(len(words) - length)
        passage = " ".join(words[start : start + length])
        yield {"custom_id": f"req-{i}", "prompt": f"{TASKS[i % len(TASKS)]}\n\n{passage}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=NUM_PROMPTS, help="how many (the first ones)")
    parser.add_argument("--reverse", action="store_true", help="last line first")
    options = parser.parse_args()
    lines = [json.dumps(line) for line in prompts(options.lines)]
    print("\n".join(reversed(lines) if options.reverse else lines))


if __name__ == "__main__":
    main()
