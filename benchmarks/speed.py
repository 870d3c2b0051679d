"""On a GPU: converted models beside their originals, as ratios of time and memory, in the same mode.

    python benchmarks/speed.py --part kernels     each kernel against what it replaces, and against its bound
    python benchmarks/speed.py --part layer       a feed-forward layer 4096 x 16384, 8192 tokens
    python benchmarks/speed.py --part models      BERT-base, GPT-2 and Llama shapes: levels, dtypes, eager and compiled
    python benchmarks/speed.py --part decode      one token at a time with a cache
    python benchmarks/speed.py --part train       forward and backward

Runs are interleaved and timed with events; a ratio is best over best. Each case is written to
benchmarks/results/speed.json (or --out) as soon as it is measured and skipped when it is there already, so that a part
that was cut off goes on where it stopped. Outputs are compared with the original's and the range counters read.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import attnforge as af
from attnforge.conversion.site import outside

OUT = Path(__file__).parent / "results" / "speed.json"
HALVES = ("bfloat16", "float16", "float32")
ROUNDS = 12  # of interleaved runs
Row = dict[str, Any]


def clock(works: dict[str, Callable[[], Any]], rounds: int = ROUNDS, calls: int = 3) -> dict[str, float]:
    """Milliseconds on the device for one call of each, the best of several interleaved rounds."""
    best = dict.fromkeys(works, float("inf"))
    for work in works.values():
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    for _ in range(rounds):
        for name, work in works.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(calls):
                work()
            end.record()
            torch.cuda.synchronize()
            best[name] = min(best[name], start.elapsed_time(end) / calls)
    return best


def peak(work: Callable[[], Any]) -> float:
    """Megabytes that a call takes at its peak, beyond what was there."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - before) / 2**20


def kernels() -> Iterator[tuple[str, Callable[[], Row]]]:
    """Each kernel at 8192 x 16384 elements (norms: 32768 rows) against PyTorch's, and its error against its bound."""
    functions = {"gelu": nn.functional.gelu, "silu": nn.functional.silu, "gelu_tanh": _gelu_tanh}
    for dtype in HALVES:
        for name in functions:
            yield f"kernel {name} {dtype}", lambda d=dtype, n=name: activation(n, functions[n], getattr(torch, d))
        for channels in (768, 1024, 4096):
            for kind in ("layer", "rms"):
                yield f"kernel {kind} norm {channels} {dtype}", lambda d=dtype, c=channels, k=kind: norm(c, k, d)


def _gelu_tanh(x: Tensor) -> Tensor:
    return nn.functional.gelu(x, approximate="tanh")


def activation(name: str, original: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Row:
    model = nn.Sequential(nn.Linear(4, 4), _module(name)).to("cuda", dtype)
    converted, report = af.convert(model, torch.randn(64, 4, device="cuda", dtype=dtype) * 8)
    site = converted[1]
    y = torch.randn(8192, 16384, device="cuda", dtype=dtype)
    with torch.no_grad():
        took = clock({"original": lambda: original(y), "kernel": lambda: site(y)})
        few = torch.linspace(site.low, site.high, 1 << 22, dtype=torch.float64, device="cuda").to(dtype)
        few = few.clamp(site.low, site.high)
        found = float((site(few).double() - _exact(name, few.double())).abs().max())
    return {"ratio": took["kernel"] / took["original"], "ms": took["kernel"], "anchors": report.sites[0].anchors,
            "bound": report.sites[0].bound, "found": found}  # fmt: skip


def _module(name: str) -> nn.Module:
    return {"gelu": nn.GELU(), "silu": nn.SiLU(), "gelu_tanh": nn.GELU(approximate="tanh")}[name]


def _exact(name: str, y: Tensor) -> Tensor:
    out: Tensor = _module(name)(y)
    return out


def norm(channels: int, kind: str, dtype_name: str) -> Row:
    dtype = getattr(torch, dtype_name)
    make = nn.LayerNorm if kind == "layer" else nn.RMSNorm
    options = {} if kind == "layer" else {"eps": 1e-6}
    model = nn.Sequential(nn.Linear(channels, channels), make(channels, **options)).to("cuda", dtype)
    x = torch.randn(32768, channels, device="cuda", dtype=dtype)
    converted, report = af.convert(model, x[:64], level="pure")
    site, original = converted[1], model[1]
    with torch.no_grad():
        took = clock({"original": lambda: original(x), "kernel": lambda: site(x)})
        exact = original.double()(x.double())
        found = float((site(x).double() - exact).abs().max())
    return {"ratio": took["kernel"] / took["original"], "ms": took["kernel"], "anchors": report.sites[0].anchors,
            "bound": report.sites[0].bound, "found": found}  # fmt: skip


def layers() -> Iterator[tuple[str, Callable[[], Row]]]:
    """A feed-forward layer of a large model."""
    for dtype in HALVES:
        for mode in ("eager", "compiled"):
            yield f"layer 4096 x 16384 {dtype} {mode}", lambda d=dtype, m=mode: layer(getattr(torch, d), m)


def layer(dtype: torch.dtype, mode: str) -> Row:
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(4096, 16384), nn.GELU(), nn.Linear(16384, 4096)).to("cuda", dtype).eval()
    x = torch.randn(8192, 4096, device="cuda", dtype=dtype)
    converted, _ = af.convert(model, x[:256])
    return compare(model, converted.requires_grad_(False), lambda m: m(x), mode)


