"""Runs: the same numbers wherever cells run, nothing twice, nothing lost when a process or a worker dies."""

from __future__ import annotations

import gc
import io
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from joblib.externals.loky import get_reusable_executor

import attnforge as af
from attnforge.errors import ArgumentError, AttnforgeError
from attnforge.lab import Experiment, Progress, engine, machine
from attnforge.lab.engine import parallel
from attnforge.lab.store import MARKER, Store
from lab.toy import BROKEN, COUNTED, DEADLY, SIZES, SLOW, TOY, hoard

ROOT = Path(__file__).resolve().parents[2]
run = af.lab.run
ENVIRONMENT = {
    **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")]), "OMP_NUM_THREADS": "1",
}  # fmt: skip


def values(folder: Path, experiment: Experiment = TOY, quick: bool = True) -> dict[str, dict[str, Any]]:
    store = Store.open(folder)
    records = {cell.key: store.read(experiment, cell) for cell in experiment.grid(quick)}
    assert store.problems == []
    return {key: {n: v for n, v in r.values.items() if n != "process"} for key, r in records.items() if r is not None}


@pytest.fixture(scope="module", autouse=True)
def fresh_processes() -> None:
    """Workers that an earlier test left behind were started with another path: end them, so that new ones start."""
    get_reusable_executor().shutdown(wait=True)


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The full grid, one cell after the other in this process."""
    folder = tmp_path_factory.mktemp("serial")
    assert run(TOY, folder, jobs=1).measured == 24
    return values(folder, quick=False)


def test_the_same_seeds_give_the_same_numbers(tmp_path: Path, serial: dict[str, dict[str, Any]]) -> None:
    torch.manual_seed(99)
    before = torch.rand(1), torch.get_num_threads()
    torch.manual_seed(99)
    for jobs in (1, 2):
        done = run(TOY, tmp_path / str(jobs), jobs=jobs)
        assert (done.measured, done.kept, done.failures) == (24, 0, ())
        assert values(tmp_path / str(jobs), quick=False) == serial
    assert (torch.rand(1), torch.get_num_threads()) == before, "the caller's generator and threads are left alone"
    noise = {v["noise"] for v in serial.values()}
    assert len(noise) == 2, "one for each seed"


def test_nothing_is_measured_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marks = tmp_path / "marks"
    monkeypatch.setenv("TOY_MARKS", str(marks))
    told: list[Progress] = []

    def stop(progress: Progress) -> None:
        told.append(progress)
        if progress.done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(COUNTED, tmp_path / "out", jobs=1, progress=stop)
    assert (told[0].done, told[0].total, told[0].cell) == (0, 24, None) and told[-1].done == 5
    rest = run(COUNTED, tmp_path / "out", jobs=1)
    assert (rest.measured, rest.kept) == (19, 5)
    assert run(COUNTED, tmp_path / "out", jobs=1).measured == 0
    lines = marks.read_text().splitlines()
    assert len(lines) == len(set(lines)) == 24


def test_an_error_in_a_cell_does_not_stop_the_others(tmp_path: Path) -> None:
    done = run(BROKEN, tmp_path, quick=True, jobs=1)
    assert done.measured == 6 and len(done.failures) == 2
    failure = done.failures[0]
    assert str(failure).endswith("ZeroDivisionError: no such anchor") and failure.cell.settings["p"] == 8
    assert "toy.py" in failure.trace and "Traceback" in failure.trace
    assert run(TOY, tmp_path, quick=True, jobs=1).measured == 2, "only the failed ones are tried again"


def test_a_process_that_dies_is_said_and_the_rest_is_kept(tmp_path: Path) -> None:
    with pytest.raises(AttnforgeError, match=r"a worker process died.*finished cells are kept.*fewer --jobs"):
        run(DEADLY, tmp_path, quick=True, jobs=2)
    assert (tmp_path / MARKER).is_file() and set(values(tmp_path)) < {cell.key for cell in TOY.grid(True)}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"jobs": 0}, "jobs is a whole number >= 1, got 0"),
        ({"threads": 0}, "threads is a whole number >= 1"),
        ({"backend": "dusk"}, "'dusk'; did you mean 'dask'?"),
        ({"scheduler": "tcp://127.0.0.1:1"}, "goes with the backend dask"),
        ({"experiments": []}, "nothing to run"),
        ({"experiments": "lenght"}, "did you mean 'length'?"),
    ],
)
def test_wrong_use_is_said(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words.replace("?", r"\?")):
        run(**{"experiments": TOY, "out": tmp_path, "quick": True, **options})


@pytest.mark.parametrize(
    ("address", "patience"),
    [  # one waits as long as users do, the others less
        ("tcp://127.0.0.1:{port}", 5), ("127.0.0.1:{port}", 1), ("nowhere", 1), ("tcp://nowhere.invalid:8786", 1),
    ],
)  # fmt: skip
def test_an_unreachable_scheduler_is_said_soon(
    tmp_path: Path, address: str, patience: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine.PATIENCE == 5
    monkeypatch.setattr(engine, "PATIENCE", patience)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = address.format(port=free.getsockname()[1])
        start = time.monotonic()
        with pytest.raises(ArgumentError, match=f"no dask scheduler answers at {address}: .*dask scheduler"):
            run(TOY, tmp_path, quick=True, backend="dask", scheduler=address)
        assert time.monotonic() - start < 25
    client = pytest.importorskip("distributed").Client
    left = [each.status for each in gc.get_objects() if type(each) is client]
    assert set(left) <= {"closed"}, "nothing is left that could wait for a loop in a thread of another"


def test_a_cluster_that_loses_a_worker_half_way_gives_the_same(
    tmp_path: Path, serial: dict[str, dict[str, Any]]
) -> None:
    distributed = pytest.importorskip("distributed")
    killed: list[int] = []
    options = {"n_workers": 2, "threads_per_worker": 1, "processes": True, "dashboard_address": None}
    with distributed.LocalCluster(**options, silence_logs=50) as cluster:
        before = [worker.pid for worker in cluster.workers.values()]

        def kill(progress: Progress) -> None:
            if progress.done == progress.total // 2:
                killed.append(before[0])
                os.kill(before[0], signal.SIGKILL)

        done = run(SLOW, tmp_path, backend="dask", scheduler=cluster.scheduler_address, progress=kill)
    assert done.measured == 24 and done.failures == () and killed == before[:1]
    assert values(tmp_path, quick=False) == serial
    records = [Store.open(tmp_path).read(SLOW, cell) for cell in SLOW.grid(False)]
    processes = {r.values["process"] for r in records if r is not None}
    assert set(before) <= processes and os.getpid() not in processes, "both workers had a part in it"


def test_a_cell_that_the_cluster_gives_up_ends_the_run(tmp_path: Path) -> None:
    distributed, dask = pytest.importorskip("distributed"), pytest.importorskip("dask")
    options = {"n_workers": 2, "threads_per_worker": 1, "processes": True, "dashboard_address": None}
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),
        distributed.LocalCluster(**options, silence_logs=50) as cluster,
        pytest.raises(AttnforgeError, match="a worker process died"),
    ):
        run(DEADLY, tmp_path, quick=True, backend="dask", scheduler=cluster.scheduler_address)


def test_a_scheduler_without_workers_is_said(tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(n_workers=0, dashboard_address=None, silence_logs=50) as cluster,
        pytest.raises(ArgumentError, match=r"tcp://127\.0\.0\.1:\d+ has no workers"),
    ):
        run(TOY, tmp_path, quick=True, backend="dask", scheduler=cluster.scheduler_address)


@pytest.mark.parametrize("backend", ["processes", "dask"])
def test_an_interrupt_stops_cleanly_and_the_next_run_continues(tmp_path: Path, backend: str) -> None:
    code = (
        "import sys\nfrom attnforge.cli.common import guarded\n"
        "from attnforge.lab import run\nfrom lab.toy import COUNTED\n"
        f"if __name__ == '__main__': sys.exit(guarded(lambda: run(COUNTED, 'out', jobs=2, backend='{backend}') and 0))"
    )
    (tmp_path / "driver.py").write_text(code)
    marks = tmp_path / "marks"
    env = {**ENVIRONMENT, "TOY_MARKS": str(marks), "TOY_SLEEP": "0.5"}
    # A group of its own, so that the signal reaches every process, as Ctrl-C in a terminal does.
    process = subprocess.Popen([sys.executable, "driver.py"], cwd=tmp_path, env=env, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, start_new_session=True)  # fmt: skip
    folder = tmp_path / "out" / "toy"
    deadline = time.monotonic() + 120
    while len(list(folder.glob("*.json"))) < 3 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in errors, errors
    finished = {path.name for path in folder.iterdir()}
    assert 3 <= len(finished) < 24 and all(name.endswith(".json") for name in finished)
    with pytest.raises(ProcessLookupError):
        _wait_for_the_last_of(process.pid)
    done = run(TOY, tmp_path / "out", jobs=1)
    assert done.kept == len(finished) and done.measured == 24 - len(finished) and done.problems == ()
    # Of each of the two workers, the cell under way is lost, and at most one whose result was on its way here.
    started = marks.read_text().splitlines()
    assert len(started) == len(set(started)) <= len(finished) + 2 * 2


def _wait_for_the_last_of(group: int) -> None:
    """Ends with ProcessLookupError when nobody of a process group is left, and without it after five seconds."""
    for _ in range(100):
        os.killpg(group, 0)
        time.sleep(0.05)


def test_memory_and_time_are_those_of_the_block() -> None:
    with machine.watch() as idle:
        pass
    with machine.watch() as used:
        held = torch.ones(32 * 2**20 // 4)
        time.sleep(0.01)
    assert used.extra_mb > 25 > idle.extra_mb and used.memory_mb > used.extra_mb and used.time_s >= 0.01
    assert held.numel() and len(SIZES) == 4
    assert machine.device().type in ("cpu", "cuda") and machine.versions()["torch"] and machine.machine()["cores"] >= 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar_with_the_time_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    run(SLOW, tmp_path, quick=True, jobs=1)
    assert "toy" in shown.getvalue() and "/8" in shown.getvalue() and "left" in shown.getvalue()
    monkeypatch.setattr(sys, "stderr", silent := io.StringIO())
    run(TOY, tmp_path / "other", quick=True, jobs=1)
    assert silent.getvalue() == ""


def test_workers_that_grew_are_replaced_without_a_word() -> None:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with parallel([(hoard, (i,)) for i in range(5)], 2, "processes", None, 1) as results:
            found = list(results)
    assert sorted(number for number, _ in found) == list(range(5)) and len({process for _, process in found}) > 2
    assert not [str(one.message) for one in heard if "worker stopped" in str(one.message)]


@pytest.mark.parametrize("jobs", [1, 2])
def test_who_stops_half_way_hears_nothing_of_it(jobs: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with parallel([(abs, (-i,)) for i in range(40)], jobs, "processes", None, 1) as results:
            assert next(results) in range(40)
