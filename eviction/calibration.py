"""What a model's queries look like before the rotary embedding, measured once on texts and kept in a file.

TriAttention scores keys by how much queries of a typical text will want them. Typical is: per query head and rotary
frequency, the mean of the queries as complex numbers and the mean of their magnitudes. The texts are documents that
were given, or traces: what the model itself writes after documents.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from capture import checkpoints
from capture.attention import LayerAttention, capturing
from capture.checkpoints import Source
from data import BadInput
from eviction.measured import Kind, check_numbers, digest_of_files, texts_of, witness_of
from eviction.options import check_number, check_whole
from eviction.rotary import rotary_of

TEXT, TRACES, GENERATED = "text", "traces", "generated"  # what statistics are of
TOGETHER = 8  # traces that are generated in one batch


LEAST_TEMPERATURE = 1e-6  # below it logits divided by it overflow
MOST_SEED = 2**62  # torch takes 64 bits, and the batches' seeds follow this one


@dataclass(frozen=True)
class Generation:
    """How traces are made: up to `tokens` new tokens after each document.

    temperature 0: greedily; above: drawn from the whole softmax of the logits divided by it, with the seed.
    """

    tokens: int
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises BadInput for numbers that mean nothing."""
        check_whole("calibrate", "generate", self.tokens, least=1)
        check_number("calibrate", "temperature", self.temperature, least=0)
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise BadInput(f"calibrate: temperature={self.temperature}: expected 0 or at least {LEAST_TEMPERATURE}")
        check_whole("calibrate", "seed", self.seed, least=0, most=MOST_SEED)


