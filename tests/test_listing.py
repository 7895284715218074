"""The README's table of methods is what the code lists."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import eviction.scores
from data import BadInput
from eviction import evict
from eviction.calibration import Generation
from eviction.decoding.state_lines import StateLines
from eviction.listing import markdown, parts
from eviction.method import Score, listed
from eviction.scores.kvzip import KVzip
from tests.test_run import small_model

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- python -m eviction list --markdown -->\n", "<!-- end -->"


def test_the_readme_lists_every_part() -> None:
    text = README.read_text("utf-8")
    assert text.split(BEGIN)[1].split(END)[0].strip() == markdown().strip()


def test_every_part_names_its_source() -> None:
    for kind, name, _, source in parts():
        assert source, f"{kind} {name}"


def python_of_the_readme(begins: str) -> str:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    return next(block for block in blocks if block.startswith(begins))


def test_the_readmes_example_finds_its_needle(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(README.parent)
    exec(python_of_the_readme("import torch"), {})
    assert capsys.readouterr().out.startswith(" 4821 Run(tokens read: ")


PART = python_of_the_readme("# eviction/scores/value_norm.py")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("value_norm", PART, None),
        (
            "a_copy",
            PART.replace('"value_norm"', '"knorm"'),
            r"a_copy: its name, 'knorm', is eviction\.scores\.knorm's already",
        ),
        (
            "a_plain",
            PART.replace("@dataclass(frozen=True)", ""),
            "ValueNorm in eviction.scores.a_plain: expected a frozen",
        ),
        ("a_blank", PART.replace('"value_norm"', "None"), "class attributes name and source"),
    ],
)
def test_a_file_of_ones_own_is_listed_or_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, message: str | None
) -> None:
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setattr(eviction.scores, "__path__", [*eviction.scores.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, f"eviction.scores.{name}", raising=False)
    if message is None:
        with evict(small_model("llama"), "value_norm:power=2", budget=4) as run:
            run.prefill(torch.arange(2, 22))
            values = run.cache.layers[0].pages[0].values
        assert len(run.kept[0][0]) == 4 and values.shape[0] == 4 * run.cache.shapes[0].kv_heads
    else:
        with pytest.raises(BadInput, match=message):
            listed(Score)
    sys.modules.pop(f"eviction.scores.{name}", None)


@pytest.mark.parametrize("asking", [StateLines.asking, KVzip.asking])
@pytest.mark.parametrize("wrong", [None, "qwen"])
def test_a_name_is_no_tokenizer(asking: Callable[[Any], object], wrong: Any) -> None:
    with pytest.raises(BadInput, match=f"tokenizer {wrong!r}: expected a tokenizer"):
        asking(wrong)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"temperature": 1e-40}, "expected 0 or at least 1e-06"),
        ({"temperature": -1}, "temperature=-1"),
        ({"seed": 10**20}, "seed=100000000000000000000"),
        ({"tokens": 0}, "generate=0"),
    ],
)
def test_generation_of_traces_is_checked(numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Generation(**{"tokens": 4, **numbers})
