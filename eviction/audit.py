"""The audit: what every method really holds at one nominal budget, and what that buys on planted needles.

A method is a named combination of a score, an allocator, a selector, a storage and a state (eviction.combinations).
Unless others are asked for, every score that has a file appears with the uniform allocator by itself, and beside these
a fixed list of combinations. All methods of a model see the same prompts, and of each prompt one dense pass, which is
read once and handed to all of them (eviction.replay).
Bytes are of one sequence, measured on unique storages. Source: ours; P1, appendix C, for why they are measured.
"""

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path

import polars as pl
import scipy.stats
import torch
from transformers import PreTrainedModel

from capture import checkpoints, documents
from capture.checkpoints import Source
from data import BadInput, Provenance, Store
from data.command_line import track
from data.schema import AUDIT
from data.store import CHECKOUT, code_digest, refresh, sha256, write_text
from eviction.calibration import Generation, Statistics, calibrated
from eviction.combinations import FULL_CACHE, Method, files, methods
from eviction.method import Reconstruction, Score, named
from eviction.replay import Recording, recorded, replayed
from eviction.routing import routed
from eviction.run import Run, evict
from eviction.scores.direction_bonus import DirectionBonus
from eviction.scores.kvzip import KVzip
from eviction.scores.recalibrated import QStats
from eviction.scores.static_route import StaticRoute
from eviction.scores.triattention import TriAttention
from eviction.tasks.needle import Needle, needles

COMMAND = "eviction audit"
PEER_WINDOW = 32  # SnapKV's observation window, here and in what the peer is asked
PEER_PRESSES = (  # kvpress's names of the methods that are audited here too
    *("snapkv", "streaming_llm", "tova", "knorm", "keydiff", "expected_attention"),
    *("pyramidkv", "adakv(snapkv)", "adakv(expected_attention)"),
)
TEXT = CHECKOUT / "data" / "text" / "austen-heldout.txt"
CALIBRATION_DOCUMENTS = 4  # of the length of a prompt