@dataclass(frozen=True, eq=False)
class Statistics:
    """Means of a model's queries before RoPE, over the tokens of a text.

    The components of a query are its r/2 turning pairs as complex numbers, in the order of the frequencies, and then
    each of the d - r coordinates that pass, as a number without imaginary part: F = r/2 + d - r of them.
    mean (layers, H, F) complex64: E q_f. magnitude (layers, H, F) float32: E |q_f|. turning: r/2. d: coordinates of a
    query. witness (layers, H, dv) float32: the first row of each layer's output projection, by which another model is
    told; empty (0,) if it was not to be had. model, digest: label and digest of the checkpoint. text: digest of the
    text. tokens: how many the means are over; skipped: tokens at the start of each document that are not among them.
    of: "text"; "traces", a text of which it was said that the model had generated it; "generated", what the model wrote
    after the `skipped` tokens of each document, and then generated, temperature and seed are those of Generation.
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
    of: str = TEXT
    generated: int = 0
    temperature: float = 0.0
    seed: int = 0

    def save(self, path: Path) -> None:
        """Write a safetensors file, by an atomic rename, with everything but the tensors in its metadata."""
        tensors = {
            "mean": torch.view_as_real(self.mean.cpu()),
            "magnitude": self.magnitude,
            "witness": self.witness,
        }
        KIND.save(path, tensors, {name: getattr(self, name) for name in KIND.facts})

    @classmethod
    def load(cls, path: Path) -> "Statistics":
        """Raises BadInput if the file is missing, not readable, or not one that `save` wrote."""
        tensors, facts = KIND.load(path)
        return cls(
            mean=torch.view_as_complex(tensors["mean"]),
            magnitude=tensors["magnitude"],
            witness=tensors["witness"],
            turning=int(facts["turning"]),
            d=int(facts["d"]),
            model=facts["model"],
            digest=facts["digest"],
            text=facts["text"],
            tokens=int(facts["tokens"]),
            skipped=int(facts["skipped"]),
            of=facts["of"],
            generated=int(facts["generated"]),
            temperature=float(facts["temperature"]),
            seed=int(facts["seed"]),
        )


_TENSORS = frozenset({"mean", "magnitude", "witness"})
KIND = Kind(
    what="query statistics",
    version="2",
    command="python -m eviction calibrate",
    tensors=_TENSORS,
    facts=frozenset(x.name for x in fields(Statistics)) - _TENSORS,
)


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
    return Statistics(
        mean=torch.stack([totals[layer][0] for layer in layers]).to(torch.complex64) / counted,
        magnitude=(torch.stack([totals[layer][1] for layer in layers]) / counted).float(),
        witness=witness_of(model, layers),
        turning=turning[layers[0]],
        d=width.pop(),
        tokens=counted,
        skipped=skip,
    )


@torch.inference_mode()
def traces_of(model: PreTrainedModel, prompts: Sequence[torch.Tensor], generation: Generation) -> list[torch.Tensor]:
    """Every prompt (n,), all of one length, followed by what the model writes after it, with its full cache.

    A trace ends before the token that ends it for the model, or after generation.tokens. The batches of 8 are seeded
    one by one: more prompts leave the traces of earlier batches as they were. Beams, repetition penalty, top-k and
    top-p of the model's own generation settings are not used. Raises BadInput if it writes nothing at all.
    """
    length = len(prompts[0])
    ends = torch.tensor(model.generation_config.eos_token_id or [], dtype=torch.int64, device=model.device).flatten()
    options: dict[str, Any] = {"do_sample": False}
    if generation.temperature > 0:
        options = {"do_sample": True, "temperature": float(generation.temperature), "top_k": 0, "top_p": 1.0}
    found: list[torch.Tensor] = []
    for start in range(0, len(prompts), TOGETHER):
        batch = torch.stack(list(prompts[start : start + TOGETHER])).to(model.device)
        with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
            torch.manual_seed(generation.seed + start)
            written = model.generate(  # type: ignore[operator]
                batch,
                attention_mask=torch.ones_like(batch),
                max_new_tokens=generation.tokens,
                num_beams=1,
                repetition_penalty=1.0,
                pad_token_id=0,
                **options,
            )
        going_on = (~torch.isin(written[:, length:], ends)).cumprod(-1).sum(-1)
        found += [line[: length + new] for line, new in zip(written, going_on.tolist(), strict=True)]
    if all(len(trace) == length for trace in found):
        raise BadInput(
            f"calibrate: {type(model).__name__} ended every trace with its first token: expected another text"
        )
    return found


def calibrated(
    source: Source,
    files: Sequence[Path],
    docs: int,
    length: int | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    skip: int = 0,
    traces: bool = False,
    generation: Generation | None = None,
) -> Statistics:
    """Statistics of a checkpoint over `docs` documents of `length` tokens of the text files, with their provenance.

    traces: the files hold what the model generated (which is taken as said, and noted). generation: the documents are
    prompts, and the statistics are over the positions generated after them alone, read again in one pass each. length
    None: the length of the model's record, less the tokens generated. Raises BadInput for numbers that mean nothing, a
    text that is too short, and a checkpoint that cannot be read.
    """
    new = 0 if generation is None else generation.tokens
    if length is None:
        length = source.length - new
        if length < skip + 2:
            raise BadInput(f"--generate {new}: {source.label}'s documents have {source.length} tokens: give --length")
    check_numbers(dtype, ("docs", docs, 1), ("skip", skip, 0), ("length", length, skip + 2))
    if generation is None:
        texts = texts_of(source, files, docs, length)
        found = calibrate(checkpoints.load_model(source, device, dtype), texts, skip)
        found = replace(found, of=TRACES if traces else TEXT)
    else:
        if skip or traces:
            raise BadInput(f"--generate {new}: expected neither --skip nor --traces: only what is generated counts")
        prompts = texts_of(source, files, docs, length, more=new)
        model = checkpoints.load_causal(source, device, dtype)
        found = calibrate(model, traces_of(model, prompts, generation), skip=length)
        found = replace(
            found, of=GENERATED, generated=new, temperature=float(generation.temperature), seed=generation.seed
        )
    return replace(found, model=source.label, digest=source.digest, text=digest_of_files(files))
