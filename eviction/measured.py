"""What was measured of a model before any run: its file, the text it was measured on, and how the model is told again.

Query statistics (eviction.calibration) and routes (eviction.routing) are such measurements.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from transformers import PreTrainedModel

from capture import checkpoints, documents
from capture.checkpoints import Source
from data import BadInput
from data.store import digest_of, sha256, write_bytes
from eviction.support import output_weight_of

# Relative and absolute difference of a weight above which it is another model's: it decides nothing between two
# precisions of one checkpoint (bf16 is off by 2^-8 at most), and does not see a fine-tuned one that stayed closer.
SAME_WEIGHT = 2.0**-6, 1e-6


@dataclass(frozen=True)
class Kind:
    """A kind of file: what is in it, in words; its version; the command that writes it; its tensors and its facts."""

    what: str
    version: str
    command: str
    tensors: frozenset[str]
    facts: frozenset[str]

    def save(self, path: Path, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, object]) -> None:
        """Write a safetensors file, by an atomic rename, with the facts in its metadata."""
        about = {"format": f"forced-weights {self.what}", "version": self.version}
        here = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        write_bytes(path, save(here, about | {name: str(fact) for name, fact in facts.items()}))

    def load(self, path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Tensors and facts; raises BadInput if the file is missing, not readable, or not one that `save` wrote."""
        if not path.is_file():
            raise BadInput(f"{path}: no such file: expected one that `{self.command}` wrote")
        try:
            with safe_open(path, framework="pt") as file:
                about = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dictionary
        except (SafetensorError, OSError) as error:
            raise BadInput(f"{path}: not readable as safetensors ({error})") from error
        if (about.get("format"), about.get("version")) != (f"forced-weights {self.what}", self.version):
            raise BadInput(f"{path}: no {self.what} of version {self.version}: run `{self.command}` again")
        if set(tensors) != self.tensors or not self.facts <= set(about):
            raise BadInput(f"{path}: {self.what} that are not whole: run `{self.command}` again")
        return tensors, about


def witness_of(model: PreTrainedModel, layers: Sequence[int]) -> torch.Tensor:
    """(layers, H, dv) float32: the first row of each layer's output projection; empty (0,) if it is not to be had."""
    weights = [output_weight_of(model, layer) for layer in layers]
    rows = [weight[:, 0].float() for weight in weights if weight is not None]
    return torch.stack(rows) if len(rows) == len(layers) else torch.empty(0)


def is_witnessed(witness: torch.Tensor, layer: int, output_weight: torch.Tensor | None) -> bool:
    """Whether the layer's output projection (H, d_model, dv) is that of the witness; True where either is unknown."""
    if output_weight is None or not len(witness):
        return True
    mine, theirs = output_weight[:, 0].float(), witness[layer].to(output_weight.device)
    return mine.shape == theirs.shape and torch.allclose(mine, theirs, *SAME_WEIGHT)


def check_numbers(dtype: str, *numbers: tuple[str, int, int]) -> None:
    """Raises BadInput for a dtype that is none, or a number (option, value, least) below its least."""
    for option, value, least in numbers:
        if value < least:
            raise BadInput(f"--{option} {value}: expected at least {least}")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise BadInput(f"--dtype {dtype}: expected float32, bfloat16 or float16")


def texts_of(source: Source, files: Sequence[Path], docs: int, length: int, more: int = 0) -> list[torch.Tensor]:
    """`docs` documents of `length` token ids of the text files, cut and begun as the capture cuts and begins them.

    more: tokens that are to follow each. Raises BadInput for a text that is too short or a model that cannot read them.
    """
    longest = checkpoints.load_config(source).max_position_embeddings
    if length + more > longest:
        after = f", the {more} generated after them included" if more else ""
        raise BadInput(f"--length {length}: {source.label} has positions for {longest} tokens{after}")
    tokenizer = checkpoints.load_tokenizer(source)
    begin = documents.begin_ids(tokenizer, source.model_type, source.begins)
    return [torch.from_numpy(ids) for ids in documents.cut(files, tokenizer, begin, docs, length)]


def digest_of_files(files: Sequence[Path]) -> str:
    """One digest of all of them, in order."""
    return digest_of(sha256(path) for path in files)
