"""The runtime: attention layers and affine maps, and nothing else.

State Z holds tokens (rows) by channels. One layer computes

    Z  <-  Z S + s  +  sum_h softmax(Q_h K_h^T + mask) V_h O_h
    Q_h = Z W_Q + b_Q,    K_h = [Z W_K + b_K ; M_K],    V_h = [Z W_V + b_V ; M_V]

where M_K and M_V are constant memory slots (persistent keys and values). Which token slots a head may see is its
`scope`: none ("memory": anchor heads), its own token ("self": gate, product and norm heads) or all of them
("tokens"). Shapes follow the names TransformerLens users know: W_Q is (head, channel, key), W_O (head, value, channel);
a leading size of 1 instead of the number of heads means that all heads share the table (multi-query attention).

The softmax is explicit, because its rounding is known and certified (`certificates.rounding`); PyTorch's fused
attention kernels use a coarser exponential on some machines. Rows are evaluated in chunks, so memory does not grow
with tokens times slots.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn

from .dtypes import transformed
from .errors import ArgumentError
from .native.whole import EvenKeys, again, computed

Scope = Literal["memory", "self", "tokens"]
Columns = Callable[[Tensor], Tensor]  # from (channel, row) to (channel, row)
CHUNK = 1 << 21  # softmax entries alive at once: 8 MB in float32
CACHED = 1 << 18  # and for heads without token keys on a processor: what stays in its cache
PICKED = 16  # channels from which on picking a few is cheaper than a product with many zeros
SLOTS = 32  # of a head up to which a compiled network writes each out
UNROLLED = 1024  # parameters up to which a compiled network is one loop: its compiler takes 0.1 s for each
SIZES = {  # which axes of the tables mean the same thing
    "channels": {"W_Q": 1, "W_K": 1, "W_V": 1},
    "key coordinates": {"W_Q": 2, "b_Q": 1, "W_K": 2, "b_K": 1, "M_K": 2},
    "value coordinates": {"W_V": 2, "b_V": 1, "M_V": 2, "W_O": 1},
    "memory slots": {"M_K": 1, "M_V": 1},
}
Made = TypeVar("Made", bound=Callable[..., object])


def known(make: Made) -> Made:
    """Mark `make` to be run while tracing, its result a constant of the compiled program: what
    `torch.compiler.assume_constant_result` does, which would load the compiler already here."""
    make.__dict__["_dynamo_marked_constant"] = True
    return make


@known
def exporting() -> bool:
    """Whether a graph is exported. Tracers before PyTorch 2.13 take `torch.compiler.is_exporting()` to be true in
    every compiled program; here it is asked, not traced."""
    return bool(torch.compiler.is_exporting())


class Heads(nn.Module):
    """A group of softmax heads with one scope: the sum over heads of softmax(Q K^T) V O.

    >>> one, table = torch.tensor([[[1.0]]]), torch.tensor([[[1.0], [0.0]]])
    >>> sigmoid = Heads("memory", W_Q=one, M_K=table, M_V=table, W_O=one)
    >>> y = torch.tensor([[0.3]])
    >>> torch.allclose(sigmoid(y), torch.sigmoid(y))
    True
    """

    W_Q: Tensor  # all but W_Q and W_O may be None, where a head has no such table
    b_Q: Tensor
    W_K: Tensor
    b_K: Tensor
    W_V: Tensor
    b_V: Tensor
    M_K: Tensor
    M_V: Tensor
    W_O: Tensor

    def __init__(
        self,
        scope: Scope,
        *,
        W_Q: Tensor,
        W_O: Tensor,
        b_Q: Tensor | None = None,
        W_K: Tensor | None = None,
        b_K: Tensor | None = None,
        W_V: Tensor | None = None,
        b_V: Tensor | None = None,
        M_K: Tensor | None = None,
        M_V: Tensor | None = None,
        causal: bool = False,
        purpose: str = "",
    ):
        super().__init__()
        self.scope, self.causal, self.purpose = scope, causal, purpose
        self.even: EvenKeys | None = None  # how kernels may read the keys, where a certificate speaks of that
        given = dict(W_Q=W_Q, b_Q=b_Q, W_K=W_K, b_K=b_K, W_V=W_V, b_V=b_V, M_K=M_K, M_V=M_V, W_O=W_O)
        for name, tensor in given.items():
            self.register_parameter(name, None if tensor is None else nn.Parameter(tensor.detach().clone()))
        self._validate(given)

    def _validate(self, given: dict[str, Tensor | None]) -> None:
        if self.scope not in ("memory", "self", "tokens"):
            raise ArgumentError(f"scope must be 'memory', 'self' or 'tokens', got {self.scope!r}")
        rank = {"W_Q": 3, "b_Q": 2, "W_K": 3, "b_K": 2, "W_V": 3, "b_V": 2, "M_K": 3, "M_V": 3, "W_O": 3}
        for name, tensor in given.items():
            if tensor is not None and tensor.dim() != rank[name]:
                raise ArgumentError(f"{name} must have {rank[name]} dimensions, got shape {tuple(tensor.shape)}")
            if tensor is not None and tensor.shape[0] not in (1, self.heads):
                raise ArgumentError(f"{name} is for {tensor.shape[0]} heads, W_Q for {self.heads}; expected that or 1")
        if (self.M_K is None) != (self.M_V is None):
            raise ArgumentError("memory needs keys and values: give both M_K and M_V or neither")
        if self.scope == "memory" and self.M_K is None:
            raise ArgumentError("a head of scope 'memory' sees only memory slots: give M_K and M_V")
        if self.scope == "memory" and any(given[name] is not None for name in ("W_K", "b_K", "W_V", "b_V")):
            raise ArgumentError("a head of scope 'memory' has no token slots: leave W_K, b_K, W_V and b_V out")
        if self.scope != "memory" and (
            (self.W_K is None and self.b_K is None) or (self.W_V is None and self.b_V is None)
        ):
            raise ArgumentError(f"a head of scope '{self.scope}' needs token keys (W_K or b_K) and values (W_V or b_V)")
        for what, axes in SIZES.items():
            sizes = {name: t.shape[axis] for name, axis in axes.items() if (t := given[name]) is not None}
            if len(set(sizes.values())) > 1:
                shown = ", ".join(f"{name} has {size}" for name, size in sizes.items())
                raise ArgumentError(f"these tables must have the same number of {what}: {shown}")

    @property
    def heads(self) -> int:
        """The number of query heads."""
        return self.W_Q.shape[0]

    @property
    def slots(self) -> int:
        """The number of memory slots."""
        return 0 if self.M_K is None else self.M_K.shape[-2]

    @property
    def width(self) -> int:
        """The number of channels that come out."""
        return self.W_O.shape[-1]

    def scores(self, Z: Tensor, rows: slice = slice(None)) -> Tensor:
        """The logits, shape (..., head, slot): token slots first, then memory.

        `rows` picks the querying tokens of scope "tokens"; keys always come from all of them.
        """
        q = _project(Z[..., rows, :] if self.scope == "tokens" else Z, self.W_Q, self.b_Q)
        parts = []
        if self.scope == "self":
            if self.W_K is None:  # a constant key: the logit is affine in the query
                parts.append(_against(q, self.b_K.unsqueeze(-2)))
            else:
                parts.append((q.unsqueeze(-2) @ _project(Z, self.W_K, self.b_K).unsqueeze(-1)).squeeze(-1))
        elif self.scope == "tokens":
            keys = _project(Z, self.W_K, self.b_K)
            tokens = (q.transpose(-3, -2) @ keys.transpose(-3, -2).transpose(-2, -1)).transpose(-3, -2)
            if self.causal:
                n = Z.shape[-2]
                later = torch.ones(n, n, dtype=torch.bool, device=Z.device).triu(1)[rows]
                tokens = tokens.masked_fill(later.unsqueeze(-2), float("-inf"))
            parts.append(tokens)
        if self.M_K is not None:
            parts.append(_against(q, self.M_K))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def weights(self, Z: Tensor) -> Tensor:
        """The attention weights, shape (..., head, slot); token slots first, then memory."""
        return torch.softmax(self.scores(Z), dim=-1)

    def forward(self, Z: Tensor) -> Tensor:
        """The output for all tokens, in chunks where that saves memory."""
        if torch.compiler.is_compiling():  # a traced graph has no loops over chunks: its runtime decides
            return self.attend(Z)
        if self.scope == "tokens":
            n, per_row = Z.shape[-2], max(1, Z[..., 0, 0].numel() * self.heads * (Z.shape[-2] + self.slots))
            step = max(1, CHUNK // per_row)
            return self.attend(Z) if step >= n or _whole(self, Z) else _in_chunks(self, Z, step, self.width)
        return _along_rows(self, Z)

    def attend(self, Z: Tensor, rows: slice = slice(None)) -> Tensor:
        """The output for some rows at once: no chunks, and nobody who watches the module is told."""
        if self.scope != "tokens" and rows != slice(None):
            Z, rows = Z[..., rows, :], slice(None)
        if self.constant and torch.compiler.is_compiling():
            return self._by_slots(Z) if not exporting() and self._few(Z.dtype) else self._attend_constant(Z)
        if self.constant:
            return _rows_first(self, Z)
        weights = torch.softmax(self.scores(Z, rows), dim=-1)
        split = weights.shape[-1] - self.slots
        read: Tensor | None = None
        if self.scope == "self":
            read = (weights[..., :1].unsqueeze(-2) @ _project(Z, self.W_V, self.b_V).unsqueeze(-2)).squeeze(-2)
        elif self.scope == "tokens":
            values = _project(Z, self.W_V, self.b_V)
            read = (weights[..., :split].transpose(-3, -2) @ values.transpose(-3, -2)).transpose(-3, -2)
        if self.M_V is not None:
            memory = _against(weights[..., split:], self.M_V.transpose(-2, -1))
            read = memory if read is None else read + memory
        return _against_output(read, self.W_O)

    @property
    def constant(self) -> bool:
        """Whether all keys are constants: then a head reads its own row and no other."""
        return self.scope == "memory" or (self.scope == "self" and self.W_K is None and self.M_K is not None)

    def stack(self) -> Sequence[_OneGroup]:
        """The layers of a network of this group alone."""
        return [_OneGroup(self)]

    def along(self, many: bool = False) -> Columns:
        """The same where all keys are constants, from and to (channel, row): every operation runs along the rows. What
        does not depend on them is made ready here, once for `many` rows: then tables that only select are looked for,
        through which no gradient passes."""
        keys, values, own = self.M_K, self.M_V.transpose(-2, -1), self.scope == "self"
        if own:
            both = max(keys.shape[0], self.b_K.shape[0])
            keys = torch.cat([self.b_K.unsqueeze(-2).expand(both, -1, -1), keys.expand(both, -1, -1)], dim=-2)
        if keys.shape[0] == values.shape[0] == 1 < self.heads:
            return self._side_by_side(keys, values, many)
        query = _projection(self.W_Q, self.b_Q, many)
        value = _projection(self.W_V, self.b_V, many) if own else None
        summed, output = self.W_O.shape[0] == 1 < self.heads, _product(self.W_O.flatten(0, 1).t(), many)

        def columns(X: Tensor) -> Tensor:
            weights = torch.softmax(keys @ query(X), dim=-2)
            read = values @ (weights[:, 1:] if own else weights)
            if value is not None:
                read = torch.addcmul(read, weights[:, :1], value(X))
            return output(read.sum(0) if summed else read.flatten(0, 1))

        return columns

    def _side_by_side(self, keys: Tensor, values: Tensor, many: bool) -> Columns:
        """`along` with one table for all heads: their rows side by side, (coordinate, head and row)."""
        heads, own = self.heads, self.scope == "self"
        query = _projection(self.W_Q, self.b_Q, many, heads_last=True)
        value = _projection(self.W_V, self.b_V, many, heads_last=True) if own else None
        summed = self.W_O.shape[0] == 1 < heads
        output = _product(self.W_O[0].t() if summed else self.W_O.permute(2, 1, 0).flatten(1), many)

        def columns(X: Tensor) -> Tensor:
            weights = torch.softmax(keys @ query(X).flatten(1).unsqueeze(0), dim=-2)
            read = (values @ (weights[:, 1:] if own else weights)).view(values.shape[1], heads, X.shape[-1])
            if value is not None:
                read = torch.addcmul(read, weights[:, 0].view(heads, X.shape[-1]), value(X))
            return output(read.sum(1) if summed else read.flatten(0, 1))

        return columns

    def unrolled(self, columns: Sequence[Tensor]) -> list[Tensor]:
        """The same written out for every head and slot, a tensor for each channel: a compiler makes one loop of it."""
        tables = {name: table.expand(self.heads, *table.shape[1:]) for name, table in _tables(self).items()}
        every = []  # what each head and value channel read, and the output table's row for it
        for head in range(self.heads):
            own = {name: table[head] for name, table in tables.items()}
            keys, values = own["M_K"], [value.unbind() for value in own["M_V"].unbind(-1)]
            if self.scope == "self":
                keys = torch.cat([own["b_K"].unsqueeze(0), keys])
                mine = _affine(own.get("W_V"), own.get("b_V"), columns)
                values = [(first, *rest) for first, rest in zip(mine, values, strict=True)]
            weights, total = _unnormed(_affine(keys.t(), None, _affine(own["W_Q"], own.get("b_Q"), columns)))
            reads = [_inner(weights, value) / total for value in values]
            every += [*zip(reads, own["W_O"].unbind(), strict=True)]
        return [_inner([x for x, _ in every], [row[j] for _, row in every]) for j in range(self.width)]

    def _few(self, dtype: torch.dtype) -> bool:
        """Whether a compiler may write every slot out, all tables being of this dtype: other mixtures raise."""
        return self.slots <= SLOTS and all(p.dtype == dtype for p in self.parameters())

    def _by_slots(self, Z: Tensor) -> Tensor:
        """The same where all keys are constants, written out for every slot: pointwise over rows and heads, one loop of
        a compiled program."""
        keys, values = [*self.M_K.unbind(1)], [*self.M_V.unbind(1)]  # of each slot, (head or 1, coordinate)
        own = None
        if self.scope == "self":
            keys, own = [self.b_K, *keys], _coordinates(Z, self.W_V, self.b_V)
        query = _coordinates(Z, self.W_Q, self.b_Q)
        weights, total = _unnormed([_inner(query, key.unbind(-1)) for key in keys])
        reads = []
        for j in range(self.M_V.shape[-1]):
            slots = [value[:, j] for value in values]
            reads.append(_inner(weights, slots if own is None else [own[j], *slots]) / total)
        return _against_output(torch.stack(reads, -1), self.W_O)

    def _attend_constant(self, Z: Tensor) -> Tensor:
        """The same where all keys are constants, with rows last: a softmax over few slots runs along the rows then."""
        flat = Z.reshape(-1, Z.shape[-1])
        q = _project(flat, self.W_Q, self.b_Q)
        keys = self.M_K
        if self.scope == "self":
            both = max(keys.shape[0], self.b_K.shape[0])
            own = self.b_K.unsqueeze(-2).expand(both, -1, -1)
            keys = torch.cat([own, keys.expand(both, -1, -1)], dim=-2)
        shared = keys.shape[0] == self.M_V.shape[0] == 1
        # (head or 1, slot, key) times (head or 1, key, row): all heads are rows of one table when it is shared
        queries = q.reshape(1, -1, q.shape[-1]).transpose(-2, -1) if shared else q.permute(1, 2, 0)
        weights = torch.softmax(keys @ queries, dim=-2)
        split = keys.shape[-2] - self.slots
        rows = flat.shape[0]  # not len: that would fix the batch size of an exported graph
        read = self._by_row(self.M_V.transpose(-2, -1) @ weights[:, split:], rows, shared)
        if self.scope == "self":
            seen = self._by_row(weights[:, :1], rows, shared)
            read = read + (seen.unsqueeze(-2) @ _project(flat, self.W_V, self.b_V).unsqueeze(-2)).squeeze(-2)
        return _against_output(read, self.W_O).reshape(*Z.shape[:-1], self.W_O.shape[-1])

    def _by_row(self, x: Tensor, rows: int, shared: bool) -> Tensor:
        """(head, value, row), or (1, value, row and head) when heads share their table, -> (row, head, value)."""
        if not shared:
            return x.permute(2, 0, 1)
        return x[0].transpose(0, 1).reshape(rows, self.heads, x.shape[1])

    def extra_repr(self) -> str:
        return (
            f"{self.heads} {self.scope} heads, {self.slots} memory slots{', ' + self.purpose if self.purpose else ''}"
        )


@dataclass(frozen=True)
class _OneGroup:
    """A layer that is one group of heads."""

    group: Heads
    S: Tensor | None = None
    s: Tensor | None = None

    def heads(self) -> list[Heads]:
        """The group."""
        return [self.group]


class _Some(nn.Module):
    """What a module computes of some rows: nobody who watches the module is told of parts."""

    def __init__(self, module: Heads | AttentionLayer | AttentionOnly):
        super().__init__()
        self.module = module

    def forward(self, Z: Tensor, rows: slice) -> Tensor:
        return self.ready()(Z, rows)

    def ready(self, many: bool = False) -> Callable[[Tensor, slice], Tensor]:
        """What computes them, for many calls."""
        module = self.module
        if isinstance(module, Heads) and not module.constant:
            return module.attend
        along = module.along(many)
        return lambda Z, rows: along(Z[rows].t()).t()


class _Chunks(torch.autograd.Function):
    """A module, some rows at a time. Keeps the input and not the weights: going back, it attends again, and where
    derivatives of the gradients are wanted it keeps what they are made of."""

    @staticmethod
    def forward(
        ctx: Any, part: _Some, rows: list[slice], width: int, names: list[str], Z: Tensor, *tables: Tensor
    ) -> Tensor:
        ctx.part, ctx.rows, ctx.names = part, rows, names
        ctx.save_for_backward(Z, *tables)
        out, compute = Z.new_empty(*Z.shape[:-1], width), part.ready(True)
        for some in rows:
            out[..., some, :] = compute(Z, some)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed, twice = ctx.needs_input_grad[4:], torch.is_grad_enabled()
        inputs = [
            t if twice else t.detach().requires_grad_(need) for t, need in zip(ctx.saved_tensors, needed, strict=True)
        ]
        tables = dict(zip(ctx.names, inputs[1:], strict=True))
        wanted = [t for t, need in zip(inputs, needed, strict=True) if need]
        sums = [torch.zeros_like(t) for t in wanted]
        for some in ctx.rows:
            with torch.enable_grad():
                out = torch.func.functional_call(ctx.part, tables, (inputs[0], some))
            parts = torch.autograd.grad(out, wanted, grad[..., some, :], allow_unused=True, create_graph=twice)
            sums = [total if part is None else total + part for total, part in zip(sums, parts, strict=True)]
        found = iter(sums)
        return None, None, None, None, *(next(found) if need else None for need in needed)


def _tables(module: nn.Module) -> dict[str, Tensor]:
    """Its parameters by name, also those that have several."""
    return dict(module.named_parameters(remove_duplicate=False))


def _whole(module: nn.Module, Z: Tensor) -> bool:
    """Whether torch.func is at work: chunks have a gradient, and none of its rules."""
    return transformed(Z, *module.parameters())


def _in_chunks(module: Heads | AttentionLayer | AttentionOnly, Z: Tensor, step: int, width: int) -> Tensor:
    part = _Some(module)
    tables = dict(part.named_parameters())
    rows = [slice(i, min(i + step, Z.shape[-2])) for i in range(0, Z.shape[-2], step)]
    return cast(Tensor, _Chunks.apply(part, rows, width, [*tables], Z, *tables.values()))


def _along_rows(module: Heads | AttentionLayer | AttentionOnly, Z: Tensor) -> Tensor:
    """What reads each row by itself, through `along`, in pieces that stay in the cache; in one call where there are
    kernels."""
    if module.constant and (out := computed(module, module.stack, Z)) is not None:
        return out
    flat = Z.reshape(-1, Z.shape[-1])
    most = max((group.heads * (group.slots + 1) for layer in module.stack() for group in layer.heads()), default=1)
    step = max(1, (CACHED if Z.device.type == "cpu" else CHUNK) // most)
    if step >= flat.shape[0] or _whole(module, Z):
        return module.attend(Z) if isinstance(module, Heads) else _rows_first(module, Z)
    return _in_chunks(module, flat, step, module.width).reshape(*Z.shape[:-1], module.width)


def _rows_first(module: Heads | AttentionLayer | AttentionOnly, Z: Tensor) -> Tensor:
    """`along`, from and to (..., row, channel)."""
    out = module.along()(Z.reshape(-1, Z.shape[-1]).t())
    return out.t().contiguous().view(*Z.shape[:-1], out.shape[0])


class AttentionLayer(nn.Module):
    """One layer: a linear skip plus groups of heads. Without heads it is an affine map.

    >>> layer = AttentionLayer([], S=torch.eye(2), s=torch.ones(2))
    >>> layer(torch.zeros(1, 2))
    tensor([[1., 1.]], grad_fn=<AddBackward0>)
    """

    def __init__(self, groups: Iterable[Heads], S: Tensor | None = None, s: Tensor | None = None):
        super().__init__()
        self.groups = nn.ModuleList(groups)
        self.S = None if S is None else nn.Parameter(S.detach().clone())
        self.s = None if s is None else nn.Parameter(s.detach().clone())
        if self.S is None and not len(self.groups):
            raise ArgumentError("an attention layer needs heads or a linear skip")

    def heads(self) -> list[Heads]:
        """The groups of heads of this layer."""
        return [cast(Heads, group) for group in self.groups]

    def stack(self) -> Sequence[AttentionLayer]:
        """The layers of a network of this one alone."""
        return [self]

    @property
    def constant(self) -> bool:
        """Whether every row is computed by itself, by heads as they are: nobody looks at what comes out of them."""
        return all(type(group) is Heads and group.constant and not hooked(group) for group in self.groups)

    @property
    def width(self) -> int:
        """The number of channels that come out."""
        return int((self.heads()[0].W_O if self.S is None else self.S).shape[-1])

    def forward(self, Z: Tensor) -> Tensor:
        if len(self.groups) and self.constant and not torch.compiler.is_compiling():
            return _along_rows(self, Z)
        terms = [group(Z) for group in self.groups]  # lemmas count on this order: heads, then the skip, then its bias
        if self.S is not None:
            terms.append(Z @ self.S)
        if self.s is not None:
            terms.append(self.s)
        return functools.reduce(torch.add, terms)

    def along(self, many: bool = False) -> Columns:
        """The same for heads with constant keys, from and to (channel, row)."""
        parts = [group.along(many) for group in self.heads()]
        skip = None if self.S is None else _product(self.S.t(), many)
        bias = None if self.s is None else self.s.unsqueeze(-1)

        def columns(X: Tensor) -> Tensor:
            terms = [part(X) for part in parts]
            if skip is not None:
                terms.append(skip(X))
            if bias is not None:
                terms.append(bias)
            return functools.reduce(torch.add, terms)

        return columns

    def unrolled(self, columns: Sequence[Tensor]) -> list[Tensor]:
        """The same written out, a tensor for each channel."""
        terms = [group.unrolled(columns) for group in self.heads()]
        if self.S is not None:
            terms.append(_affine(self.S, None, columns))
        if self.s is not None:
            terms.append(list(self.s.unbind()))
        return [functools.reduce(torch.add, channel) for channel in zip(*terms, strict=True)]


class AttentionOnly(nn.Module):
    """Attention layers one after the other."""

    def __init__(self, layers: Iterable[AttentionLayer]):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def stack(self) -> list[AttentionLayer]:
        """The layers, first layer first."""
        return [cast(AttentionLayer, layer) for layer in self.layers]

    def groups(self) -> Iterator[Heads]:
        """All groups of heads, first layer first."""
        for layer in self.stack():
            yield from layer.heads()

    @property
    def width(self) -> int:
        """The number of channels that come out."""
        return cast(AttentionLayer, self.layers[-1]).width

    @property
    def constant(self) -> bool:
        """Whether every row is computed by itself, by layers as they are."""
        return all(type(layer) is AttentionLayer and layer.constant and not hooked(layer) for layer in self.layers)

    def forward(self, Z: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and (out := again(self, Z)) is not None:
            return out
        if self.constant and not torch.compiler.is_compiling():
            return _along_rows(self, Z)
        if self.constant and not exporting() and self._small(Z.dtype):
            return self.unrolled(Z)
        for layer in self.layers:
            Z = layer(Z)
        return Z

    def _small(self, dtype: torch.dtype) -> bool:
        """Whether few numbers of this dtype make the network: mixed with others, products by numbers would hide it."""
        parameters = list(self.parameters())
        return all(p.dtype == dtype for p in parameters) and sum(p.numel() for p in parameters) <= UNROLLED

    def along(self, many: bool = False) -> Columns:
        """The same for heads with constant keys, from and to (channel, row)."""
        parts = [cast(AttentionLayer, layer).along(many) for layer in self.layers]
        return lambda X: functools.reduce(lambda state, part: part(state), parts, X)

    def unrolled(self, Z: Tensor) -> Tensor:
        """The same written out for every channel, head and slot: pointwise, for a compiler to fuse."""
        columns = list(Z.unbind(-1))
        for layer in self.layers:
            columns = cast(AttentionLayer, layer).unrolled(columns)
        return torch.stack(torch.broadcast_tensors(*columns), -1)


def hooked(module: nn.Module) -> bool:
    """Whether somebody watches or changes what a module computes: then it is called."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in vars(module)


