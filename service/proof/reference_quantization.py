"""Quantized targets: how the reference dequantizes their weights, and which it cannot.

Imports torch and transformers: import it in the reference's own process.

The engine computes with the quantized weights, so the reference multiplies with exactly those values in the
model's dtype. An engine may also round the inputs of each matmul to 8 bits: the reference does not, and
`service.proof.canary` allows for the difference.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.auto import AutoHfQuantizer

from service.proof.canary import no_reference

_STORED = ("weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
"""The names that compressed-tensors gives to the parts of one weight."""
_ACTIVATION_BITS = 8


@dataclass(frozen=True, slots=True)
class Quantization:
    """transformers' quantizer set to dequantize, additional conversions, and the bits of matmul inputs."""

    quantizer: Any
    conversions: tuple[WeightConverter, ...]
    activation_bits: int | None


PLAIN = Quantization(None, (), None)
"""For weights that are not quantized."""


def quantization_of(config: PreTrainedConfig) -> Quantization:
    """Return how to read a model's weights. Raises EngineRefused."""
    text = config.get_text_config(decoder=True)
    config_entry = getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)
    if config_entry is None:
        return PLAIN
    method = str(config_entry.get("quant_method"))
    if method not in ("compressed-tensors", "fp8", "mxfp4"):
        raise no_reference(f"no reference: weights quantized by {method!r} cannot be read on the CPU")
    quantizer = AutoHfQuantizer.from_config(dict(config_entry) | {"dequantize": True}, pre_quantized=True)
    if method == "compressed-tensors":
        return _compressed_tensors(quantizer, config_entry.get("format"))
    return Quantization(quantizer, (), _ACTIVATION_BITS if method == "fp8" else None)


def _compressed_tensors(quantizer: Any, form: str | None) -> Quantization:  # noqa: ANN401 - transformers'
    quantizer.validate_environment()
    schemes = list(quantizer.quantization_config.quantization_config.config_groups.values())
    if len(schemes) != 1:
        raise no_reference(f"no reference: weights of {len(schemes)} quantization schemes are not told apart")
    inputs = schemes[0].input_activations
    if inputs is not None and inputs.num_bits != _ACTIVATION_BITS:
        raise no_reference(
            f"no reference: products of {inputs.num_bits}-bit inputs are too far from the model's"
        )
    converter = WeightConverter(
        source_patterns=[f"{name}$" for name in _STORED],
        target_patterns="weight",
        operations=[_Decompress(schemes[0], form)],
    )
    return Quantization(quantizer, (converter,), inputs.num_bits if inputs is not None else None)


class _Decompress(ConversionOps):  # type: ignore[misc]
    """Builds one weight from its stored parts; an uncompressed weight passes through."""

    def __init__(self, scheme: Any, form: str | None) -> None:  # noqa: ANN401 - untyped in compressed-tensors
        self._scheme, self._form = scheme, form

    def convert(
        self, input_dict: dict[str, list[torch.Tensor]], *, full_layer_name: str, **kwargs: object
    ) -> dict[str, torch.Tensor]:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.compressors.format import infer_module_format

        parts = {name.removesuffix("$"): tensors[0] for name, tensors in input_dict.items()}
        if parts.keys() == {"weight"}:
            return {full_layer_name: parts["weight"]}
        form = self._scheme.format or self._form or infer_module_format(torch.nn.Linear, self._scheme)
        compressor = BaseCompressor.get_value_from_registry(str(getattr(form, "value", form)))
        weight: torch.Tensor = compressor.decompress(parts, self._scheme)["weight"]
        return {full_layer_name: weight}