@dataclass(frozen=True)
class Request:
    """What is audited, of every model: nominal budgets (entries a KV head), how many prompts of how many tokens.

    batch: prompts that are run together. device, dtype: as capture takes them. text: where the prompts' prose is from.
    methods: their names, as eviction.combinations.parsed() takes them; none: the default list.
    """

    budgets: tuple[int, ...] = (64,)
    prompts: int = 24
    length: int = 384
    seed: int = 0
    batch: int = 12
    device: str = "cpu"
    dtype: str = "float32"
    text: Path = TEXT
    methods: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises BadInput for numbers that mean nothing and for methods that there are not."""
        for name, value in (("prompts", self.prompts), ("length", self.length), ("batch", self.batch)):
            if value < 1:
                raise BadInput(f"--{name} {value}: expected at least 1")
        if not self.budgets or min(self.budgets) < 1 or len(set(self.budgets)) < len(self.budgets):
            raise BadInput(f"--budget {','.join(map(str, self.budgets))}: expected different numbers from 1 up")
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise BadInput(f"--dtype {self.dtype}: expected float32, bfloat16 or float16")
        methods(self.methods)

    def idle(self) -> list[int]:
        """Budgets at which nothing of a prompt is evicted, however it is read."""
        return [budget for budget in self.budgets if budget >= self.length]


def audit(store: Store, models: Sequence[Source], request: Request) -> list[Path]:
    """Bring table audit up to date for each model, one file a model; returns the files. Current ones are left alone.

    Files of models not named stay. A method whose budget does not allow it (ContourKV below its recency floor) is left
    out with a line that says so. Raises BadInput for a request, a text, a tokenizer or a model that does not fit.
    """
    request.check()
    for budget in request.idle():
        print(f"--budget {budget}: prompts of {request.length} tokens fit into it: nothing is evicted at that budget")
    paths = []
    for source in models:
        path = store.audit(source.label)
        written = refresh(AUDIT, path, _provenance(source, request), partial(_audited, source, request))
        print(f"{path}: {'written' if written else 'current, nothing to do'}")
        paths.append(path)
    return paths


def ask_peer(store: Store, models: Sequence[Source], request: Request) -> Path:
    """Write the audit's prompts as the question that peers/kvpress/audit.py reads; returns the file.

    Its answer belongs beside it (Store.peer_audit), where the page looks for it. Raises BadInput as audit() does, and
    for methods: kvpress is asked for PEER_PRESSES.
    """
    request.check()
    if request.methods:
        raise BadInput("--ask-peer with --method: kvpress is asked for its own list of methods: leave --method out")
    asked = [
        {
            "label": source.label,
            "folder": str(source.folder),
            "prompts": [
                {"context_ids": one.context, "question_ids": one.question, "answer_ids": one.answer}
                for one in _prompts(source, request)
            ],
        }
        for source in models
    ]
    question = {
        "models": asked,
        "budgets": list(request.budgets),
        "presses": list(PEER_PRESSES),
        "window": PEER_WINDOW,
        "dtype": request.dtype,
    }
    write_text(store.peer_question(), json.dumps(question) + "\n")
    return store.peer_question()


def _prompts(source: Source, request: Request) -> list[Needle]:
    """The prompts of one model; raises BadInput if they are longer than it can read."""
    tokenizer = checkpoints.load_tokenizer(source)
    begin = documents.begin_ids(tokenizer, source.model_type, source.begins)
    prompts = needles(tokenizer, begin, request.text, request.prompts, request.length, request.seed)
    longest = checkpoints.load_config(source).max_position_embeddings
    if request.length + len(prompts[0].answer) > longest:
        raise BadInput(f"--length {request.length}: {source.label} has positions for {longest} tokens, answer included")
    return prompts


def _provenance(source: Source, request: Request) -> Provenance:
    chosen = methods(request.methods)
    parameters = {
        "methods": [[x.name, x.score, x.allocator, x.selector, x.storage, x.state] for x in chosen],
        "budgets": list(request.budgets),
        "prompts": request.prompts,
        "length": request.length,
        "batch": request.batch,
        "device": request.device,
        "dtype": request.dtype,
    }
    inputs = {"checkpoint": source.digest, "text": sha256(request.text)} | files(chosen)
    return Provenance(COMMAND, parameters, request.seed, inputs, code_digest("data", "capture", "eviction"))


def _audited(source: Source, request: Request) -> pl.DataFrame:
    """Table audit of one model."""
    prompts = _prompts(source, request)
    model = checkpoints.load_causal(source, request.device, request.dtype)
    chosen = methods(request.methods)
    scores = _prepared(source, request, chosen)
    tallies: dict[_Row, _Tally] = defaultdict(_Tally)
    left_out: dict[_Row, str] = {}
    starts = range(0, len(prompts), request.batch)
    for start in track(starts, len(starts), source.label):
        batch = prompts[start : start + request.batch]
        _run_batch(model, batch, chosen, request.budgets, scores, tallies, left_out)
    for name, budget, why in dict.fromkeys((row.method.name, row.budget, why) for row, why in left_out.items()):
        print(f"{source.label}: {name} at {budget} left out ({why})")
    if all(row.budget is None for row in tallies):
        raise BadInput(
            f"{source.label}: none of the methods could be run at budget {','.join(map(str, request.budgets))}"
        )
    rows = [
        _record(source, request.length, row, tally, tallies[_Row(row.question_seen, _FULL, None)])
        for row, tally in tallies.items()
    ]
    return pl.DataFrame(rows, schema={name: column.dtype for name, column in AUDIT.columns.items()})


@dataclass(frozen=True)
class _Row:
    """What names a row of the table, within a model."""

    question_seen: bool
    method: Method
    budget: int | None


_FULL = Method(FULL_CACHE, None)


@dataclass
class _Tally:
    """What was measured on the prompts of a row, batch by batch; bytes are of one sequence."""

    prompts: int = 0
    hits: int = 0
    nominal_entries: int | None = None
    nominal_bytes: int | None = None
    measured: list[dict[str, float]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def mean(self, name: str) -> float:
        """Mean over prompts."""
        return sum(x[name] * n for x, n in zip(self.measured, self.sizes, strict=True)) / self.prompts

    def all(self, name: str) -> list[float]:
        """Every batch's."""
        return [x[name] for x in self.measured]