def _project(Z: Tensor, W: Tensor | None, b: Tensor | None) -> Tensor:
    """Z W + b for each head: (..., channel) -> (..., head, key)."""
    if W is None:
        assert b is not None
        return b.expand(*Z.shape[:-1], *b.shape)
    heads, channels, width = W.shape
    out = (Z @ W.transpose(0, 1).reshape(channels, heads * width)).unflatten(-1, (heads, width))
    return out if b is None else out + b


def _coordinates(Z: Tensor, W: Tensor | None, b: Tensor | None) -> list[Tensor]:
    """The same, a tensor (..., head) for each coordinate."""
    if W is None:
        assert b is not None
        return list(b.unbind(-1))
    out = [Z @ table.t() for table in W.unbind(-1)]
    return out if b is None else [x + bias for x, bias in zip(out, b.unbind(-1), strict=True)]


def _projection(W: Tensor | None, b: Tensor | None, many: bool, heads_last: bool = False) -> Columns:
    """The same with rows last: (channel, row) -> (head, key, row), or (key, head, row) with `heads_last`."""
    bias = None if b is None else (b.t() if heads_last else b).unsqueeze(-1)
    if W is None:
        assert bias is not None
        return lambda X: bias
    first, second = (2, 0) if heads_last else (0, 2)
    sizes, table = (W.shape[first], W.shape[second]), _product(W.permute(first, second, 1).flatten(0, 1), many)
    if bias is None:
        return lambda X: table(X).view(*sizes, X.shape[-1])
    return lambda X: table(X).view(*sizes, X.shape[-1]) + bias


