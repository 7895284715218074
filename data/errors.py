"""The one exception that every stage turns into one clear line and exit code 2."""


class BadInput(ValueError):
    """What is wrong, where, and what was expected, in one line that a person can act on."""

    def __init__(self, what: str) -> None:
        super().__init__(" ".join(what.split()))
