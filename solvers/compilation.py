"""Says so when importing the kernels will compile them, which happens once per machine and version."""

import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numba

KERNELS = Path(__file__).with_name("kernels.py")


@contextmanager
def announced() -> Iterator[None]:
    """Around the import of the kernels: a line on stderr if numba's cache does not hold them yet."""
    fingerprint = hashlib.sha256(f"{numba.__version__} {sys.version} {_processor()}".encode() + KERNELS.read_bytes())
    name = f"kernels.{fingerprint.hexdigest()[:16]}.compiled"
    marker = next((place / name for place in _places() if (place / name).exists()), None)
    if marker is None:
        print("Compiling the solver kernels (once, up to a minute)...", file=sys.stderr, flush=True)
    yield
    if marker is None:
        for place in _places():
            try:
                place.mkdir(parents=True, exist_ok=True)
                (place / name).touch()
                return
            except OSError:
                continue  # numba, too, goes on to the next place


def _places() -> list[Path]:
    """Where numba keeps its cache: the folder that its variable names, beside the source, or the user's own."""
    named = os.environ.get("NUMBA_CACHE_DIR")
    return [Path(named)] if named else [KERNELS.parent / "__pycache__", Path.home() / ".cache" / "numba"]


def _processor() -> str:
    from llvmlite import binding

    return str(binding.get_host_cpu_name())