def _product(table: Tensor, many: bool) -> Columns:
    """table @ X for a table (result, channel). For `many` rows of X on a processor, one whose rows have one entry at
    most picks rows and scales them: the same numbers, since nothing is added up."""
    if many and table.shape[-1] >= PICKED and table.device.type == "cpu" and type(table) is Tensor:
        filled = table != 0
        if int(filled.sum(-1).amax()) <= 1:
            place = filled.to(table.dtype).argmax(-1)
            return _picking(place, table.gather(-1, place.unsqueeze(-1)))
    return lambda X: table @ X


def _picking(place: Tensor, scale: Tensor) -> Columns:
    """Some rows, each times a number."""
    start, picked = int(place[0]), len(place)
    one_after_another = torch.equal(place, torch.arange(start, start + picked))
    as_they_are = bool((scale == 1).all())

    def columns(X: Tensor) -> Tensor:
        rows = X[start : start + picked] if one_after_another else X.index_select(0, place)
        return rows if as_they_are else rows * scale

    return columns


def _inner(x: Iterable[Tensor], y: Iterable[Tensor]) -> Tensor:
    """The sum of products."""
    return functools.reduce(torch.add, map(torch.mul, x, y))


def _affine(W: Tensor | None, b: Tensor | None, columns: Sequence[Tensor]) -> list[Tensor]:
    """x W + b, a tensor for each channel of x and of the result."""
    if W is None:
        return list(cast(Tensor, b).unbind())
    out = [_inner(columns, column.unbind()) for column in W.unbind(1)]
    return out if b is None else [x + bias for x, bias in zip(out, b.unbind(), strict=True)]


def _unnormed(logits: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """The weights of a softmax over a few tensors, and what they have to be divided by. What is read may be divided
    instead of them: one quotient on the way to the result, as in a softmax."""
    most = functools.reduce(torch.maximum, logits)
    parts = [torch.exp(logit - most) for logit in logits]
    return parts, functools.reduce(torch.add, parts)


def _against(x: Tensor, table: Tensor) -> Tensor:
    """Inner products of each head's row with its table: (..., head, k), (head or 1, slot, k) -> (..., head, slot)."""
    if table.shape[0] == 1:
        return x @ table[0].transpose(-2, -1)
    return torch.einsum("...hk,hmk->...hm", x, table)


def _against_output(read: Tensor, W_O: Tensor) -> Tensor:
    """The output projection summed over heads: (..., head, value) and (head, value, channel) -> (..., channel)."""
    if W_O.shape[0] == 1 and read.shape[-2] != 1:
        return read.sum(-2) @ W_O[0]
    return read.flatten(-2) @ W_O.flatten(0, 1)