def compare(
    model: nn.Module, converted: nn.Module, call: Callable[[Any], Any], mode: str, calls: int = 3,
    rewind: Callable[[], None] = lambda: None,
) -> Row:  # fmt: skip
    """Time, memory and compile time of a converted model over its original's, and how far outputs are apart.

    `rewind` undoes what calls leave behind, such as tokens in a cache.
    """
    models: dict[str, Any] = {"original": model, "converted": converted}
    row: Row = {}
    with torch.no_grad():
        rewind()
        wanted, found = (_tensor(call(m)) for m in models.values())
        if mode == "compiled":
            took = {}
            for name, m in models.items():
                models[name] = torch.compile(m, fullgraph=True)
                began = time.perf_counter()
                call(models[name])
                torch.cuda.synchronize()
                took[name] = time.perf_counter() - began
            rewind()
            found = _tensor(call(models["converted"]))
            row["compile time"] = took["converted"] / took["original"]
        works = {name: (lambda m=m: call(m)) for name, m in models.items()}
        rewind()
        times = clock(works, calls=calls)
        rewind()
        row["ratio"] = times["converted"] / times["original"]
        row["ms"] = times["converted"]
        row["memory"] = peak(works["converted"]) / max(peak(works["original"]), 1e-9)
    scale = float(wanted.float().abs().max())
    row["change"] = float((found.float() - wanted.float()).abs().max()) / scale
    row["outside"] = sum(outside(converted).values())
    return row


def _tensor(out: Any) -> Tensor:
    found: Tensor = out if isinstance(out, Tensor) else out[0]
    return found


def shape(name: str, depth: int) -> tuple[nn.Module, int]:
    """A model of a known shape with random weights, and its vocabulary."""
    from transformers import BertConfig, BertModel, GPT2Config, GPT2Model, LlamaConfig, LlamaModel

    torch.manual_seed(0)
    if name == "BERT-base":
        return BertModel(BertConfig(num_hidden_layers=depth, max_position_embeddings=2048)).eval(), 30522
    if name == "GPT-2":
        return GPT2Model(GPT2Config(n_layer=depth, n_positions=2048)).eval(), 50257
    config = LlamaConfig(hidden_size=1024, intermediate_size=2816, num_hidden_layers=depth, num_attention_heads=16,
                         num_key_value_heads=16, vocab_size=32000, max_position_embeddings=4096)  # fmt: skip
    return LlamaModel(config).eval(), 32000


DEPTH = {"BERT-base": 12, "GPT-2": 12, "Llama": 8}
SIZES = ((16, 512), (1, 2048))


