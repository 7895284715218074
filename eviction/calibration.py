"""What a model's queries look like before the rotary embedding, measured once on a text and kept in a file.

TriAttention scores keys by how much queries of a typical text will want them. Typical is: per query head and rotary
frequency, the mean of the queries as complex numbers and the mean of their magnitudes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from transformers import PreTrainedModel

from capture import checkpoints, documents
from capture.attention import LayerAttention, capturing
from capture.checkpoints import Source
from data import BadInput
from data.store import digest_of, sha256, write_bytes
from eviction.rotary import rotary_of
from eviction.support import output_weight_of

VERSION = "1"  # of the file
FORMAT = "forced-weights query statistics"


@dataclass(frozen=True, eq=False)
class Statistics:
    """Means of a model's queries before RoPE, over the tokens of a text.

    The components of a query are its r/2 turning pairs as complex numbers, in the order of the frequencies, and then
    each of the d - r coordinates that pass, as a number without imaginary part: F = r/2 + d - r of them.
    mean (layers, H, F) complex64: E q_f. magnitude (layers, H, F) float32: E |q_f|. turning: r/2. d: coordinates of a
    query. witness (layers, H, dv) float32: the first row of each layer's output projection, by which another model is
    told; empty (0,) if it was not to be had. model, digest: label and digest of the checkpoint. text: digest of the
    text. tokens: how many the means are over; skipped: tokens at the start of each document that are not among them.
    """

    mean: torch.Tensor
    magnitude: torch.Tensor
    witness: torch.Tensor
    turning: int
    d: int
    model: str = ""
    digest: str = ""
    text: str = ""
    tokens: int = 0
    skipped: int = 0

    def save(self, path: Path) -> None:
        """Write a safetensors file, by an atomic rename, with everything but the tensors in its metadata."""
        tensors = {
            "mean": torch.view_as_real(self.mean.cpu()).contiguous(),
            "magnitude": self.magnitude.cpu().contiguous(),
            "witness": self.witness.cpu().contiguous(),
        }
        about = {name: str(getattr(self, name)) for name in _ABOUT}
        write_bytes(path, save(tensors, {"format": FORMAT, "version": VERSION, **about}))

    @classmethod
    def load(cls, path: Path) -> "Statistics":
        """Raises BadInput if the file is missing, not readable, or not one that `save` wrote."""
        if not path.is_file():
            raise BadInput(f"{path}: no such file: expected one that `python -m eviction calibrate` wrote")
        try:
            with safe_open(path, framework="pt") as file:
                about = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dictionary
        except (SafetensorError, OSError) as error:
            raise BadInput(f"{path}: not readable as safetensors ({error})") from error
        if (about.get("format"), about.get("version")) != (FORMAT, VERSION):
            raise BadInput(
                f"{path}: no query statistics of version {VERSION}: run `python -m eviction calibrate` again"
            )
        if set(tensors) != {"mean", "magnitude", "witness"} or not set(_ABOUT) <= set(about):
            raise BadInput(f"{path}: query statistics that are not whole: run `python -m eviction calibrate` again")
        return cls(
            mean=torch.view_as_complex(tensors["mean"]),
            magnitude=tensors["magnitude"],
            witness=tensors["witness"],
            turning=int(about["turning"]),
            d=int(about["d"]),
            model=about["model"],
            digest=about["digest"],
            text=about["text"],
            tokens=int(about["tokens"]),
            skipped=int(about["skipped"]),
        )


_ABOUT = tuple(x.name for x in fields(Statistics) if x.name not in ("mean", "magnitude", "witness"))


def components(vectors: torch.Tensor, turning: int) -> torch.Tensor:
    """(..., F) complex: the components of vectors (..., d), as Statistics has them."""
    pairs = torch.complex(vectors[..., :turning], vectors[..., turning : 2 * turning])
    passed = vectors[..., 2 * turning :]
    return torch.cat([pairs, torch.complex(passed, torch.zeros_like(passed))], dim=-1)


@torch.inference_mode()
def calibrate(model: PreTrainedModel, texts: Sequence[torch.Tensor], skip: int = 0) -> Statistics:
    """Read every document (n,) of token ids by itself and take the means of its queries from position `skip` on.

    The queries are those that attention used (norms and biases included), turned back by the layer's own rotary
    embedding; sums are float64. Departures from scripts/calibrate.py of WeianMao/triattention: it leaves out query
    norms (Qwen3), multiplies by the scaling of the rotary embedding (yarn) once too often, computes in bf16, and reads
    one document. It counts every token, as skip = 0 does; the scores ExpectedAttention and KVzip treat the first 4,
    which much attention rests on, apart: skip = 4. Raises BadInput for a model without a rotary embedding known here,
    and if there is no token to count.
    """
    counted = sum(max(0, len(text) - skip) for text in texts)
    if counted == 0:
        raise BadInput(f"calibrate: no tokens from position {skip} on: expected a longer text")
    totals: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    turning: dict[int, int] = {}
    width: set[int] = set()

    def add(seen: LayerAttention) -> None:
        rotary = rotary_of(model, seen.layer)
        if rotary is None:
            raise BadInput(f"calibrate: {type(model).__name__}, layer {seen.layer}: no rotary embedding known here")
        positions = torch.arange(seen.query.shape[2], device=seen.query.device)
        turning[seen.layer] = len(rotary.parameters()[0])
        width.add(seen.query.shape[-1])
        before = rotary.unrotate(seen.query[0], positions)[:, skip:].double()
        queries = components(before, turning[seen.layer])
        sums = queries.sum(1), queries.abs().sum(1)
        past = totals.get(seen.layer)
        totals[seen.layer] = sums if past is None else (past[0] + sums[0], past[1] + sums[1])

    decoder: PreTrainedModel = model.get_decoder()
    with capturing(model, add):
        for text in texts:
            decoder(input_ids=text[None].to(model.device), use_cache=False)
    layers = sorted(totals)
    if len({(turning[layer], totals[layer][0].shape) for layer in layers}) > 1 or len(width) > 1:
        raise BadInput(f"calibrate: {type(model).__name__}: layers of different shapes are not supported")
    weights = [output_weight_of(model, layer) for layer in layers]
    witness = [weight[:, 0].float() for weight in weights if weight is not None]
    return Statistics(
        mean=torch.stack([totals[layer][0] for layer in layers]).to(torch.complex64) / counted,
        magnitude=(torch.stack([totals[layer][1] for layer in layers]) / counted).float(),
        witness=torch.stack(witness) if len(witness) == len(layers) else torch.empty(0),
        turning=turning[layers[0]],
        d=width.pop(),
        tokens=counted,
        skipped=skip,
    )


def calibrated(
    source: Source,
    files: Sequence[Path],
    docs: int,
    length: int | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    skip: int = 0,
) -> Statistics:
    """Statistics of a checkpoint over `docs` documents of `length` tokens of the text files, with their provenance.

    Documents are cut and begun as the capture cuts and begins them; length None: the length of the model's record.
    Raises BadInput for numbers that mean nothing, a text that is too short, and a checkpoint that cannot be read.
    """
    length = source.length if length is None else length
    for name, value, least in (("docs", docs, 1), ("skip", skip, 0), ("length", length, skip + 2)):
        if value < least:
            raise BadInput(f"--{name} {value}: expected at least {least}")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise BadInput(f"--dtype {dtype}: expected float32, bfloat16 or float16")
    longest = checkpoints.load_config(source).max_position_embeddings
    if length > longest:
        raise BadInput(f"--length {length}: {source.label} has positions for {longest} tokens")
    tokenizer = checkpoints.load_tokenizer(source)
    begin = documents.begin_ids(tokenizer, source.model_type, source.begins)
    texts = [torch.from_numpy(ids) for ids in documents.cut(files, tokenizer, begin, docs, length)]
    found = calibrate(checkpoints.load_model(source, device, dtype), texts, skip)
    text = digest_of(sha256(path) for path in files)
    return replace(found, model=source.label, digest=source.digest, text=text)
