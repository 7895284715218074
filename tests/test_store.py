"""Schemas refuse what is off them by name; files carry their provenance and are replaced whole or not at all."""

import errno
from pathlib import Path

import polars as pl
import pytest

from data import BadInput, Provenance, Store
from data.schema import SUBSETS, TABLES, TOKENS
from data.store import code_digest, footer, is_current, read, read_all, sha256, write
from tests.small_store import small_store, write_document

MADE = Provenance("test", {"a": 1}, 7, {"x": "y"}, "code", {"note": 2})


def tokens(n: int = 3) -> pl.DataFrame:
    numbers = pl.Series(range(n), dtype=pl.Int32)
    return pl.DataFrame(
        {
            "model": ["m"] * n,
            "doc_id": pl.Series([0] * n, dtype=pl.Int32),
            "position": numbers,
            "token_id": numbers,
            "text": ["t"] * n,
        }
    )


def test_a_frame_comes_back_as_it_was_with_its_provenance(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "tokens.parquet"
    write(TOKENS, tokens(), path, MADE)
    assert read(TOKENS, path).equals(tokens())
    found = footer(TOKENS, path)
    assert (found["table"], found["version"], found["command"], found["seed"]) == ("tokens", 1, "test", 7)
    assert (found["parameters"], found["inputs"], found["notes"]) == ({"a": 1}, {"x": "y"}, {"note": 2})
    assert read_all(TOKENS, [path, path]).height == 6


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda frame: frame.drop("text"), "'text' of table tokens is missing"),
        (lambda frame: frame.with_columns(pl.col("token_id").cast(pl.Int64)), "'token_id' of table tokens is Int64"),
        (lambda frame: frame.with_columns(extra=1), "'extra' is not in table tokens"),
        (lambda frame: frame.with_columns(text=pl.lit(None, dtype=pl.String)), "'text' of table tokens has nulls"),
    ],
)
def test_a_frame_off_its_schema_is_refused_by_column(tmp_path: Path, change: object, said: str) -> None:
    path = tmp_path / "tokens.parquet"
    write(TOKENS, tokens(), path, MADE)
    with pytest.raises(BadInput, match=said):
        write(TOKENS, change(tokens()), path, MADE)  # type: ignore[operator]
    assert read(TOKENS, path).equals(tokens())
    assert [p.name for p in tmp_path.iterdir()] == ["tokens.parquet"]


def test_vectors_of_any_width_fit_and_other_arrays_do_not(tmp_path: Path) -> None:
    store = small_store(tmp_path, 1)
    frame = pl.read_parquet(store.kv("toy", 0, 0))
    TABLES["kv"].check(frame)
    with pytest.raises(BadInput, match=r"'key' of table kv is List"):
        TABLES["kv"].check(frame.with_columns(pl.col("key").arr.to_list()))


def test_a_damaged_or_foreign_file_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "tokens.parquet"
    write(TOKENS, tokens(1000), path, MADE)
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[: len(whole) // 2], b"", b"no parquet at all"):
        path.write_bytes(damaged)
        with pytest.raises(BadInput, match="not readable as Parquet") as caught:
            read(TOKENS, path)
        assert "\n" not in str(caught.value)
        assert not is_current(TOKENS, path, MADE)
    path.write_bytes(whole)
    with pytest.raises(BadInput, match="holds table tokens version 1: expected subsets"):
        read(SUBSETS, path)
    tokens().write_parquet(path)
    with pytest.raises(BadInput, match="no provenance of ours"):
        read(TOKENS, path)
    with pytest.raises(BadInput, match="no such file"):
        read(TOKENS, tmp_path / "absent.parquet")


def test_current_means_made_in_just_this_way(tmp_path: Path) -> None:
    path = tmp_path / "tokens.parquet"
    assert not is_current(TOKENS, path, MADE)
    write(TOKENS, tokens(), path, MADE)
    assert is_current(TOKENS, path, MADE)
    assert is_current(TOKENS, path, Provenance("test", {"a": 1}, 7, {"x": "y"}, "code", {"note": 3}))
    for other in (
        Provenance("test", {"a": 2}, 7, {"x": "y"}, "code"),
        Provenance("test", {"a": 1}, 8, {"x": "y"}, "code"),
        Provenance("test", {"a": 1}, 7, {"x": "z"}, "code"),
        Provenance("test", {"a": 1}, 7, {"x": "y"}, "edited"),
    ):
        assert not is_current(TOKENS, path, other)


def test_a_full_disk_leaves_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tokens.parquet"
    write(TOKENS, tokens(), path, MADE)
    before = sha256(path)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)  # of the copy that stands beside the file until it is whole
    with pytest.raises(OSError, match="No space left"):
        write(TOKENS, tokens(5), path, MADE)
    assert sha256(path) == before
    assert [p.name for p in tmp_path.iterdir()] == ["tokens.parquet"]


def test_code_digest_follows_the_source() -> None:
    assert code_digest("data") == code_digest("data")
    assert code_digest("data") != code_digest("data", "solvers")


def test_models_are_those_with_rows(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.models() == []
    write_document(store, "b")
    write_document(store, "a")
    assert store.models() == ["a", "b"]


def test_a_footer_that_is_damaged_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "tokens.parquet"
    for entry in ("{", "[]", '{"table": "tokens"}'):
        tokens().write_parquet(path, metadata={"forced_weights": entry})
        with pytest.raises(BadInput, match="its footer is damaged"):
            footer(TOKENS, path)
