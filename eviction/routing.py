"""Which KV heads keep by attention and which keep evenly, measured once on documents and kept in a file.

The measurement is a proxy: attention mass that the rows after one eviction of a full cache would still find.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from capture import checkpoints
from capture.attention import LayerAttention, capturing
from capture.checkpoints import Source
from data import BadInput
from eviction.measured import Kind, check_numbers, digest_of_files, texts_of, witness_of
from eviction.method import Cells, ContextAndQuestionRows, ContextRows, Reconstruction, Score, named
from eviction.ranking import keep_best
from eviction.rotary import rotary_of
from eviction.scores.even import Even
from eviction.support import output_weight_of


@dataclass(frozen=True, eq=False)
class Routes:
    """The route of every KV head, and what decided it.

    by_attention (layers, K) bool: whether the head keeps by the score `score`, a name with its options; the others keep
    evenly. mass (layers, K, 2) float32: attention mass that later rows found kept, evenly and by the score. witness: as
    in calibration.Statistics. budget: entries that a KV head kept; later: rows of each document that looked for them;
    context: tokens before those. documents: how many. model, digest, text: as in calibration.Statistics.
    """

    by_attention: torch.Tensor
    mass: torch.Tensor
    witness: torch.Tensor
    score: str
    budget: int
    later: int
    context: int
    documents: int
    model: str = ""
    digest: str = ""
    text: str = ""

    def save(self, path: Path) -> None:
        """Write a safetensors file, by an atomic rename, with everything but the tensors in its metadata."""
        tensors = {name: getattr(self, name) for name in KIND.tensors}
        KIND.save(path, tensors, {name: getattr(self, name) for name in KIND.facts})

    @classmethod
    def load(cls, path: Path) -> "Routes":
        """Raises BadInput if the file is missing, not readable, or not one that `save` wrote."""
        tensors, facts = KIND.load(path)
        return cls(
            by_attention=tensors["by_attention"],
            mass=tensors["mass"],
            witness=tensors["witness"],
            score=facts["score"],
            budget=int(facts["budget"]),
            later=int(facts["later"]),
            context=int(facts["context"]),
            documents=int(facts["documents"]),
            model=facts["model"],
            digest=facts["digest"],
            text=facts["text"],
        )


_TENSORS = frozenset({"by_attention", "mass", "witness"})
KIND = Kind(
    what="routes",
    version="1",
    command="python -m eviction routes",
    tensors=_TENSORS,
    facts=frozenset(x.name for x in fields(Routes)) - _TENSORS,
)


@torch.inference_mode()
def routes_of(model: PreTrainedModel, texts: Sequence[torch.Tensor], score: str, budget: int, later: int) -> Routes:
    """The routes of a model: read every document (n,), all of one length, and see which way keeps more mass.

    The last `later` tokens of a document are set aside. Of the others, the context, the `budget` best of each KV head
    are kept once by the score and once evenly, as a run would keep them that read the context in one pass: the score
    sees the context's rows alone, entries that it protects stay in both ways, and entries that no later row of a
    sliding window sees are no candidates. Mass is what the later rows' weights, over all that they see in the full
    cache, put on the entries kept: the mean over rows, the query heads of the group, and documents. A head is routed to
    the score where its mass is larger; equal, as where everything fits, is even.

    Decided in float64. Raises BadInput for a score that has the context read again, documents that are too short, and a
    budget under which nothing is evicted.
    """
    attention = route_score(score)
    length = len(texts[0])
    context = length - later
    if context < 2:
        raise BadInput(f"routes: documents of {length} tokens, {later} of them set aside: expected longer documents")
    if budget >= context:
        raise BadInput(f"routes: a budget of {budget} in contexts of {context} tokens evicts nothing: expected less")
    totals: dict[int, torch.Tensor] = {}

    def add(seen: LayerAttention) -> None:
        mass = _mass_kept(seen, model, attention, budget, context)
        totals[seen.layer] = totals.get(seen.layer, torch.zeros_like(mass)) + mass

    decoder: PreTrainedModel = model.get_decoder()
    with capturing(model, add):
        for text in texts:
            decoder(input_ids=text[None].to(model.device), use_cache=False)
    layers = sorted(totals)
    if len({totals[layer].shape for layer in layers}) > 1:
        raise BadInput(f"routes: {type(model).__name__}: layers of different numbers of KV heads are not supported")
    mass = torch.stack([totals[layer] for layer in layers]) / len(texts)
    return Routes(
        by_attention=mass[..., 1] > mass[..., 0],
        mass=mass.float(),
        witness=witness_of(model, layers),
        score=score,
        budget=budget,
        later=later,
        context=context,
        documents=len(texts),
    )


def routed(
    source: Source,
    files: Sequence[Path],
    score: str,
    budget: int,
    docs: int,
    length: int | None = None,
    later: int = 64,
    device: str = "cpu",
    dtype: str = "float32",
) -> Routes:
    """Routes of a checkpoint over `docs` documents of `length` tokens of the text files, with their provenance.

    length None: the length of the model's record. Raises BadInput for numbers that mean nothing, a text that is too
    short, and a checkpoint that cannot be read.
    """
    length = source.length if length is None else length
    route_score(score)  # before the model is loaded
    check_numbers(dtype, ("docs", docs, 1), ("budget", budget, 1), ("later", later, 1), ("length", length, later + 2))
    texts = texts_of(source, files, docs, length)
    found = routes_of(checkpoints.load_model(source, device, dtype), texts, score, budget, later)
    return replace(found, model=source.label, digest=source.digest, text=digest_of_files(files))


def route_score(name: str) -> Score:
    """The score of the route by attention; raises BadInput if there is none of that name, or a route cannot have it."""
    found = named(Score, name)
    if isinstance(found, Reconstruction):
        raise BadInput(f"routes: score {name}: has the context read again, which no route can: expected another score")
    return found


def two_ways(
    attention: Score, cells: Cells, rows: ContextRows | ContextAndQuestionRows
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores (B, K, L) float32 of the even way and of the way by attention; what the latter protects, both protect."""
    by_attention = attention(cells, rows)
    evenly = torch.where(by_attention == torch.inf, torch.inf, Even()(cells, rows))
    return evenly, by_attention


