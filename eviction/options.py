"""Checks of the options of a part; `what` names the part in the message, as in "allocator contour"."""

import math
from collections.abc import Sequence

from data import BadInput


def check_whole(what: str, option: str, value: object, least: int, most: int | None = None) -> None:
    """Raises BadInput unless the value is a whole number of at least `least` and at most `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        limits = f"at least {least}" if most is None else f"from {least} to {most}"
        raise BadInput(f"{what}: {option}={value}: expected a whole number, {limits}")


def check_number(what: str, option: str, value: object, least: float, most: float = math.inf) -> None:
    """Raises BadInput unless the value is a finite number between `least` and `most`, both included."""
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not math.isfinite(value) or not least <= value <= most:  # type: ignore[arg-type,operator]
        between = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
        raise BadInput(f"{what}: {option}={value}: expected a number {between}")


def check_one_of(what: str, option: str, value: object, names: Sequence[str]) -> None:
    """Raises BadInput unless the value is one of the names."""
    if value not in names:
        raise BadInput(f"{what}: {option}={value}: expected {' or '.join(names)}")


def check_flag(what: str, option: str, value: object) -> None:
    """Raises BadInput unless the value is True or False."""
    if not isinstance(value, bool):
        raise BadInput(f"{what}: {option}={value}: expected true or false")


def check_tokenizer(what: str, tokenizer: object) -> None:
    """Raises BadInput for what is no tokenizer, such as the name of one."""
    if not callable(tokenizer):
        raise BadInput(
            f"{what}: tokenizer {tokenizer!r}: expected a tokenizer, such as AutoTokenizer.from_pretrained makes"
        )
