"""Runs the cells of experiments, on the cores of this machine or on a cluster, and writes a record for each.

joblib is the interface: its processes by default, dask.distributed by choice, results as they come. Cells that have a
record are not run again, so a run that was interrupted continues where it stopped. Each cell is seeded and keeps to a
fixed number of threads; how many run at once, and where, does not change a number. On a terminal a bar shows the time
that is left.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from ..arguments import is_whole
from ..errors import ArgumentError, AttnforgeError, closest
from ..extras import require
from . import experiment as registry
from . import machine
from .experiment import Cell, Experiment, Record
from .store import Store


@contextmanager
def bar() -> Iterator[Callable[[Progress], None]]:
    """A function to call with the progress of a run."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description:<27}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("left"),
        progress.TimeRemainingColumn(),
    )
    output, day = Console(stderr=True), 86400.0
    # Cells may take minutes: what is left is estimated from the whole run, not from the last seconds.
    with progress.Progress(*columns, console=output, transient=True, speed_estimate_period=day) as shown:
        task = shown.add_task("starting", total=None)

        def update(now: Progress) -> None:
            shown.update(task, total=now.total, completed=now.done, description=now.experiment or "starting")

        yield update


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
            stack.enter_context(_replaced_in_silence())
            _track_in_silence(joblib.externals.loky.backend.resource_tracker)
        terminated = joblib.externals.loky.process_executor.TerminatedWorkerError
        stack.enter_context(_deaths_in_words(terminated))
        results = joblib.Parallel(**options)(joblib.delayed(call)(*arguments) for call, arguments in calls)
        yield stack.enter_context(_closed_in_silence(results))


@contextmanager
def _replaced_in_silence() -> Iterator[None]:
    """Between two calls joblib replaces a worker that holds 300 MB more than after its first call. Large models do that
    to an allocator, nothing is lost by it, and there is nothing to be done about it: so nothing is said."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "A worker stopped while some jobs were given", UserWarning)
        yield


def _track_in_silence(tracker: Any) -> None:
    """Start joblib's process that clears away what a stopped run leaves: what it finds already gone is not told."""
    before = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (before, "ignore:resource_tracker")))
    try:
        tracker.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONWARNINGS"]
        else:
            os.environ["PYTHONWARNINGS"] = before


@contextmanager
def _closed_in_silence(results: Any) -> Iterator[Iterator[Any]]:
    """Close joblib's results after the block: who stops half-way meant to, and joblib's advice on it stays unsaid."""
    try:
        yield results
    finally:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*tasks.*adjusting the input task iterator", UserWarning)
            results.close()


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
        if scheduler is not None:  # an address without a port leaves a client behind that never ends connecting
            kind, place = distributed.comm.parse_address(scheduler)
            if kind in ("tcp", "tls"):
                distributed.comm.parse_host_port(place)
        return distributed.Client(address, timeout=PATIENCE, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        # The client that failed is closed when it is collected. Left to chance, that may happen in the thread in which
        # another client's loop is about to start, and wait there for that very loop: so it happens here.
        traceback.clear_frames(error.__traceback__)
        gc.collect()
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


Measure = Callable[[Mapping[str, Any], int], Mapping[str, Any]]


@dataclass(frozen=True)
class Failure:
    """A cell whose measurement raised an error; it has no record and is tried again by the next run."""

    experiment: str
    cell: Cell
    error: str
    trace: str

    def __str__(self) -> str:
        return f"{self.experiment} {self.cell.key}: {self.error}"


@dataclass(frozen=True)
class Progress:
    """How far a run is: told after every cell. `cell` is None once, before the first."""

    done: int
    total: int
    kept: int
    experiment: str = ""
    cell: Cell | None = None


@dataclass(frozen=True)
class Summary:
    """What a run did: cells measured now, cells that had a record, failures, and files that are no records."""

    folder: Path
    experiments: tuple[Experiment, ...]
    measured: int
    kept: int
    failures: tuple[Failure, ...]
    problems: tuple[str, ...]


def run(
    experiments: str | Experiment | Iterable[str | Experiment],
    out: str | Path,
    *,
    quick: bool = False,
    jobs: int | None = None,
    backend: str = "processes",
    scheduler: str | None = None,
    threads: int = 1,
    progress: Callable[[Progress], None] | None = None,
) -> Summary:
    """Measures every cell that has no record yet; experiments by name ("all" is every one) or as objects.

    `jobs` cells at once, by default one for each core, each on `threads` threads. `backend` is "processes" or "dask";
    a dask scheduler's address may be given, else a cluster is started on this machine. `progress` is told of every
    cell; without it there is a bar on a terminal.
    """
    chosen = _chosen(experiments)
    for name, value in (("jobs", jobs), ("threads", threads)):
        if value is not None and not is_whole(value, 1):
            raise ArgumentError(f"{name} is a whole number >= 1, got {value!r}")
    store = Store.create(out)
    grids = [(experiment, experiment.grid(quick)) for experiment in chosen]
    todo = [(experiment, cell) for experiment, cells in grids for cell in store.todo(experiment, cells)]
    kept = sum(len(cells) for _, cells in grids) - len(todo)
    failures: list[Failure] = []
    by_name = {experiment.name: experiment for experiment in chosen}
    calls = [(measure_cell, (e.measure, e.name, e.revision, c.settings, c.seed, threads, quick)) for e, c in todo]
    with ExitStack() as stack:
        tell = progress or stack.enter_context(bar())
        tell(Progress(0, len(todo), kept))
        if calls:
            results = stack.enter_context(parallel(calls, jobs, backend, scheduler, threads))
            for done, (name, cell, result) in enumerate(results, 1):
                if isinstance(result, Record):
                    store.write(by_name[name], result)
                else:
                    failures.append(Failure(name, cell, *result))
                tell(Progress(done, len(todo), kept, name, cell))
    measured = len(todo) - len(failures)
    return Summary(store.folder, chosen, measured, kept, tuple(failures), tuple(store.problems))


def measure_cell(
    measure: Measure, name: str, revision: int, settings: Mapping[str, Any], seed: int, threads: int, quick: bool
) -> tuple[str, Cell, Record | tuple[str, str]]:
    """One cell, in the process that it was sent to: its record, or the error and its trace in words."""
    cell = Cell(settings, seed)
    try:
        with machine.reproducible(seed, threads), machine.watch() as used:
            values = dict(measure(cell.settings, seed))
        record = Record(
            name, cell.settings, seed, values, revision, quick, used.time_s, used.memory_mb, machine.device_name(),
            threads, machine.versions(), machine.machine(), datetime.now(UTC).isoformat(timespec="seconds"),
        )  # fmt: skip
    except Exception as error:  # whatever an experiment raises is reported with its cell; the other cells go on
        kind = "" if isinstance(error, AttnforgeError) else f"{type(error).__name__}: "
        return name, cell, (f"{kind}{error}", traceback.format_exc())
    return name, cell, record


def _chosen(experiments: str | Experiment | Iterable[str | Experiment]) -> tuple[Experiment, ...]:
    asked = [experiments] if isinstance(experiments, str | Experiment) else list(experiments)
    found = [e for one in asked for e in (registry.select(one) if isinstance(one, str) else (one,))]
    chosen = tuple({experiment.name: experiment for experiment in found}.values())
    if not chosen:
        raise ArgumentError("there is nothing to run: name an experiment, or all")
    return chosen