def _mass_kept(
    seen: LayerAttention, model: PreTrainedModel, attention: Score, budget: int, context: int
) -> torch.Tensor:
    """(K, 2) float64: mass that the rows from `context` on find of what each way keeps of the entries before them."""
    length = seen.key.shape[2]
    positions = torch.arange(length, device=seen.key.device)
    oldest = int(seen.first[0, context])  # entries before it have left the window of all later rows
    share = min(budget, context - oldest)
    whole = Cells(
        layer=seen.layer,
        n_layers=model.config.get_text_config().num_hidden_layers,
        keys=seen.key,
        values=seen.value,
        positions=positions.expand(seen.key.shape[:3]),
        seen=(length,),
        budget=share,
        rotary=rotary_of(model, seen.layer),
        output_weight=output_weight_of(model, seen.layer),
    )
    read = replace(
        whole,
        keys=whole.keys[:, :, :context],
        values=whole.values[:, :, :context],
        positions=whole.positions[:, :, :context],
        seen=(context,),
    )
    rows = ContextRows(seen.query, positions[None], seen.first, seen.scale, seen.softcap)
    later = rows.last(length - context)
    before = ContextRows(
        seen.query[:, :, :context], positions[None, :context], seen.first[:, :context], seen.scale, seen.softcap
    )
    need = attention.rows_needed(share)
    ways = two_ways(attention, read, before if need is None else before.last(need))
    weights = torch.softmax(later.logits(whole, torch.float64), dim=-1).mean((2, 3))[0, :, oldest:context]
    kept = (keep_best(scores[0, :, oldest:], read.lengths.new_full(weights.shape[:1], share)) for scores in ways)
    return torch.stack([torch.where(keep, weights, 0.0).sum(-1) for keep in kept], dim=-1)
