"""One row, for a person: its tokens and weights, what each rule keeps of it, and what that costs."""

import time

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from data import Store
from data.schema import TOKENS
from data.store import read
from enumerate.rows import captured_rows
from enumerate.rules import grade, grade_user
from enumerate.user_rule import UserRule, apply, load
from solvers import leverage_scores
from solvers.load import find_row


def show(store: Store, row_id: str, s: int, console: Console, rule: UserRule | None = None) -> None:
    """Print one captured row at one budget: every key that some rule keeps, heaviest first, and each rule's errors.

    A user's rule comes last. Raises BadInput for an id that is not there or a user's rule that fails, ValueError
    for a budget that the row cannot hold.
    """
    record = find_row(store, row_id)
    rows = captured_rows(store, record["model"], record["doc_id"], record["layer"])
    row = next(row for row in rows if row.row_id == row_id)
    scores = None if row.keys is None else leverage_scores(row.keys)
    graded = list(grade(row, s, "branch_and_bound", scores))
    if rule is not None:
        function = load(rule)
        began = time.perf_counter()
        kept = apply(rule, function, row, s)
        graded.append(grade_user(row.instance, rule.name, kept, time.perf_counter() - began))
    tokens_path = store.tokens(record["model"], record["doc_id"])
    tokens = read(TOKENS, tokens_path).sort("position")
    text = dict(zip(tokens["position"], tokens["text"], strict=True))

    here = record["position"]
    context = "".join(text.get(position, "") for position in range(max(0, here - 24), here + 1))
    instance = row.instance
    console.print(f"row {row_id}: {instance.n} keys from position {row.first_key}, scale {record['scale']:.4g}")
    console.print(f"... {escape(context)!s}  <- query")

    errors = Table(title=f"rules at s = {s}")
    for heading in ("rule", "search", "e_s", "e_s / top-mass", "kept mass", "free error", "nodes", "ms"):
        errors.add_column(heading, justify="left" if heading in ("rule", "search") else "right")
    top_error = graded[0].error
    for one in graded:
        ratio = f"{one.error / top_error:.4f}" if top_error > instance.rounding else "-"
        errors.add_row(
            one.rule,
            one.search,
            f"{one.error:.6g}",
            ratio,
            f"{instance.kept_mass(one.subset):.4f}",
            f"{one.free_error:.6g}",
            str(one.nodes),
            f"{one.seconds * 1e3:.3f}",
        )
    console.print(errors)

    keys = Table(title="keys that a rule keeps, by weight")
    for heading in ("position", "token", "weight", "|v - mu|", *(one.rule for one in graded)):
        keys.add_column(heading, justify="left" if heading == "token" else "right", overflow="fold")
    shown = sorted({int(j) for one in graded for j in one.subset}, key=lambda j: (-instance.weights[j], j))
    for j in shown:
        position = row.first_key + j
        marks = ["x" if j in one.subset else "" for one in graded]
        token = escape(repr(text.get(position, "")))
        keys.add_row(str(position), token, f"{instance.weights[j]:.5f}", f"{instance.distances[j]:.4g}", *marks)
    console.print(keys)
