"""The memory of one long row, measured in a process of its own."""

import multiprocessing
import resource
import sys
import time
from multiprocessing.connection import Connection

import numpy as np

from solvers import Instance, certify

KEYS, DIMENSIONS, BUDGET, SECONDS = 16_384, 128, 32, 2.0


def peak_of_long_row() -> tuple[int, float, float]:
    """Peak resident bytes of a new process that certifies a flat random row of 16,384 keys, its seconds, their limit.

    The row is flat and random, so the search goes on to its limit. Call it while this process is small: on Linux a
    new process may start its count of the peak at what its parent holds.
    """
    here, there = multiprocessing.get_context("spawn").Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=_certify_long_row, args=(there,))
    process.start()
    there.close()
    peak, seconds = here.recv()
    process.join()
    return peak, seconds, SECONDS


def _certify_long_row(answer: Connection) -> None:
    random = np.random.default_rng(0)
    weights = np.exp(random.standard_normal(KEYS))
    row = Instance(weights / weights.sum(), random.standard_normal((KEYS, DIMENSIONS)))
    began = time.perf_counter()
    certify(row, BUDGET, time_limit=SECONDS)
    seconds = time.perf_counter() - began
    unit = 1 if sys.platform == "darwin" else 1024
    answer.send((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, seconds))
