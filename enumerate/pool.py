"""Work spread over processes: pieces of work that belong together come back together."""

import multiprocessing
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from data import BadInput

Key = TypeVar("Key")
Piece = TypeVar("Piece")
Result = TypeVar("Result")


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def spread(
    pieces: Mapping[Key, Sequence[Piece]], call: Callable[[Piece], Result], workers: int
) -> Iterator[tuple[Key, list[Result]]]:
    """Each key with what `call` gave for its pieces, in their order, as soon as all of them are done.

    call: a function that can be sent to a spawned process (of a module, or a functools.partial of one). Raises what
    it raises, and BadInput if a worker dies; what was yielded before is the caller's.
    """
    if not pieces:
        return
    # A spawned worker must not inherit threads: its BLAS uses one, since the workers fill the cores.
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "POLARS_MAX_THREADS"):
        os.environ.setdefault(variable, "1")
    done: dict[Key, dict[int, Result]] = defaultdict(dict)
    pool = ProcessPoolExecutor(
        min(workers, sum(map(len, pieces.values()))),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_end_with,
        initargs=(os.getpid(),),
    )
    try:
        futures: dict[Future[Result], tuple[Key, int]] = {
            pool.submit(call, piece): (key, place) for key, parts in pieces.items() for place, piece in enumerate(parts)
        }
        for future in as_completed(futures):
            key, place = futures.pop(future)
            done[key][place] = future.result()
            if len(done[key]) == len(pieces[key]):
                results = done.pop(key)
                yield key, [results[place] for place in sorted(results)]
    except BrokenProcessPool as error:
        raise BadInput(
            "a worker process died (out of memory, or killed): finished documents are kept; run the command again"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _end_with(parent: int) -> None:
    """In a worker: end when the parent is gone, as it cannot say so itself when it is killed."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