def _run_batch(
    model: PreTrainedModel,
    batch: Sequence[Needle],
    chosen: Sequence[Method],
    budgets: Sequence[int],
    scores: Mapping[str, Score],
    tallies: dict[_Row, _Tally],
    left_out: dict[_Row, str],
) -> None:
    """Every method at every budget, with the question unseen and seen, on one batch."""
    prompt = torch.tensor([needle.context + needle.question for needle in batch], device=model.device)
    recording = recorded(model, prompt)
    dense = _dense_seconds(model, prompt) / len(batch)
    for seen in (False, True):
        own = recording if seen else recording.first(len(batch[0].context))
        for method in chosen:
            for budget in budgets if method.score is not None else (None,):
                row = _Row(seen, method, budget)
                if row in left_out:
                    continue
                try:
                    score = None if method.score is None else scores[method.score]
                    _run(model, batch, own, row, score, tallies[row], dense)
                except BadInput as error:
                    if method.score is None:  # the model itself is at fault, not a method's budget
                        raise
                    left_out[row] = str(error)
                    tallies.pop(row, None)


def _run(
    model: PreTrainedModel,
    batch: Sequence[Needle],
    recording: Recording,
    row: _Row,
    score: Score | None,
    tally: _Tally,
    dense: float,
) -> None:
    """One method on one batch: read the context (or the whole prompt), evict, measure, answer. score: the method's."""
    method, size = row.method, len(batch)
    context = torch.tensor([needle.context for needle in batch], device=model.device)
    question = torch.tensor([needle.question for needle in batch], device=model.device)
    answer = len(batch[0].answer)
    with evict(
        model,
        score=score,
        allocator=method.allocator,
        selector=method.selector,
        budget=row.budget,
        storage=method.storage,
        state=method.state,
    ) as run:
        # a score that has the prompt read again makes passes that were not recorded
        with nullcontext() if isinstance(score, Reconstruction) else replayed(model, recording):
            if row.question_seen:
                logits = model(input_ids=torch.cat([context, question], dim=1), logits_to_keep=1).logits[:, -1]
            else:
                run.prefill(context)
        found = _held(run, size)
        with run.question():
            if row.question_seen:  # the pass that was evicted from has already said the first token
                first = logits.argmax(-1, keepdim=True)
                tokens = torch.cat([first, _greedy(run, first, answer - 1)], dim=1)
            else:
                tokens = _greedy(run, question, answer)
        found |= {
            "decode_bytes": run.ledger.mean_bytes("decode") / size,
            "peak_bytes": run.ledger.peak_bytes / size,
            "mean_cache_len": run.ledger.mean_length("decode"),
            "compression_seconds": run.seconds / size,
            "dense_prefill_seconds": dense,
        }
        if row.budget is not None:
            read = context.shape[1] + (question.shape[1] if row.question_seen else 0)
            entries = [(shape, min(row.budget, shape.holds(read))) for shape in run.cache.shapes]
            tally.nominal_entries = sum(shape.kv_heads * n for shape, n in entries)
            # of the model's own keys and values, whatever the state makes of them
            sizes = [shape.read_bytes or shape.entry_bytes for shape, _ in entries]
            tally.nominal_bytes = sum(
                shape.kv_heads * n * size for (shape, n), size in zip(entries, sizes, strict=True)
            )
    tally.prompts += size
    tally.hits += sum(needle.hit(said) for needle, said in zip(batch, tokens.tolist(), strict=True))
    tally.measured.append(found)
    tally.sizes.append(size)


