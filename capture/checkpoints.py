"""Finding a checkpoint (embedded, a folder, a GGUF file, a Hub name), saying what it is, and loading it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capture import packages
from capture.families import (
    FAMILIES,
    GEMMA_270M_BEGINS,
    GEMMA_270M_LABEL,
    GEMMA_270M_LENGTH,
    family_named,
    family_of,
)
from data import BadInput
from data.store import CHECKOUT, digest_of, sha256

if TYPE_CHECKING:  # torch and transformers take seconds to import, and a run that finds all current needs neither
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HUB_FILES = ["*.safetensors", "*.json", "tokenizer.model", "*.txt"]
HUB_TIMEOUT = 10.0  # seconds before a Hub that does not answer counts as not there
LONGEST_DEFAULT = 2048  # tokens of a document where neither the user nor a record says


@dataclass(frozen=True)
class Source:
    """A checkpoint on this machine.

    folder holds it; gguf is the name of its GGUF file there, or None for safetensors. label: its name in
    tables. begins: as in families.Family; None where no record speaks. length: default tokens of a document.
    digest: sha256 over the files that make the model and its tokenizer.
    """

    folder: Path
    gguf: str | None
    family: str
    model_type: str
    label: str
    begins: str | None
    length: int
    digest: str


def find(model: str | None, checkpoint: str | None, gemma_terms: str | None = None) -> Source:
    """The checkpoint that a user means: a family's default, or one of their own (a name on the Hub, a folder, a file).

    Raises BadInput with one line: unknown family; a checkpoint that is not there, not whole, or of another
    family than the one named; no network; terms not accepted.
    """
    family = family_named(model) if model is not None else None
    if gemma_terms is not None and (gemma_terms != "accept" or model != "gemma" or checkpoint is not None):
        raise BadInput(
            f"--gemma-terms {gemma_terms}: expected `accept`, with --model gemma and no --checkpoint"
            " (it stands for the real Gemma 3 270M under the Gemma Terms of Use)"
        )
    if checkpoint is None:
        if family is None:
            raise BadInput(f"no model: give --model ({', '.join(FAMILIES)}) or --checkpoint (a Hub name or a folder)")
        if gemma_terms is not None:
            folder = packages.gemma_folder(accept_terms=True)
            return _source(folder, None, GEMMA_270M_LABEL, GEMMA_270M_BEGINS, GEMMA_270M_LENGTH)
        if family.folder is None:
            folder = packages.smollm2_folder()
        else:
            folder = CHECKOUT / "data" / "models" / family.folder
        return _source(folder, None, family.label, family.begins, family.length)
    folder, gguf, name = _locate(checkpoint)
    begins = next((known.hub_begins for known in FAMILIES.values() if known.hub == checkpoint), None)
    found = _source(folder, gguf, _label(name), begins, None)
    if family is not None and found.family != family.name:
        raise BadInput(
            f"{checkpoint} is a {found.model_type} model ({found.family}), not of the family {family.name}:"
            f" expected {' or '.join(family.model_types)}; leave --model off to capture it"
        )
    return found


def load_config(source: Source) -> PretrainedConfig:
    """The checkpoint's configuration: of its text part, where it has several."""
    from transformers import AutoConfig

    if source.gguf is not None:
        return _gguf_config(source.folder, source.gguf)
    with _readable(source):
        config = AutoConfig.from_pretrained(source.folder)
        text: PretrainedConfig = config.get_text_config()
    return text


def load_tokenizer(source: Source) -> PreTrainedTokenizerBase:
    """The checkpoint's own tokenizer; raises BadInput if it has none that transformers can read."""
    from transformers import AutoTokenizer

    with _readable(source):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source.folder, **_gguf(source))
        written = tokenizer("a", add_special_tokens=False).input_ids
    if not written:  # transformers makes an empty tokenizer where the files are missing
        raise BadInput(f"{source.folder}: no tokenizer there: expected the model's own (tokenizer.json)")
    return tokenizer


def load_model(source: Source, device: str, dtype: str) -> PreTrainedModel:
    """The checkpoint's decoder, without its output matrix: where no logits are needed. Otherwise as load_causal()."""
    decoder: PreTrainedModel = load_causal(source, device, dtype).get_decoder()
    return decoder


def load_causal(source: Source, device: str, dtype: str) -> PreTrainedModel:
    """The checkpoint's model, in eval mode.

    dtype: float32, bfloat16 or float16. Raises BadInput if the weights are not whole (transformers would fill
    the rest with random numbers), if they cannot be read, or if the device is not there.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # a second's bar, and ours follows
    logging.set_verbosity_error()  # what is missing is refused below, in one line

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise BadInput(f"--device {device} is not available here ({_first_line(error)})") from error
    with _readable(source):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source.folder, dtype=getattr(torch, dtype), output_loading_info=True, **_gguf(source)
        )
        model, report = loaded
    wrong = sorted(report["missing_keys"]) + sorted(str(key) for key, *_ in report["mismatched_keys"])
    if wrong:
        raise BadInput(
            f"{source.folder}: weights missing or of the wrong shape ({', '.join(wrong[:3])}, {len(wrong)} in all)"
        )
    ready: PreTrainedModel = model.to(device).eval().requires_grad_(False)
    return ready


def weight_bytes(source: Source) -> int:
    """Bytes of the checkpoint's weight files."""
    return sum(path.stat().st_size for path in _files(source.folder, source.gguf) if path.suffix in _WEIGHTS)


