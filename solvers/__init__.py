"""The problem, and everything that returns a subset from numbers alone (numpy and numba, never torch)."""

from solvers.compilation import announced

with announced():
    from solvers import kernels as _kernels  # noqa: F401  (compiled here, so that no later call waits for it)

from solvers.balancing import balancing
from solvers.branch_and_bound import certify, decide
from solvers.candidates import candidate_set, extra_keys
from solvers.certificate import Certificate, Floor
from solvers.dynamic_programme import least_error
from solvers.exhaustive import exhaustive
from solvers.free_weights import frank_wolfe, free_error, least_free_error
from solvers.integer import IntegerInstance
from solvers.leverage import leverage, leverage_scores
from solvers.load import load
from solvers.problem import Instance, attention_weights, top_mass

__all__ = [
    "Certificate",
    "Floor",
    "Instance",
    "IntegerInstance",
    "attention_weights",
    "balancing",
    "candidate_set",
    "certify",
    "decide",
    "exhaustive",
    "extra_keys",
    "frank_wolfe",
    "free_error",
    "least_error",
    "least_free_error",
    "leverage",
    "leverage_scores",
    "load",
    "top_mass",
]
