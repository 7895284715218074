"""From text to documents: non-overlapping stretches spread over the text, each begun as the model expects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import polars as pl

from capture.families import BOS_ALWAYS
from data import BadInput
from data.schema import TOKENS

if TYPE_CHECKING:  # transformers takes seconds to import, and a run that finds all current needs none of it
    from transformers import PreTrainedTokenizerBase

Ids = npt.NDArray[np.int64]

# What marks a checkpoint that carries the embedded models' tokenizer, trained on by a user or copied
# elsewhere.
EMBEDDED_VOCABULARY, EMBEDDED_BEGINS, EMBEDDED_BEGINS_ID = 2048, "<s>", 1


def text_files(paths: Sequence[Path]) -> list[Path]:
    """The text files named, a folder standing for its *.txt in order of name; raises BadInput if one is missing."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(path.glob("*.txt"))
            if not inside:
                raise BadInput(f"{path}: no *.txt in this folder: expected at least one text file")
            files += inside
        elif path.is_file():
            files.append(path)
        else:
            raise BadInput(f"{path}: no such text file or folder")
    return files


def begin_ids(tokenizer: PreTrainedTokenizerBase, model_type: str, begins: str | None) -> list[int]:
    """Ids that open every document of a model: none or one.

    begins: the token that the model's record names ("" for none); None for a checkpoint without a record.
    Then the rule is (ours): BOS if the tokenizer writes it by itself, or if all models of this architecture
    were trained with it (BOS_ALWAYS), or if the checkpoint carries the embedded models' tokenizer; else
    nothing. Raises BadInput if the token that the record names is not in the tokenizer, or BOS is wanted and
    not defined.
    """
    if begins is not None:
        if not begins:
            return []
        found = tokenizer.convert_tokens_to_ids(begins)
        if not isinstance(found, int) or tokenizer.convert_ids_to_tokens(found) != begins:
            raise BadInput(f"the tokenizer has no token {begins!r}, with which every document must begin")
        return [found]
    bos = tokenizer.bos_token_id
    written = tokenizer("a").input_ids[:1] == [bos] != tokenizer("a", add_special_tokens=False).input_ids[:1]
    embedded = (len(tokenizer), tokenizer.bos_token, bos) == (
        EMBEDDED_VOCABULARY,
        EMBEDDED_BEGINS,
        EMBEDDED_BEGINS_ID,
    )
    if bos is None and model_type in BOS_ALWAYS:
        raise BadInput(f"the tokenizer defines no BOS, with which every document of {model_type} must begin")
    return [bos] if bos is not None and (written or embedded or model_type in BOS_ALWAYS) else []


def cut(
    files: Sequence[Path], tokenizer: PreTrainedTokenizerBase, begin: list[int], docs: int, length: int
) -> list[Ids]:
    """Non-overlapping documents spread over the whole text, (length,) int64 each: begin, then consecutive tokens.

    Files follow one another in the order given and are cut into slots of length - len(begin) tokens. Document i takes
    slot spread_order(slots)[i], so a few documents sample all of the text, and asking for more leaves the earlier ones
    where they were (ours). Raises BadInput if the text is too short, with the tokens there are, the tokens needed, and
    how many documents would fit.
    """
    body = length - len(begin)
    tokens: list[int] = []
    for piece in _pieces(files):
        tokens += tokenizer(piece, add_special_tokens=False, verbose=False).input_ids
    slots = len(tokens) // body
    if slots < docs:
        named = str(files[0]) if len(files) == 1 else f"{len(files)} text files"
        raise BadInput(
            f"{named}: the text has {len(tokens)} tokens, but {docs} documents of {length} need {docs * body}:"
            f" {slots} would fit (use fewer --docs, a shorter --length, or more --text)"
        )
    starts = [slot * body for slot in spread_order(slots)[:docs]]
    return [np.array(begin + tokens[start : start + body], dtype=np.int64) for start in starts]


def spread_order(slots: int) -> list[int]:
    """0 to slots - 1 in the order of their reversed binary digits (van der Corput): every prefix is spread evenly."""
    bits = max(1, (slots - 1).bit_length())
    order = (int(f"{i:0{bits}b}"[::-1], 2) for i in range(1 << bits))
    return [slot for slot in order if slot < slots]


def tokens_frame(model: str, doc_id: int, ids: Ids, tokenizer: PreTrainedTokenizerBase) -> pl.DataFrame:
    """Table tokens of one document, ids (N,); a token that is part of a character reads as the replacement sign."""
    frame = pl.DataFrame(
        {
            "model": [model] * len(ids),
            "doc_id": np.full(len(ids), doc_id, dtype=np.int32),
            "position": np.arange(len(ids), dtype=np.int32),
            "token_id": ids.astype(np.int32),
            "text": [tokenizer.decode([token]) for token in ids.tolist()],
        }
    )
    return TOKENS.select(frame)


def _pieces(files: Sequence[Path]) -> Iterator[str]:
    for path in files:
        try:
            yield path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise BadInput(f"{path}: not UTF-8 text (byte {error.start}): expected plain text") from error
