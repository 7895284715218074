"""The README's table of methods is what the code lists."""

from pathlib import Path

from eviction.listing import markdown, parts

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- python -m eviction list --markdown -->\n", "<!-- end -->"


def test_the_readme_lists_every_part() -> None:
    text = README.read_text("utf-8")
    assert text.split(BEGIN)[1].split(END)[0].strip() == markdown().strip()


def test_every_part_names_its_source() -> None:
    for kind, name, _, source in parts():
        assert source, f"{kind} {name}"