_WEIGHTS = (".safetensors", ".gguf")
_DESCRIPTIONS = (".json", ".model", ".txt", ".jinja")


def _locate(checkpoint: str) -> tuple[Path, str | None, str]:
    """Folder, GGUF file in it or None, and the name that labels it."""
    path = Path(checkpoint).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise BadInput(f"{path}: expected a folder, a .gguf file or a Hub name")
        return path.parent, path.name, path.stem
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if (path / "config.json").is_file():
            return path, None, path.resolve().name
        if len(files) != 1:
            raise BadInput(f"{path}: no config.json, and {len(files)} .gguf files: expected a model's folder")
        return path, files[0].name, path.resolve().name
    if not HUB_NAME.fullmatch(checkpoint):
        raise BadInput(f"{checkpoint}: no such folder or file, and not a Hub name (OWNER/NAME)")
    return _from_hub(checkpoint), None, checkpoint.split("/")[1]


def _from_hub(name: str) -> Path:
    """The folder of a Hub checkpoint's safetensors: downloaded, or what an earlier download left in the cache."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        revision = HfApi().model_info(name, timeout=HUB_TIMEOUT).sha
        return Path(snapshot_download(name, revision=revision, allow_patterns=HUB_FILES, etag_timeout=HUB_TIMEOUT))
    except GatedRepoError as error:
        raise BadInput(f"{name}: the Hub asks for a log-in and its terms accepted (`hf auth login`)") from error
    except RepositoryNotFoundError as error:
        raise BadInput(f"{name}: no folder of that name here, and none on the Hub") from error
    except Exception as error:  # each HTTP library that the client may be built on has exceptions of its own
        try:
            return Path(snapshot_download(name, local_files_only=True))
        except LocalEntryNotFoundError:
            raise BadInput(
                f"{name}: no folder of that name here, not in the cache, and the Hub cannot be reached"
                f" ({_first_line(error)})"
            ) from error


def _source(folder: Path, gguf: str | None, label: str, begins: str | None, length: int | None) -> Source:
    if gguf is None and not (folder / "config.json").is_file():
        raise BadInput(f"{folder}: no config.json: expected a model's folder (config, safetensors, tokenizer)")
    files = _files(folder, gguf)
    if not any(path.suffix in _WEIGHTS for path in files):
        raise BadInput(f"{folder}: no .safetensors there: expected a model's weights")
    config = _described(folder, gguf)
    model_type = str(config.get("model_type", "unknown"))
    text = config.get("text_config") or config
    longest = int(text.get("max_position_embeddings") or LONGEST_DEFAULT)
    return Source(
        folder=folder,
        gguf=gguf,
        family=family_of(model_type),
        model_type=model_type,
        label=label,
        begins=begins,
        length=length or min(LONGEST_DEFAULT, longest),
        digest=digest_of(part for path in files for part in (path.name, sha256(path))),
    )


def _files(folder: Path, gguf: str | None) -> list[Path]:
    """The files that make a model and its tokenizer, in order of name."""
    if gguf is not None:
        return [folder / gguf]
    return sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", *_DESCRIPTIONS))


def _described(folder: Path, gguf: str | None) -> dict[str, Any]:
    """The configuration as a plain dictionary."""
    if gguf is not None:
        return dict(_gguf_config(folder, gguf).to_dict())
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise BadInput(f"{folder / 'config.json'}: not readable ({_first_line(error)})") from error
    if not isinstance(found, dict):
        raise BadInput(f"{folder / 'config.json'}: expected a JSON object")
    return found


@lru_cache(maxsize=1)  # transformers takes seconds over it, and it is wanted twice
def _gguf_config(folder: Path, gguf: str) -> PretrainedConfig:
    from transformers import AutoConfig

    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, gguf_file=gguf)
    except Exception as error:  # a broken file fails anywhere in the reader
        raise BadInput(f"{folder / gguf}: not readable as a GGUF model ({_first_line(error)})") from error
    return config


@contextmanager
def _readable(source: Source) -> Iterator[None]:
    """Turns whatever a reader of somebody's files raises into one line that names them."""
    try:
        yield
    except (BadInput, MemoryError):
        raise
    except Exception as error:  # a broken file fails anywhere in the readers
        where = source.folder / source.gguf if source.gguf else source.folder
        raise BadInput(f"{where}: cannot be loaded ({_first_line(error)})") from error


def _gguf(source: Source) -> dict[str, str]:
    return {} if source.gguf is None else {"gguf_file": source.gguf}


def _label(name: str) -> str:
    """A name that is safe as a folder and inside row_id."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-") or "checkpoint"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
