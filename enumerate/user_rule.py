"""A user's own selection rule, graded beside ours: (weights, keys, values, query, s) -> indices."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data import BadInput
from enumerate.rows import RowToGrade
from solvers.problem import Indices

RESERVED = ("standard", "facts", "certified")  # folders of the store beside which a user's rule gets its own


@dataclass(frozen=True)
class UserRule:
    """FILE.py:FUNCTION, and the name under which its subsets appear (the function's)."""

    path: Path
    function: str

    @property
    def name(self) -> str:
        """The rule's name in every table."""
        return self.function


def parse(spec: str, taken: tuple[str, ...]) -> UserRule:
    """RULE=FILE.py:FUNCTION; raises BadInput unless both exist and the name is not one of ours."""
    file, colon, function = spec.rpartition(":")
    if not colon or not function.isidentifier():
        raise BadInput(f"RULE={spec}: expected FILE.py:FUNCTION")
    if not Path(file).is_file():
        raise BadInput(f"RULE={spec}: there is no file {file}")
    if function in (*taken, *RESERVED):
        raise BadInput(f"RULE={spec}: {function} is a name of ours; expected another")
    rule = UserRule(Path(file).resolve(), function)
    load(rule)
    return rule


def load(rule: UserRule) -> Callable[..., Any]:
    """The function; raises BadInput if its file does not run or lacks it."""
    spec = importlib.util.spec_from_file_location(f"user_rule_{rule.path.stem}", rule.path)
    if spec is None or spec.loader is None:
        raise BadInput(f"RULE={rule.path}: not a Python file; expected FILE.py:FUNCTION")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise BadInput(f"RULE={rule.path}: does not run ({type(error).__name__}: {error})") from error
    function = getattr(module, rule.function, None)
    if not callable(function):
        raise BadInput(f"RULE={rule.path}:{rule.function}: the file has no such function")
    return function  # type: ignore[no-any-return]


def apply(rule: UserRule, function: Callable[..., Any], row: RowToGrade, s: int) -> Indices:
    """What the rule keeps: s distinct row-local indices, sorted; raises BadInput with the row if it returns less.

    The rule gets read-only arrays: weights (n,) and values (n, d) in float64, keys (n, d) and query (d,) as
    captured (None for rows that have none, such as a user's own without them), and s.
    """
    instance = row.instance
    arrays = [instance.weights, row.keys, instance.values, row.query]
    views = [None if array is None else array.copy() for array in arrays]  # a rule cannot change what it is graded on
    for view in views:
        if view is not None:
            view.setflags(write=False)
    try:
        kept = instance.subset(np.asarray(function(*views, s)))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        blind = " (this row has no keys or query: they are None)" if row.keys is None or row.query is None else ""
        raise BadInput(
            f"rule {rule.name} failed on row {row.row_id} at s = {s}: {type(error).__name__}: {error}{blind}"
        ) from error
    if kept.size != s:
        raise BadInput(f"rule {rule.name} kept {kept.size} keys of row {row.row_id}: expected s = {s}")
    return kept
