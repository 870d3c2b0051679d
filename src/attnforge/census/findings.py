"""What an attention-only network may use, and what was found in one: tables of operators, `Census` and `Offence`.

An operator that stands in none of the tables is an offence, so a forgotten entry is loud and a new operator of PyTorch
can never slip through. `structural` is the cheap check at the end of a compilation: it looks at the classes of modules
instead of the operators they compute.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from ..errors import ArgumentError, PurityError


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


CATEGORIES = ("attention", "affine", "movement", "lookup", "mask", "positions", "identity", "constant")

# -- attention ------------------------------------------------------------------------------------------------------
SOFTMAX = _names("softmax _softmax _safe_softmax")
FUSED_ATTENTION = _names(
    """scaled_dot_product_attention _scaled_dot_product_attention_math _scaled_dot_product_flash_attention
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention
    _scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable"""
)
_custom: dict[str, str] = {}

# -- affine maps ----------------------------------------------------------------------------------------------------
# The products that may be Q K^T or weights times V, with the names of their two factors; einsum is the fifth.
CONTRACTIONS = {
    "matmul": ("self", "other"),
    "mm": ("self", "mat2"),
    "bmm": ("self", "mat2"),
    "addmm": ("mat1", "mat2"),
    "baddbmm": ("batch1", "batch2"),
}
# Of every other product the arguments that multiply one another: at most one of them may depend on data.
FACTORS = {
    "mul": ("self", "other"),
    "multiply": ("self", "other"),
    "linear": ("input", "weight"),
    "mv": ("self", "vec"),
    "addmv": ("mat", "vec"),
    "dot": ("self", "tensor"),
    "inner": ("self", "other"),
    "outer": ("self", "vec2"),
    "tensordot": ("self", "other"),
    "kron": ("self", "other"),
    "addcmul": ("tensor1", "tensor2"),
    "conv1d": ("input", "weight"),
    "conv2d": ("input", "weight"),
    "conv3d": ("input", "weight"),
    "conv_transpose1d": ("input", "weight"),
    "conv_transpose2d": ("input", "weight"),
    "conv_transpose3d": ("input", "weight"),
    "convolution": ("input", "weight"),
}
# Arguments that divide, or that are a statistic or a blending weight: none of them may depend on data.
FIXED = {
    "div": ("other",),
    "divide": ("other",),
    "true_divide": ("other",),
    "addcdiv": ("tensor2",),
    "lerp": ("weight",),
    "batch_norm": ("weight", "bias", "running_mean", "running_var"),
    "_native_batch_norm_legit_no_training": ("weight", "bias", "running_mean", "running_var"),
}
ELEMENTWISE = _names("add sub subtract rsub neg negative positive mul multiply div divide true_divide")
AFFINE = (
    ELEMENTWISE
    | FACTORS.keys()
    | FIXED.keys()
    | _names(
        """sum mean cumsum diff trace index_add scatter_add avg_pool1d avg_pool2d avg_pool3d
        adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d"""
    )
)

# -- data movement --------------------------------------------------------------------------------------------------
MOVEMENT = _names(
    """view reshape _unsafe_view view_copy flatten unflatten ravel permute transpose t swapaxes swapdims movedim
    moveaxis mT mH numpy_T adjoint expand expand_as broadcast_to broadcast_tensors expand_copy view_as reshape_as
    cat concat concatenate stack hstack vstack dstack block_diag slice select narrow index gather index_select take
    take_along_dim split split_with_sizes tensor_split chunk unsafe_split unsafe_split_with_sizes unsafe_chunk unbind
    unfold im2col as_strided pad constant_pad_nd reflection_pad1d reflection_pad2d replication_pad1d
    replication_pad2d flip fliplr flipud roll rot90 squeeze unsqueeze atleast_1d atleast_2d atleast_3d repeat tile
    repeat_interleave masked_fill where masked_scatter slice_scatter select_scatter diagonal_scatter scatter
    index_put _unsafe_index_put _unsafe_index index_copy index_fill copy fill tril triu diagonal diag diag_embed
    pixel_shuffle pixel_unshuffle view_as_real view_as_complex real imag _conj conj _conj_physical resolve_conj
    resolve_neg to _to_copy type_as"""
)
IDENTITY = _names("clone contiguous detach alias lift_fresh lift_fresh_copy lift dropout feature_dropout alpha_dropout")
CASTS = _names("to _to_copy type_as")

# A score (a product of two data tensors) may meet these on its way into a softmax, and nothing else. A sum is what
# slices and additions make as well: an inner product taken block by block.
SCORE_PATH = ELEMENTWISE | MOVEMENT | IDENTITY | {"sum"}

# Arguments that steer where values go; they must not depend on data.
STEERING = _names("index indices mask condition boundaries repeats")
# Arguments that lend only their shape or dtype.
SHAPE_ONLY = {name: "other" for name in ("expand_as", "view_as", "reshape_as", "type_as")} | {"to": "other"}
CREATION = _names(
    """zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty new_empty_strided
    sym_size sym_stride sym_numel sym_storage_offset size numel dim"""
)
ASSERTIONS = _names(
    "_assert_tensor_metadata _assert_async _assert_scalar sym_constrain_range_for_size sym_constrain_range"
)

# -- integer and boolean inputs -------------------------------------------------------------------------------------
LOOKUP = _names("embedding")
INDEXING = _names("index gather index_select take take_along_dim _unsafe_index")
POSITIONS = _names("sin cos log outer")
MASKS = (
    MOVEMENT
    | IDENTITY
    | ELEMENTWISE
    | _names(
        """eq ne lt le gt ge logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not
        bitwise_xor __and__ __or__ __xor__ any all isin one_hot sum mean cumsum max min amax amin maximum minimum
        clamp clamp_min clamp_max abs sign floor_divide remainder fmod bucketize argmax argmin isinf isnan"""
    )
)

# -- why an operation is refused, where more can be said than that it is not in the table ----------------------------
_REASONS = {
    "an activation function; only softmax may be nonlinear": _names(
        """relu relu6 leaky_relu prelu rrelu elu celu selu gelu silu mish sigmoid tanh hardtanh hardswish
        hardsigmoid softplus softsign logsigmoid log_sigmoid glu threshold"""
    ),
    "a normalisation divides by a statistic of the data": _names(
        """layer_norm native_layer_norm group_norm native_group_norm rms_norm _fused_rms_norm instance_norm
        _native_batch_norm_legit native_batch_norm norm linalg_vector_norm linalg_norm renorm"""
    ),
    "a choice by value; only softmax may compare data": _names(
        """max min amax amin argmax argmin maximum minimum fmax fmin clamp clamp_min clamp_max clip topk sort argsort
        median kthvalue mode cummax cummin max_pool1d max_pool2d max_pool3d max_pool1d_with_indices
        max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool1d adaptive_max_pool2d nonzero unique
        masked_select bucketize searchsorted"""
    ),
    "a comparison of data; only softmax may compare data": _names(
        "eq ne lt le gt ge isclose sign sgn logical_and logical_or logical_not heaviside isnan isinf"
    ),
    "a nonlinear function of data; only softmax may be nonlinear": _names(
        """exp exp2 expm1 log log2 log10 log1p log_softmax _log_softmax logsumexp sqrt rsqrt reciprocal pow square abs
        sin cos tan asin acos atan atan2 sinh cosh erf erfc floor ceil round trunc frac remainder fmod var std
        var_mean std_mean prod cumprod logcumsumexp"""
    ),
    "a recurrent network gates its state with data": _names("lstm gru rnn_tanh rnn_relu lstm_cell gru_cell"),
    "reads a number out of the data": _names("item _local_scalar_dense"),
}
UNKNOWN = "not in the table of allowed operations"


def reason(name: str) -> str:
    """Why the operation `name` must not act on data."""
    return next((why for why, names in _REASONS.items() if name in names), UNKNOWN)


def allow_custom(name: str, why: str) -> None:
    """Count the custom operator `name` as attention; `why` says how it equals softmax attention.

    Only operators of attnforge's own namespace can be entered: each is a faster evaluation of an attention that the
    network also has in plain form.
    """
    if not name.startswith("attnforge::") or name == "attnforge::":
        raise ArgumentError(f"name must be an operator in attnforge's namespace, 'attnforge::...': got {name!r}")
    if not why.strip():
        raise ArgumentError(f"why must say how {name} equals softmax attention; it is empty")
    _custom[name] = why


def custom() -> dict[str, str]:
    """The custom operators that count as attention, each with its reason."""
    return dict(_custom)


@dataclass(frozen=True)
class Census:
    """How often a network uses each operation, by category.

    >>> census = Census.of([("affine", "linear"), ("attention", "softmax"), ("affine", "linear")])
    >>> census.total, census.attention, census.affine
    (3, 1, 2)
    >>> print(census)
    category   operation  count
    attention  softmax        1
    affine     linear         2
    total                     3
    """

    counts: tuple[tuple[str, str, int], ...]
    """Rows (category, operation, count), in the order of the categories, the most frequent operation first."""

    def __post_init__(self) -> None:
        for category, operation, count in self.counts:
            if category not in CATEGORIES:
                known = ", ".join(CATEGORIES)
                raise ArgumentError(f"category must be one of {known}: got {category!r} for {operation}")
            if count < 1:
                raise ArgumentError(f"a count must be at least 1: got {count} for {operation}")

    @classmethod
    def of(cls, entries: Iterable[tuple[str, str]]) -> Census:
        """The census of (category, operation) pairs, one pair for each operation of the graph."""
        rows = [(category, operation, count) for (category, operation), count in Counter(entries).items()]
        return cls(tuple(sorted(rows, key=lambda row: (CATEGORIES.index(row[0]), -row[2], row[1]))))

    @property
    def by_category(self) -> dict[str, int]:
        """The number of operations in every category, zeros included."""
        return {name: sum(row[2] for row in self.counts if row[0] == name) for name in CATEGORIES}

    @property
    def by_operation(self) -> dict[str, int]:
        """The number of uses of every operation, whatever its category."""
        totals: Counter[str] = Counter()
        for _, operation, count in self.counts:
            totals[operation] += count
        return dict(totals)

    @property
    def total(self) -> int:
        """All operations together."""
        return sum(row[2] for row in self.counts)

    @property
    def attention(self) -> int:
        """Softmaxes, fused attentions, and the products Q K^T and weights times V."""
        return self.by_category["attention"]

    @property
    def affine(self) -> int:
        """Linear maps, sums, and products with constants."""
        return self.by_category["affine"]

    @property
    def movement(self) -> int:
        """Views, slices, concatenations, gathers with fixed indices, changes of dtype or device."""
        return self.by_category["movement"]

    @property
    def lookup(self) -> int:
        """Rows of a table, chosen by an integer input."""
        return self.by_category["lookup"]

    @property
    def mask(self) -> int:
        """Operations on integer and boolean inputs alone."""
        return self.by_category["mask"]

    @property
    def positions(self) -> int:
        """Functions of positions that come from an integer input, such as rotary angles."""
        return self.by_category["positions"]

    @property
    def identity(self) -> int:
        """Copies, and dropout in evaluation mode."""
        return self.by_category["identity"]

    @property
    def constant(self) -> int:
        """Operations on weights and constants alone."""
        return self.by_category["constant"]

    def __str__(self) -> str:
        rows = [("category", "operation", "count"), *((a, b, str(n)) for a, b, n in self.counts)]
        rows.append(("total", "", str(self.total)))
        first, second, third = (max(len(row[column]) for row in rows) for column in range(3))
        return "\n".join(f"{a:<{first}}  {b:<{second}}  {n:>{third}}" for a, b, n in rows)


@dataclass(frozen=True)
class Offence:
    """One operation that an attention-only network must not contain."""

    operation: str
    why: str
    source: str
    """`file:line  code` of the call, or an empty string where it is not known."""
    module: str = ""
    """The dotted path of the submodule the operation belongs to, empty for the network itself."""

    def __str__(self) -> str:
        place = f"\n      {self.source}" if self.source else ""
        return f"{self.operation}{f' in {self.module}' if self.module else ''}: {self.why}{place}"


def refusal(network: str, offences: Iterable[Offence], note: str = "") -> PurityError:
    """One error that lists every offence once, with how often it occurs."""
    counted = Counter(offences)
    lines = [f"  {f'{count} x ' if count > 1 else ''}{offence}" for offence, count in counted.items()]
    total = sum(counted.values())
    number = f"{total} operation{'s' if total > 1 else ''}"
    head = f"{network} is not attention-only: {number} beyond affine maps and softmax attention"
    hint = note or "attnforge.compile and attnforge.convert turn such operations into attention heads"
    return PurityError("\n".join([head, *lines, hint]))


# By name, not by class: the runtime is above this module, and a subclass may do anything in its forward.
KNOWN = frozenset(
    {f"attnforge.network.{name}" for name in ("Heads", "AttentionLayer", "AttentionOnly")}
    | {f"torch.nn.modules.linear.{name}" for name in ("Linear", "Identity")}
    | {f"torch.nn.modules.container.{name}" for name in ("ModuleList", "Sequential")}
    | {"torch.nn.modules.sparse.Embedding", "torch.nn.modules.dropout.Dropout"}
)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def structural(net: nn.Module) -> None:
    """Raise `PurityError` unless every submodule is of a class known to be attention-only, unchanged.

    This reads class names and runs nothing; `purity` looks at what is computed.

    >>> structural(nn.Sequential(nn.Linear(2, 2), nn.Identity()))
    """
    found = [
        Offence(type(module).__name__, why, _defined(type(module)), path)
        for path, module in net.named_modules()
        if (why := _objection(module))
    ]
    if found:
        raise refusal(type(net).__name__, found, "attnforge.purity(net) lists the operations these modules compute")


def _objection(module: nn.Module) -> str:
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    if name not in KNOWN:
        return f"{name} is not in the table of attention-only modules"
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    if any(getattr(module, hooks) for hooks in _HOOKS):
        return "it has forward hooks, which may compute anything"
    return ""


def _defined(kind: type) -> str:
    try:
        lines, start = inspect.getsourcelines(kind)
        return f"{Path(inspect.getfile(kind)).name}:{start}  {lines[0].strip()}"
    except (OSError, TypeError):  # classes made at a prompt have no source
        return ""
