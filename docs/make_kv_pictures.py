"""Draw the pictures of docs/kv-cache.md from runs of the engine, and print the tables of figures that stand there.

    python docs/make_kv_pictures.py
"""

from pathlib import Path

from kv_pictures.held import draw_held, scarcity_table, waste_table
from kv_pictures.life import draw_life
from kv_pictures.sharing import draw_sharing

DOCS = Path(__file__).parent
PICTURES = {"kv-life.svg": draw_life, "kv-sharing.svg": draw_sharing, "kv-held.svg": draw_held}


def main() -> None:
    for file, draw in PICTURES.items():
        (DOCS / file).write_text(draw(), encoding="utf-8")
    print("\n".join([*waste_table(), "", *scarcity_table()]))


if __name__ == "__main__":
    main()
