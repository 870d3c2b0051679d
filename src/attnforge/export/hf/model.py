"""The model class that `from_pretrained` loads: a plain transformer under the interface of Hugging Face transformers.

Importing this module registers the class, after which `AutoModel.from_pretrained(folder)` finds it as well. There is no
code in a folder and none is fetched: `config.json` describes the network, `model.safetensors` holds its weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel
from transformers.utils.generic import ModelOutput

from ...certificates.certificate import Certificate, weights_hash
from ...certificates.schema import limited, require
from ...errors import CertificateError
from ..plain.transformer import PlainTransformer, plain_family


class AttnforgeConfig(PretrainedConfig):
    """`config.json`: the description of a plain transformer and its certificate."""

    model_type = "attnforge"

    def __init__(self, network: dict[str, Any] | None = None, certificate: dict[str, Any] | None = None, **kwargs: Any):
        super().__init__(**kwargs)
        self.network, self.certificate = network, certificate


@dataclass
class AttnforgeOutput(ModelOutput):  # type: ignore[misc]
    """`output` is what the network returns; the rest is there if it was asked for."""

    output: Tensor | None = None
    attentions: tuple[Tensor, ...] | None = None


class AttnforgeModel(PreTrainedModel):  # type: ignore[misc]
    """A compiled network as a Hugging Face model: `model(x).output`, with `output_attentions=True` if wanted."""

    config_class = AttnforgeConfig
    base_model_prefix = ""
    main_input_name = "x"
    _no_split_modules = ["PlainBlock"]  # noqa: RUF012

    def __init__(self, config: AttnforgeConfig, plain: PlainTransformer | None = None):
        super().__init__(config)
        self.plain = _empty(config) if plain is None else plain
        self.post_init()

    def forward(
        self,
        *inputs: Tensor,
        x: Tensor | None = None,
        input_ids: Tensor | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> AttnforgeOutput | tuple[Tensor, ...]:
        """The network at points with batch dimensions first; several inputs in their order, or one as `x=...`; for a
        token program, `input_ids` padded to its longest sequence, and the output is logits."""
        given = tuple(t for t in (*inputs, x, input_ids) if t is not None)
        seen = tuple(self.plain.attention(*given)) if output_attentions else None
        found = AttnforgeOutput(output=self.plain(*given), attentions=seen)
        return found.to_tuple() if return_dict is False else found

    def run(self, *inputs: Tensor) -> Tensor:
        """The output itself, without checks of the input."""
        return self.plain.core(*inputs)

    @property
    def certificate(self) -> Certificate:
        """The certificate of these weights; raises `CertificateError` if they have changed since it was made."""
        try:
            return self.plain.certificate
        except CertificateError:  # none yet: the weights were filled in from a file, and config.json states one
            if self.config.certificate is None:
                raise
            stated = Certificate.from_json(self.config.certificate)
            if stated.weights != weights_hash(self.plain):
                raise CertificateError(
                    "the certificate is stale: config.json states it for other weights; af.certify(model.plain) "
                    "computes a new one"
                ) from None
            return self.plain.attach(stated)

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Nothing: every weight comes from the file."""


def _empty(config: AttnforgeConfig) -> PlainTransformer:
    """A plain transformer of the described shape, its weights still to be filled in."""
    network = dict(config.network or {})
    limited(network, "the network in config.json")
    kind = plain_family(network.pop("family", None), "config.json")
    require(network, kind.schema, "the network in config.json")
    return kind.unfilled(network)


AutoConfig.register(AttnforgeConfig.model_type, AttnforgeConfig, exist_ok=True)
AutoModel.register(AttnforgeConfig, AttnforgeModel, exist_ok=True)
