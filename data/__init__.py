"""What a row is, and where artefacts live: schemas, the Parquet store, published numbers. Imports nothing of ours."""

from data.errors import BadInput
from data.store import Provenance, Store

__all__ = ["BadInput", "Provenance", "Store"]
