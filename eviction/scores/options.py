"""Checks of options that scores share."""

from data import BadInput


def check_whole(score: str, option: str, value: object, least: int) -> None:
    """Raises BadInput unless the option's value is a whole number, at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise BadInput(f"score {score}: {option}={value}: expected a whole number, at least {least}")


def check_one_of(score: str, option: str, value: object, names: tuple[str, ...]) -> None:
    """Raises BadInput unless the option's value is one of the names."""
    if value not in names:
        raise BadInput(f"score {score}: {option}={value}: expected {' or '.join(names)}")
