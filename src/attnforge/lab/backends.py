"""Where cells run: processes of this machine, or a dask cluster. Both through joblib, results as they come."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from multiprocessing import resource_tracker
from typing import Any

from ..errors import ArgumentError, AttnforgeError, closest
from ..report._optional import require

BACKENDS = ("processes", "dask")
PATIENCE = 5  # seconds to wait for a scheduler to answer
Call = tuple[Callable[..., Any], tuple[Any, ...]]


@contextmanager
def parallel(
    calls: Sequence[Call], jobs: int | None, backend: str, scheduler: str | None, threads: int
) -> Iterator[Iterator[Any]]:
    """The results of the calls, in the order in which they are ready."""
    if backend not in BACKENDS:
        raise ArgumentError(f"the backend is one of {', '.join(BACKENDS)}, got '{backend}'{closest(backend, BACKENDS)}")
    if scheduler is not None and backend != "dask":
        raise ArgumentError(f"a scheduler's address goes with the backend dask; the backend is {backend}")
    joblib = require("joblib", "lab")
    jobs = min(jobs or joblib.cpu_count(), len(calls)) if scheduler is None else jobs
    with ExitStack() as stack:
        options: dict[str, Any] = {"n_jobs": jobs, "return_as": "generator_unordered", "batch_size": 1}
        if backend == "dask":
            stack.enter_context(_cluster(joblib, jobs, scheduler))
            options |= {"n_jobs": -1}
        elif jobs == 1:
            options |= {"backend": "sequential", "return_as": "generator"}
        else:
            stack.enter_context(joblib.parallel_config("loky", inner_max_num_threads=threads))
            options |= {"initializer": _leave_interrupts_to_the_parent}
        terminated = joblib.externals.loky.process_executor.TerminatedWorkerError
        stack.enter_context(_deaths_in_words(terminated))
        results = joblib.Parallel(**options)(joblib.delayed(call)(*arguments) for call, arguments in calls)
        yield stack.enter_context(closing(results))


def _leave_interrupts_to_the_parent() -> None:
    """Ctrl-C reaches every process of a terminal; the workers leave it to the one that can say something about it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Ctrl-C waits for the end of this block; threads and processes that start inside it never see one."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # first, for it lets interrupts through again when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _deaths_in_words(*deaths: type[Exception]) -> Iterator[None]:
    try:
        yield
    except deaths as error:
        raise AttnforgeError(
            "a worker process died, most likely for want of memory; finished cells are kept: "
            "run the same command again to continue, with fewer --jobs"
        ) from error


@contextmanager
def _cluster(joblib: Any, jobs: int | None, scheduler: str | None) -> Iterator[None]:
    """joblib's dask backend, on the cluster at an address or on one that lasts as long as the block."""
    distributed = require("distributed", "lab")
    log = logging.getLogger("distributed")
    level = log.level
    log.setLevel(logging.CRITICAL)  # what goes wrong is said once, by us
    with ExitStack() as stack:
        stack.callback(log.setLevel, level)
        address: Any = scheduler
        if scheduler is None:
            local = {"n_workers": jobs, "threads_per_worker": 1, "processes": True, "dashboard_address": None}
            quiet = {"memory_limit": 0, "silence_logs": logging.CRITICAL}
            with _interrupts_later():
                address = stack.enter_context(distributed.LocalCluster(**local, **quiet))
        client = stack.enter_context(_client(distributed, address, scheduler))
        try:
            client.wait_for_workers(1, timeout=PATIENCE)
        except TimeoutError as error:
            where = scheduler or "this machine"
            raise ArgumentError(f"the dask scheduler at {where} has no workers: start some, and run again") from error
        stack.enter_context(_deaths_in_words(distributed.scheduler.KilledWorker))
        stack.enter_context(joblib.parallel_config(_dask_backend(joblib)(client=client)))
        yield


def _client(distributed: Any, address: Any, scheduler: str | None) -> Any:
    try:
        return distributed.Client(address, timeout=PATIENCE, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        raise ArgumentError(
            f"no dask scheduler answers at {scheduler}: expected an address such as tcp://127.0.0.1:8786 of a running "
            "one (`dask scheduler` starts it), or none, and a cluster is started on this machine"
        ) from error


def _measured(items: list[Any]) -> list[Any]:
    """A batch of calls, on a worker of a cluster."""
    return [function(*arguments, **options) for function, arguments, options in items]


def _dask_backend(joblib: Any) -> Any:
    """joblib's backend for dask, which asks for results until it has them, and hears of tasks that were given up.

    A result that is lost with its worker, after it was announced and before it was fetched, is computed again when it
    is asked for; a task whose workers died again and again has an error but no result. joblib's own backend takes what
    is announced and calls back for results only: in both cases the sweep would wait for ever.
    """
    original: Any = require("joblib._dask", "lab").DaskDistributedBackend

    class Backend(original):  # type: ignore[misc]
        def submit(self, func: Any, callback: Any = None) -> Any:
            answer: Any = Future()
            answer.get = answer.result  # what joblib calls it
            task = self.client.submit(_measured, func.items, pure=False, **self.submit_kwargs)
            running = self.__dict__.setdefault("running", set())
            running.add(task)

            def fetch(done: Any) -> None:
                try:
                    out = done.result()
                except Exception as error:  # whatever it is, joblib raises it where the results are read
                    out = error
                running.discard(done)
                answer.set_result(out)
                callback(out)

            task.add_done_callback(fetch)
            return answer

        def retrieve_result_callback(self, out: Any) -> Any:
            if isinstance(out, BaseException):
                raise out
            return out

        def abort_everything(self, ensure_ready: bool = True) -> None:
            self.client.cancel(list(self.__dict__.get("running", ())))
            super().abort_everything(ensure_ready)

    return Backend