def models(modes: tuple[str, ...]) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Whole models."""
    for name in DEPTH:
        for dtype in HALVES:
            for level in ("ffn", "pure"):
                for mode in modes:
                    for batch, tokens in SIZES:
                        yield (
                            f"{name} {batch} x {tokens} {level} {dtype} {mode}",
                            lambda n=name, d=dtype, v=level, m=mode, b=batch, t=tokens: whole(n, d, v, m, b, t),
                        )


_MADE: dict[str, Any] = {}


def made(name: str, dtype: str, level: str) -> tuple[nn.Module, nn.Module, int]:
    """The model and its conversion; the last one is kept."""
    key = f"{name} {dtype} {level}"
    if key not in _MADE:
        _MADE.clear()
        model, words = shape(name, DEPTH[name])
        model = model.to("cuda", getattr(torch, dtype))
        ids = torch.randint(0, words, (2, 64), device="cuda")
        converted, _ = af.convert(model, [{"input_ids": ids}], level=level)
        _MADE[key] = model, converted.requires_grad_(False), words
    return _MADE[key]


def whole(name: str, dtype: str, level: str, mode: str, batch: int, tokens: int) -> Row:
    torch.compiler.reset()
    model, converted, words = made(name, dtype, level)
    ids = torch.randint(0, words, (batch, tokens), device="cuda")
    return compare(model, converted, lambda m: m(input_ids=ids, use_cache=False), mode)


def decoding() -> Iterator[tuple[str, Callable[[], Row]]]:
    """One token at a time, with the keys and values of 512 before it."""
    for name in ("GPT-2", "Llama"):
        for dtype in ("bfloat16", "float32"):
            for level in ("ffn", "pure"):
                for mode in ("eager", "compiled"):
                    yield (
                        f"{name} decode {level} {dtype} {mode}",
                        (lambda n=name, d=dtype, v=level, m=mode: decode(n, d, v, m)),
                    )


def decode(name: str, dtype: str, level: str, mode: str) -> Row:
    from transformers import StaticCache

    torch.compiler.reset()
    model, converted, words = made(name, dtype, level)
    ids = torch.randint(0, words, (1, 512), device="cuda")
    caches = [StaticCache(config=model.config, max_cache_len=1024) for _ in range(2)]  # each call adds a token

    def cache_of(m: nn.Module) -> Any:
        return caches[getattr(m, "_orig_mod", m) is converted]

    @torch.no_grad()
    def rewind() -> None:
        for m in (model, converted):
            cache_of(m).reset()
            m(input_ids=ids, past_key_values=cache_of(m), use_cache=True)

    def step(m: nn.Module) -> Any:
        return m(input_ids=ids[:, :1], past_key_values=cache_of(m), use_cache=True)

    return compare(model, converted, step, mode, calls=20, rewind=rewind)


def training() -> Iterator[tuple[str, Callable[[], Row]]]:
    """Forward and backward of the whole model, 16 x 512 tokens."""
    for name in DEPTH:
        for dtype in ("bfloat16", "float32"):
            for level in ("ffn", "pure"):
                yield f"{name} train {level} {dtype}", lambda n=name, d=dtype, v=level: train(n, d, v)


def train(name: str, dtype: str, level: str) -> Row:
    model, words = shape(name, DEPTH[name])
    model = model.to("cuda", getattr(torch, dtype))
    few = [{"input_ids": torch.randint(0, words, (2, 64), device="cuda")}]
    converted, _ = af.convert(model, few, level=level)  # what trains is what a conversion leaves to train
    ids = torch.randint(0, words, (16, 512), device="cuda")

    def step(m: nn.Module) -> None:
        m.zero_grad(set_to_none=True)
        _tensor(m(input_ids=ids, use_cache=False)).float().square().mean().backward()

    times = clock({"original": lambda: step(model), "converted": lambda: step(converted)}, rounds=6, calls=2)
    return {"ratio": times["converted"] / times["original"], "ms": times["converted"]}


PARTS: dict[str, Callable[[], Iterator[tuple[str, Callable[[], Row]]]]] = {
    "kernels": kernels,
    "layer": layers,
    "models": lambda: models(("eager", "compiled")),
    "eager": lambda: models(("eager",)),
    "decode": decoding,
    "train": training,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=list(PARTS), action="append", default=None)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--seconds", type=float, default=1500.0, help="no new case is begun after so long")
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    asked = parser.parse_args()
    console = Console(width=140)
    if not torch.cuda.is_available():
        console.print("no CUDA device here: nothing measured")
        return
    warnings.filterwarnings("ignore", category=af.DomainWarning)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch._inductor.config.force_disable_caches = True  # compile times are those of a first run
    torch.compile(torch.nn.functional.gelu)(torch.zeros(64, device="cuda"))  # the compiler itself is loaded and warm
    began = time.perf_counter()
    kept: dict[str, Row] = json.loads(asked.out.read_text())["cases"] if asked.out.exists() else {}
    done: dict[str, Row] = {}
    for part in asked.part or list(PARTS):
        for name, work in PARTS[part]():
            if asked.only not in name or (name in kept and asked.out == OUT):
                continue
            if time.perf_counter() - began > asked.seconds:
                break
            try:
                done[name] = work()
            except Exception as error:  # one case that fails is a row that says so; the run goes on, and ends with 1
                done[name] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"}
            kept[name] = done[name]
            where = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
            asked.out.parent.mkdir(exist_ok=True)
            asked.out.write_text(json.dumps({**where, "cases": kept}, indent=1))
            console.print(name, {k: round(v, 4) if isinstance(v, float) else v for k, v in done[name].items()})
    table = Table("case", "ratio", "ms", "memory", "compile time", "change or error found / bound")
    for name, row in done.items():
        last = row.get("error") or (f"{row['found']:.2e} / {row['bound']:.2e}" if "bound" in row else
                                    f"{row['change']:.1e}" if "change" in row else "")  # fmt: skip
        cells = (f"{row[key]:.3f}" if key in row else "" for key in ("ratio", "ms", "memory", "compile time"))
        table.add_row(name, *cells, last)
    console.print(table)
    wrong = [name for name, row in done.items() if "error" in row or row.get("found", 0.0) > row.get("bound", 1e300)]
    if wrong:
        raise SystemExit(f"{len(wrong)} cases failed or are outside their bounds: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
