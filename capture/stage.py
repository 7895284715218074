"""The stage: documents one at a time, each put in place whole, and nothing done that is done already."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from capture import checkpoints, documents, plan
from capture.checkpoints import Source
from capture.plan import Request
from data import BadInput, Provenance, Store
from data.command_line import track
from data.schema import ROWS, TOKENS
from data.store import digest_of, write

if TYPE_CHECKING:  # torch takes seconds to import, and a run that finds all current needs none of it
    import polars as pl
    from transformers import PreTrainedTokenizerBase

    from capture.streaming import Captured


def capture(source: Source, request: Request, store: Store, dry_run: bool = False) -> None:
    """Bring the store up to date with the request: kv, tokens and rows of its documents, and no others of this model.

    Memory is bounded by the model and one layer of one document. A document's files are put in place
    together, its rows last, so a run that was stopped goes on with the first document that is not whole.
    Documents of this model that other settings made, or beyond the number asked for, are removed once the
    first new document is whole (at once if all are current): one model's rows are never a mixture. dry_run:
    check, estimate and print only. Raises BadInput for whatever is wrong with the request, the text, the
    checkpoint or the model's output, and OSError for a full disk; documents already in place are kept.
    """
    length = plan.check(request, source)
    wanted = plan.provenances(request, source, length)
    pending = [doc_id for doc_id, made in enumerate(wanted) if not plan.is_whole(store, source.label, doc_id, made)]
    total = f"{source.label}: {plan.documents_of(len(wanted))} of {length} tokens, {request.rows} positions a layer"
    if not pending:
        print(f"{total}: all current in {store.root}, nothing to do")
        if not dry_run:
            _remove_others(store, source.label, wanted)
        return

    config = checkpoints.load_config(source)
    shape = plan.shape_of(config, checkpoints.weight_bytes(source), source.gguf is not None)
    if shape.longest is not None and length > shape.longest:
        raise BadInput(f"--length {length}: {source.label} has positions for {shape.longest} tokens")
    cost = plan.estimate(shape, len(pending), length, request.dtype)
    print(f"{total}; {len(pending)} to capture: {plan.describe(cost, request.device)}", flush=True)
    plan.check_disk(store, cost.disk)
    tokenizer = checkpoints.load_tokenizer(source)
    begin = documents.begin_ids(tokenizer, source.model_type, source.begins)
    texts = documents.cut(request.text, tokenizer, begin, request.docs, length)
    highest = max(int(ids.max()) for ids in texts)
    if highest >= config.vocab_size:
        raise BadInput(
            f"{source.folder}: its tokenizer gives id {highest}, its model knows {config.vocab_size}: they do not match"
        )
    print(f"{source.label}: documents begin with {tokenizer.convert_ids_to_tokens(begin) or 'the text itself'}")
    if dry_run:
        return

    with _alone(store, source.label):
        _capture(source, request, store, wanted, pending, texts, tokenizer)


@contextmanager
def _alone(store: Store, model: str) -> Iterator[None]:
    """Hold the store's lock for one model; raises BadInput if another process captures it there now."""
    path = store.root / "kv" / f".lock-{model}"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(path, blocking=False):
            yield
    except Timeout as error:
        raise BadInput(f"{store.root}: another process is capturing {model} there; wait for it to end") from error


def _capture(
    source: Source,
    request: Request,
    store: Store,
    wanted: Sequence[Provenance],
    pending: Sequence[int],
    texts: Sequence[documents.Ids],
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Load the model and capture the pending documents, one at a time."""
    from capture.attention import check_faithful
    from capture.streaming import batch_of, capture_document

    model = checkpoints.load_model(source, request.device, request.dtype)
    check_faithful(model, batch_of(model, texts[pending[0]]))
    staging = Store(store.root / "kv" / f".partial-{source.label}")
    shutil.rmtree(staging.root, ignore_errors=True)
    worst = 0.0
    try:
        for doc_id in track(pending, len(pending), source.label):
            ids, made = texts[doc_id], wanted[doc_id]
            found = capture_document(model, ids, source.family, source.label, doc_id, request.rows, made, staging)
            if doc_id == pending[0]:
                _remove_others(store, source.label, wanted)
            tokens = documents.tokens_frame(source.label, doc_id, ids, tokenizer)
            _put_in_place(store, staging, source.label, doc_id, tokens, found, made)
            worst = max(worst, found.worst)
    finally:
        shutil.rmtree(staging.root, ignore_errors=True)
    print(
        f"{source.label}: {plan.documents_of(len(pending))} captured in {store.root}; worst difference between the"
        f" model's output and the float64 recomputation: {worst:.2g} ({request.dtype})"
    )


def _put_in_place(
    store: Store,
    staging: Store,
    model: str,
    doc_id: int,
    tokens: pl.DataFrame,
    found: Captured,
    provenance: Provenance,
) -> None:
    """Move a document's kv files from the staging folder into the store, then write its tokens and, last, its rows."""
    _remove(store, model, doc_id)
    target = store.kv(model, doc_id, 0).parent
    target.parent.mkdir(parents=True, exist_ok=True)
    staging.kv(model, doc_id, 0).parent.rename(target)
    write(TOKENS, tokens, store.tokens(model, doc_id), provenance)
    notes = {
        "kv": {str(layer): digest for layer, digest in found.kv.items()},
        "kv_bytes": {str(layer): size for layer, size in found.kv_bytes.items()},
        "kv_digest": digest_of(found.kv[layer] for layer in sorted(found.kv)),
        "worst_difference": found.worst,
    }
    write(ROWS, found.rows, store.rows(model, doc_id), replace(provenance, notes=notes))


def _remove_others(store: Store, model: str, wanted: Sequence[Provenance]) -> None:
    """Remove every document of a model that is not whole and made as wanted."""
    for doc_id in plan.documents_there(store, model):
        if doc_id >= len(wanted) or not plan.is_whole(store, model, doc_id, wanted[doc_id]):
            print(f"{model}: document {doc_id} of an earlier run with other settings removed")
            _remove(store, model, doc_id)


def _remove(store: Store, model: str, doc_id: int) -> None:
    """Remove a document and the subsets graded on it, its rows first: without them the rest counts for nothing."""
    store.rows(model, doc_id).unlink(missing_ok=True)
    for path in store.derived_from(model, doc_id):
        path.unlink(missing_ok=True)
    store.tokens(model, doc_id).unlink(missing_ok=True)
    shutil.rmtree(store.kv(model, doc_id, 0).parent, ignore_errors=True)
