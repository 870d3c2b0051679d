"""Which operations an attention-only network may use: the tables the walk reads, by operator name.

An operator that stands in none of these tables is an offence, so a forgotten entry is loud and a new operator of
PyTorch can never slip through.
"""

from __future__ import annotations

from attnforge.errors import ArgumentError


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
