"""Loads the weights of one part of the reference's model at a time, and drops them again.

Imports torch and transformers: import it in the reference's own process.

A part is a decoder layer, or any other module with tensors of its own. transformers' own loading code and
mapping convert names and tensors (renamed modules, fused experts), one part at a time. A tensor that needs no
conversion is not copied: its pages are those of the mapped file.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    dot_natural_key,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig

from service.proof.head_weights import tensor_files
from service.proof.reference_model import Skeleton


class WeightStream:
    """A model's safetensors files, and which of its parts are in memory."""

    def __init__(self, skeleton: Skeleton, folder: Path, dtype: torch.dtype) -> None:
        """Read only names. Raises EngineRefused if the index of the files cannot be read."""
        self._model = skeleton.model
        self._layers = frozenset(skeleton.layers)
        self._files = tensor_files(folder)
        quantizer, conversions = skeleton.quantization.quantizer, skeleton.quantization.conversions
        self._mapping = [*get_model_conversion_mapping(self._model, hf_quantizer=quantizer), *conversions]
        # Tensors that the model keeps in float32 whatever its dtype, such as a router's bias.
        float32_names: dict[str, torch.dtype] = self._model._get_dtype_plan(dtype)
        self._is_cast = quantizer is not None
        self._float32_names = tuple(re.compile(name.replace("*", ".*")) for name in float32_names)
        self._loading = LoadStateDictConfig(
            dtype=dtype,
            dtype_plan=float32_names,
            weight_mapping=self._mapping,
            hf_quantizer=quantizer,
        )
        self._empty: dict[str, torch.Tensor] = self._model.state_dict(keep_vars=True)
        self._names: dict[str, list[str]] = defaultdict(list)
        for name in self._empty:
            self._names[self._part_of(name)].append(name)
        self._keys: dict[str, dict[str, str]] = defaultdict(dict)
        for key, name in self._renamed():
            self._keys[self._part_of(name)][key] = name
        self._held: set[str] = set()

    @property
    def parts(self) -> Sequence[str]:
        """The decoder layers and the other modules that have tensors."""
        return list(self._names)

    def load(self, part: str) -> None:
        """Load the tensors of `part`. Raises ValueError, naming a missing or mismatched tensor."""
        if part in self._held:
            return
        self._held.add(part)
        with ExitStack() as stack:
            opened: dict[Path, Any] = {}
            slices = {}
            for key in self._keys[part]:
                path = self._files[key]
                if path not in opened:
                    opened[path] = stack.enter_context(safe_open(path, framework="pt"))
                slices[key] = opened[path].get_slice(key)
            report, _ = convert_and_load_state_dict_in_model(self._model, slices, self._loading)
        for name, why in report.conversion_errors.items():
            raise ValueError(f"{name}: {why.strip()}")
        for name, stored, expected in report.mismatched_keys:
            raise ValueError(f"{name} has shape {list(stored)}, the model wants {list(expected)}")
        for name in self._names[part]:
            self._finish(name)

    def drop(self) -> None:
        """Drop every part that is in memory."""
        for part in self._held:
            for name in self._names[part]:
                self._set(name, self._empty[name])
        self._held.clear()

    def _finish(self, name: str) -> None:
        """Check that a tensor is loaded with the model's shape, and cast it if the loader did not."""
        tensor, empty = self._model.get_parameter_or_buffer(name), self._empty[name]
        if tensor.is_meta:
            self._tie(name)
        elif tensor.shape != empty.shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, the model wants {list(empty.shape)}")
        elif self._is_cast and not any(pattern.search(name) for pattern in self._float32_names):
            # The loader leaves a quantized model's other tensors in the dtype of the file.
            cast = tensor.to(empty.dtype)
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            self._set(name, torch.nn.Parameter(cast, requires_grad=False) if is_parameter else cast)

    def _tie(self, name: str) -> None:
        """Load a tensor that the files hold under the name of a tensor that it is tied to."""
        for pair in self._model.all_tied_weights_keys.items():
            if name not in pair:
                continue
            other = pair[1] if name == pair[0] else pair[0]
            part = self._part_of(other)
            if other in self._keys[part].values():
                self.load(part)
                self._set(name, self._model.get_parameter_or_buffer(other))
                return
        raise ValueError(f"the safetensors files hold nothing for {name}")

    def _renamed(self) -> Iterator[tuple[str, str]]:
        """Yield each tensor in the files and the name that transformers gives it."""
        renamings = [entry for entry in self._mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in self._mapping if isinstance(entry, WeightConverter)]
        prefix = self._model.base_model_prefix
        # In the loader's own order, since some renamings are activated by an earlier name.
        for key in sorted(self._files, key=dot_natural_key):
            name, _ = rename_source_key(key, renamings, converters, prefix, self._empty)
            yield key, key if name not in self._empty and key in self._empty else name

    def _part_of(self, name: str) -> str:
        """Return the decoder layer that contains `name`, or otherwise the module that owns it."""
        at = -1
        while (at := name.find(".", at + 1)) != -1:
            if name[:at] in self._layers:
                return name[:at]
        return name.rpartition(".")[0]

    def _set(self, name: str, tensor: torch.Tensor) -> None:
        owner, _, attribute = name.rpartition(".")
        setattr(self._model.get_submodule(owner), attribute, tensor)