def _prepared(source: Source, request: Request, chosen: Sequence[Method]) -> dict[str, Score]:
    """The score of every method by its name; what a name alone does not give is measured, where a method needs it.

    Words of the model's own, statistics of its queries, routes of its heads: measured on documents of the text that the
    prompts' prose is from, so that they know the prose, not the needles. Traces for Q_stats begin with half a document,
    which the model writes to its end, greedily. Routes are of SnapKV and of the first budget asked for, and the last
    quarter of a document is read after it.
    """
    length = min(request.length, source.length)
    on, half, quarter = (request.device, request.dtype), max(1, length // 2), max(1, length // 4)
    text, docs, budget = [request.text], CALIBRATION_DOCUMENTS, min(request.budgets[0], half)

    @cache
    def read() -> Statistics:
        return calibrated(source, text, docs, length, *on)

    def ready(score: Score) -> Score:
        if isinstance(score, KVzip):
            return KVzip.asking(checkpoints.load_tokenizer(source), score.chunk, score.sinks)
        if isinstance(score, QStats) and score.statistics is None:
            written = calibrated(source, text, docs, length - half, *on, generation=Generation(half))
            return replace(score, statistics=written)
        if isinstance(score, TriAttention) and score.statistics is None:
            return replace(score, statistics=read())
        if isinstance(score, DirectionBonus) and score.base == TriAttention.name:
            return replace(score, base=TriAttention(statistics=read()))
        if isinstance(score, StaticRoute) and score.routes is None:
            return replace(score, routes=routed(source, text, "snapkv", budget, docs, length, quarter, *on))
        return score

    names = dict.fromkeys(method.score for method in chosen if method.score is not None)
    return {name: ready(named(Score, name)) for name in names}


def _greedy(run: Run, ids: torch.Tensor, count: int) -> torch.Tensor:
    """count tokens after ids, (B, count); an end of text does not end them, as all are graded alike."""
    tokens: torch.Tensor = run.generate(ids, min_new_tokens=count, max_new_tokens=count, pad_token_id=0)
    return tokens


def _held(run: Run, size: int) -> dict[str, float]:
    """Bytes of one sequence right after evicting, mean over the batch."""
    logical = 0
    for sequence in range(size):
        for shape, heads in zip(run.cache.shapes, run.kept_of(sequence), strict=True):
            logical += sum(len(kept) for kept in heads) * shape.entry_bytes
    return {
        "logical_bytes": logical / size,
        "physical_bytes": run.bytes / size,
        "side_bytes": run.side_bytes / size,
    }


def _dense_seconds(model: PreTrainedModel, prompt: torch.Tensor) -> float:
    """Seconds of the model's own pass over the prompt (B, N), with its own cache and attention."""
    with torch.inference_mode():
        _wait(model)
        start = time.perf_counter()
        model(input_ids=prompt, use_cache=True, logits_to_keep=1)
        _wait(model)
    return time.perf_counter() - start


def _wait(model: PreTrainedModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def _record(source: Source, tokens: int, row: _Row, tally: _Tally, full: _Tally) -> dict[str, object]:
    """A row of table audit. full: the full cache on the same prompts."""
    method = row.method
    interval = scipy.stats.binomtest(tally.hits, tally.prompts).proportion_ci(0.95, method="wilson")
    full_bytes = full.all("physical_bytes")
    physical = tally.all("physical_bytes")
    within = tally.nominal_bytes is not None and all(held <= tally.nominal_bytes for held in physical)
    seconds = {name: statistics.median(tally.all(name)) for name in ("compression_seconds", "dense_prefill_seconds")}
    means = ("logical_bytes", "physical_bytes", "decode_bytes", "side_bytes", "mean_cache_len")
    evicts = method.score is not None
    return {
        "family": source.family,
        "model": source.label,
        "method": method.name,
        "score": method.score,
        "allocator": method.allocator if evicts else None,
        "selector": method.selector if evicts else None,
        "storage": method.storage,
        "state": method.state if evicts else None,
        "budget": row.budget,
        "question_seen": row.question_seen,
        "tokens": tokens,
        "prompts": tally.prompts,
        "hits": tally.hits,
        "hit_rate": tally.hits / tally.prompts,
        "hit_rate_low": float(interval.low),
        "hit_rate_high": float(interval.high),
        "nominal_entries": tally.nominal_entries,
        "nominal_bytes": tally.nominal_bytes,
        **{name: tally.mean(name) for name in means},
        "peak_bytes": max(tally.all("peak_bytes")),
        "full_bytes": full.mean("physical_bytes"),
        **seconds,
        "enforced": within,
        "holds_full_cache": all(held >= whole for held, whole in zip(physical, full_bytes, strict=True)),
    }
