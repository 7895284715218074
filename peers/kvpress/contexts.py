"""Writes the input of kept.py: the checkpoints and the token ids that both sides read. Runs in the project's own .venv.

.venv/bin/python -m peers.kvpress.contexts out/kvpress/contexts.json
"""

import json
import sys
from pathlib import Path

from capture import checkpoints
from capture.families import FAMILIES
from data import store

TOKENS = 200  # longer than the observation window of 64 and than gemma's sliding window of 128
FROM = 20_000  # characters of the text before the paragraph at which the contexts begin: plain prose
NEEDLE = "\nThe special magic number for lantern is: 4821.\n"
RATIOS = [0.25, 0.5, 0.9]  # of entries removed; at the last, fewer stay than the observation window holds


def main(target: Path) -> None:
    """Write the contexts of the five families to the target."""
    text = (store.CHECKOUT / "data" / "text" / "austen-heldout.txt").read_text("utf-8")
    models = []
    for family in FAMILIES.values():
        source = checkpoints.find(family.name, None)
        tokenizer = checkpoints.load_tokenizer(source)
        begin = text.index("\n\n", FROM) + 2
        prose = text[begin : begin + 10 * TOKENS]
        cut = prose.index("\n", TOKENS)
        ids = tokenizer(family.begins + prose[:cut] + NEEDLE + prose[cut:], add_special_tokens=False).input_ids[:TOKENS]
        models.append({"label": family.name, "folder": str(source.folder), "ids": ids})
    store.write_text(target, json.dumps({"ratios": RATIOS, "models": models}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
