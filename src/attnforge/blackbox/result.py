"""`Approximation`: what `approximate` returns, an attention-only network next to a held-out sample of its black box.

No file can hold a black box. What is kept instead is a sample of it that no fit has seen: `af.certify` and `af.check`
measure the network against that sample anew, and a route that can prove more than a measurement adds its proof.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from ..box import Box
from ..certificates.certificate import Certificate
from ..certificates.certified import CertifiedModule
from ..certificates.schema import BOX, Whole
from ..compiler.compiled import Size
from ..dtypes import SHIPPED, Array, dtype_name, rounded, stored
from ..errors import ArgumentError, CertificateError
from ..network import AttentionLayer, Heads
from .target import Target

MOST_WEIGHTS = 1 << 27  # attention weights that a measurement may take: large tables are measured on fewer points
HELD = 2048  # points that no fit sees, a quarter of them at corners and faces


@dataclass(frozen=True)
class Held:
    """Points that no fit sees and the black box's values there; the first `uniform` of them are drawn evenly."""

    points: Array
    values: Array
    uniform: int

    @classmethod
    def draw(cls, target: Target, dtype: torch.dtype, count: int = HELD, seed: int = 1) -> Held:
        """Three quarters even, the others where approximations are worst: corners, faces and edges."""
        box = target.box.outward(dtype)
        low, high = box.lower.reshape(-1).numpy(), box.upper.reshape(-1).numpy()
        rest = count // 8
        even = box.sample(count - 2 * rest, seed=seed, dtype=dtype).reshape(-1, box.dim).double().numpy()
        rng = np.random.default_rng(seed)
        corners = np.where(rng.random((rest, box.dim)) < 0.5, low, high)
        faces = np.clip(low + (1.4 * rng.random((rest, box.dim)) - 0.2) * (high - low), low, high)
        points = np.concatenate([even, corners, faces])
        points = np.clip(rounded(points, dtype), low, high)
        return cls(points, target(inside(points, target.box), "sample"), len(even))

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Points and values as a network keeps them."""
        return torch.from_numpy(self.points), torch.from_numpy(self.values)


def inside(points: Array, box: Box) -> Array:
    """Points of the box widened to numbers of a dtype, moved back into the box itself: a black box ends there."""
    return np.clip(points, box.lower.reshape(-1).numpy(), box.upper.reshape(-1).numpy())


@dataclass(frozen=True)
class About:
    """What is said about an approximation besides its weights; JSON only."""

    target: str
    box: Box
    output_shape: tuple[int, ...]
    route: str
    reason: str = ""
    uniform: int = 0
    unit: float = 2.0**-53
    evidence: str = ""
    """The digest of what is remembered of the black box: its held-out sample, and its values on a grid."""

    @classmethod
    def of(cls, target: Target, held: Held, route: str) -> About:
        """What is known before anything is built."""
        shape = target.output_shape or ()
        return cls(target.name, target.box, shape, route, uniform=held.uniform, unit=target.unit)

    def __post_init__(self) -> None:
        if not 2.0**-53 <= self.unit < 1 or self.uniform < 0:
            raise ArgumentError(f"this does not describe an approximation: unit {self.unit}, uniform {self.uniform}")

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "box": self.box.to_json(), "output_shape": list(self.output_shape)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> About:
        shape = tuple(int(s) for s in data["output_shape"])
        return cls(**{**data, "box": Box.from_json(data["box"]), "output_shape": shape})


#: Of every approximation in a file; routes add their own.
FORM: dict[str, Any] = {
    "about": {
        "target": str, "box": BOX, "output_shape": [Whole(1)], "route": str, "reason": str,
        "uniform": Whole(0, 1 << 32), "unit": float, "evidence": str,
    },
    "dtype": str, "strict": bool,
}  # fmt: skip


class Approximation(CertifiedModule):
    """An attention-only network for a black box. `route` says how it was built, `reason` why that way."""

    stacked = True
    points: Tensor
    wanted: Tensor
    about: About

    def __init__(self, about: About, points: Tensor, wanted: Tensor):
        super().__init__()
        self.about, self.box = about, about.box
        self.register_buffer("points", points)
        self.register_buffer("wanted", wanted)

    def sealed(self) -> Self:
        """The network as it was built: what it remembers of the black box is noted, and it gets its certificate."""
        self.about = replace(self.about, evidence=self._evidence())
        self.attach(self.recertify())
        return self.eval()

    def _evidence(self) -> str:
        """The digest of all that is remembered of the black box, in float64."""
        found = hashlib.sha256()
        for name, tensor in self.named_buffers(recurse=False):
            found.update(f"{name}:{tuple(tensor.shape)};".encode())
            found.update(np.ascontiguousarray(stored(tensor)).data)
        return found.hexdigest()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves what is remembered of the black box to other devices, but never rounds it: it stands for the truth."""
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, tensor in before.items():
            after = self.get_buffer(name)
            if after.dtype != tensor.dtype:
                self.register_buffer(name, tensor.to(after.device))
        return self

    @property
    def route(self) -> str:
        """The way of building: grid, spectral, ridge or additive."""
        return self.about.route

    @property
    def reason(self) -> str:
        """Why this route, in words."""
        return self.about.reason

    @property
    def size(self) -> Size:
        """Layers, heads, anchors, parameters and the largest |logit|."""
        raise NotImplementedError

    @property
    def relative_error(self) -> float:
        """The root of the mean square error over the evenly drawn held-out points, relative to that of the target."""
        rows = slice(0, -(-self.about.uniform // self._step))
        error, wanted = self._errors()[rows], self.wanted[:: self._step][rows].double()
        return float(error.norm() / wanted.norm().clamp_min(1e-300))

    @property
    def beyond(self) -> str:
        return "the black box is known by samples alone, and what was measured is no bound"

    @property
    def _step(self) -> int:
        """One in so many of the held-out points is measured."""
        return max(1, len(self.points) * self.size.anchors // MOST_WEIGHTS)

    @torch.no_grad()
    def _errors(self) -> Tensor:
        x = self.points[:: self._step].to(self.dtype).reshape(-1, *self.box.shape)
        return self.core(x).reshape(len(x), -1).double() - self.wanted[:: self._step].double()

    def recertify(self) -> Certificate:
        """Measured anew on the held-out sample; no proof."""
        if self.dtype not in SHIPPED:
            raise CertificateError(f"approximations are kept in float32 and float64, these weights are {self.dtype}")
        if self.about.evidence and self._evidence() != self.about.evidence:
            raise CertificateError(
                f"what this network remembers of {self.about.target} was changed (load_state_dict, or by hand): "
                "nothing can be said about the black box any more"
            )
        measured = float(self._errors().abs().max())
        if not math.isfinite(measured):
            raise CertificateError("the network gives NaN or infinity on its held-out sample")
        name = dtype_name(self.dtype)
        return Certificate("calibrated", None, name, f"black box {self.about.target}", self.box, measured=measured)

    def guard(self, *inputs: Tensor) -> None:
        if len(inputs) != 1:
            names = f", columns {', '.join(self.box.names)}" if self.box.names else ""
            raise ArgumentError(f"expected one input tensor (..., {self.box.dim}{names}), got {len(inputs)} tensors")
        (x,) = inputs
        self.check_tensor(x, "input")
        self.check_shape(x)
        if not x.numel():
            return
        wide = self.box.outward(self.dtype)
        flat = x.detach().reshape(-1, self.box.dim)
        low, high = flat.amin(0).double().cpu(), flat.amax(0).double().cpu()
        lo, hi = wide.lower.reshape(-1), wide.upper.reshape(-1)
        bad = torch.nonzero(~(torch.isfinite(low) & torch.isfinite(high) & (low >= lo) & (high <= hi))).flatten()
        if len(bad):
            i = int(bad[0])
            name = self.box.names[i] if self.box.names else f"input[{i}]"
            self.check_range(name, float(low[i]), float(high[i]), float(lo[i]), float(hi[i]))

    def example_input(self) -> tuple[Tensor, ...]:
        return (self.box.sample(2, dtype=self.dtype),)

    def config(self) -> dict[str, Any]:
        return {"about": self.about.to_json(), "dtype": dtype_name(self.dtype), "strict": self.strict}

    def extra_repr(self) -> str:
        return f"{self.about.target} by {self.route}"


class TableApproximation(Approximation):
    """One attention layer over the flattened input: heads that read constant keys and values, and nothing else."""

    family: ClassVar[str] = "blackbox-table"
    called = "a table of samples as anchors"
    schema: ClassVar[Any] = FORM

    def __init__(self, about: About, layer: AttentionLayer, points: Tensor, wanted: Tensor):
        super().__init__(about, points, wanted)
        self.layer: AttentionLayer = layer

    @property
    def group(self) -> Heads:
        """The heads of the layer."""
        return self.layer.heads()[0]

    @property
    def size(self) -> Size:
        group = self.group
        box = self.box.outward(self.dtype)
        reach = torch.maximum(box.lower.abs(), box.upper.abs()).reshape(-1).to(group.W_Q)
        query = torch.einsum("c,hck->hk", reach, group.W_Q.detach().abs())
        query = query if group.b_Q is None else query + group.b_Q.detach().abs()
        logit = float((group.M_K.detach().abs() @ query.unsqueeze(-1)).max())
        return Size(1, group.heads, group.slots, sum(p.numel() for p in self.parameters()), logit)

    def core(self, *inputs: Tensor) -> Tensor:
        """Flatten each point to one token, attend, read the output off."""
        (x,) = inputs
        batch = x.shape[: x.dim() - len(self.box.shape)]
        return self.layer(x.reshape(*batch, self.box.dim)).reshape(*batch, *self.about.output_shape)

    @classmethod
    def rebuild(cls, config: dict[str, Any], tensors: dict[str, Tensor]) -> TableApproximation:
        net = cls(About.from_json(config["about"]), stored_layer(tensors), tensors["points"], tensors["wanted"])
        net.strict = bool(config["strict"])
        return net


def table_head(centre: Array, keys: Array, values: Array, purpose: str, dtype: torch.dtype) -> Heads:
    """One head with queries (x - centre, 1) over constant keys (slot, dim + 1) and values (slot, outputs)."""
    dim = len(centre)
    return Heads(
        "memory",
        W_Q=torch.eye(dim, dim + 1, dtype=dtype)[None],
        b_Q=torch.from_numpy(np.append(-centre, 1.0)).to(dtype)[None],
        M_K=torch.from_numpy(keys).to(dtype)[None],
        M_V=torch.from_numpy(values).to(dtype)[None],
        W_O=torch.eye(values.shape[-1], dtype=dtype)[None],
        purpose=purpose,
    )


def stored_layer(tensors: dict[str, Tensor]) -> AttentionLayer:
    """The attention layer whose tensors a file holds."""
    prefix = "layer.groups.0."
    tables = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    group = Heads("memory", **tables)  # type: ignore[arg-type]
    return AttentionLayer([group], S=tensors.get("layer.S"), s=tensors.get("layer.s"))
