"""A drafter's checkpoint in speculators' own model class: safetensors alone, no code of the checkpoint's.

Legend: T tokens, F fed features, K drafted tokens, R places, D draft vocabulary, V vocabulary, H hidden size.
"""

import json
import tempfile
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from service.diagnose.setting import Setting
from service.errors import OptionRefused

FORMS = {"eagle3": "EAGLE-3", "peagle": "P-EAGLE", "mtp": "MTP"}
_LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"
_THE_TARGETS = ("verifier_norm.weight", "verifier_lm_head.weight")
_MAY_BE_MISSING = frozenset({"embed_tokens.weight", "lm_head.weight", "d2t", "t2d", *_THE_TARGETS})
_DRAFTED = 3
"""Tokens, where the config says nothing: what the guides serve with."""
_MODELS = 32
"""Kept at once; they share their tensors."""
_MAX_CONFIG_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class TargetWeights:
    """What of the target's weights a drafter shares: [V, H] each, in float32. `folder` holds its config."""

    folder: Path
    embedding_VH: torch.Tensor
    head_VH: torch.Tensor
    num_layers: int


class Drafter:
    """A drafter of `form`, fed `declared` and asked for `steps` tokens."""

    def __init__(self, folder: Path, target: TargetWeights) -> None:
        """Read and check it. Raises OptionRefused (`drafter`), naming what is wrong."""
        config = read_config(folder)
        if "speculators_model_type" not in config:
            config, self._tensors = _converted(folder, config, target)
        else:
            self._tensors = _tensors(folder)
        self._tensors = {
            name: value.float() if value.is_floating_point() else value
            for name, value in self._tensors.items()
        }
        form = str(config["speculators_model_type"])
        if form not in FORMS:
            raise refused(
                f"{folder}: drafters of the form {form!r} are not known", f"known are {', '.join(FORMS)}"
            )
        self.form, self.config, self.target = form, config, target
        self.steps = _drafted(config)
        self.exact = form != "mtp"
        """Whether it is trained on what a server shows it; MTP's later steps attend to their own states."""
        layers = config.get(_LAYERS_KEY) or [2, target.num_layers // 2, target.num_layers - 3]
        if not (isinstance(layers, list) and all(type(k) is int for k in layers)):
            raise refused(f"config.json: {_LAYERS_KEY} is {layers!r}, expected layer ids", "mend it")
        if not isinstance(config.get("transformer_layer_config"), dict):
            raise refused("config.json has no transformer_layer_config", "mend it")
        self.key = _LAYERS_KEY
        self.declared = Setting(tuple(layers))
        if form == "mtp":
            self.declared = Setting((target.num_layers,), normed=True)
        self._built = lru_cache(_MODELS)(self._build)
        self._check_target()
        model = self._built((), "own")
        vocab, kept = len(target.head_VH), model.d2t
        self.map_D = torch.arange(vocab) if kept is None else kept + torch.arange(len(kept))
        if int(self.map_D.min()) < 0 or int(self.map_D.max()) >= vocab:
            raise refused(
                f"{folder}: d2t points outside the target's vocabulary of {vocab}", "d2t holds offsets"
            )

    def logits(
        self, ids_T: torch.Tensor, states_TF: torch.Tensor, places_R: torch.Tensor, setting: Setting
    ) -> torch.Tensor:
        """Return the logits [K, R, D] of one training forward pass, in float32."""
        model = self._built(setting.config, setting.embedding)
        seen: list[torch.Tensor] = []
        hook = model.lm_head.register_forward_hook(lambda _module, _inputs, output: seen.append(output[0]))
        try:
            with torch.inference_mode():
                return self._passed(model, ids_T, states_TF, places_R, setting.positions_by, seen)
        finally:
            hook.remove()

    def targets(self, map_name: str) -> torch.Tensor:
        """Return the target's id of every draft id [D], by the checkpoint's map or one that is `map_name`."""
        own_D, size = self.map_D, len(self.target.head_VH)
        plain_D = torch.arange(len(own_D))
        by_name = {
            "own": own_D,
            "absolute": own_D - plain_D,
            "none": plain_D,
            "next": own_D + 1,
            "previous": own_D - 1,
        }
        return by_name[map_name].clamp(0, size - 1)

    def _passed(
        self,
        model: Any,  # noqa: ANN401 - speculators' own, which has no types
        ids_T: torch.Tensor,
        states_TF: torch.Tensor,
        places_R: torch.Tensor,
        positions_by: int,
        seen: list[torch.Tensor],
    ) -> torch.Tensor:
        num_rows = len(ids_T) - 1
        positions = torch.arange(1, num_rows + 1)[None] + positions_by
        fed: dict[str, torch.Tensor] = {
            "input_ids": ids_T[None, 1:],
            "hidden_states": states_TF[None, :-1],
            "document_ids": torch.zeros((1, num_rows), dtype=torch.long),
        }
        if self.form == "eagle3":
            model(**fed, position_ids=positions, ttt_steps=self.steps)
            return torch.stack([logits_RD[places_R] for logits_RD in seen]).float()
        if self.form == "mtp":
            # Its steps leave out the last rows; what is put behind them is seen by none of ours.
            behind = self.steps + 1
            ids, states = (
                torch.cat([ids_T, ids_T.new_zeros(behind)]),
                torch.nn.functional.pad(states_TF, (0, 0, 0, behind)),
            )
            model(
                input_ids=ids[None],
                hidden_states=states[None],
                position_ids=torch.arange(len(ids))[None] + positions_by,
            )
            return torch.stack([logits_RD[places_R] for logits_RD in seen]).float()
        from speculators.losses import resolve_loss_config
        from speculators.models.peagle.data import generate_cod_sample_indices

        whole = {"num_depths": self.steps, "down_sample_ratio_min": float(num_rows)}
        mask = torch.ones((1, num_rows))
        anchors, depths = generate_cod_sample_indices(num_rows, mask, **whole)
        last = torch.zeros((1, num_rows, model.hidden_size))
        loss = resolve_loss_config("kl_div", "eager")
        model(**fed, loss_mask=mask, verifier_last_hidden_states=last, loss_config=loss, **whole)
        logits_KRD = torch.zeros((self.steps, num_rows, seen[0].shape[-1]))
        inside = anchors >= 0
        logits_KRD[depths[inside], anchors[inside]] = seen[0][inside].float()
        return logits_KRD[:, places_R]

    def _build(self, changed: tuple[tuple[str, Any], ...], embedding: str) -> Any:  # noqa: ANN401 - speculators' own
        """Return the model, with other values in its config or another's embeddings."""
        from speculators import SpeculatorModelConfig

        raw = deepcopy(self.config)
        for name, value in changed:
            _put(raw, name, value)
        raw["speculators_config"]["verifier"]["name_or_path"] = str(self.target.folder)
        try:
            config = SpeculatorModelConfig.from_dict(raw)
            config.transformer_layer_config._attn_implementation = "sdpa"
            model = _class_of(self.form)(config)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise refused(
                f"speculators cannot make this {FORMS[self.form]} drafter: {error}", "mend its config.json"
            ) from error
        tensors = dict(self._tensors)
        shared = {"own": tensors.get("embed_tokens.weight", self.target.embedding_VH)}
        shared |= {"target": self.target.embedding_VH, "head": self.target.head_VH}
        tensors["embed_tokens.weight"] = shared[embedding]
        own = model.state_dict()
        kept_D = _kept(tensors, len(own["lm_head.weight"]), len(self.target.head_VH))
        tensors.setdefault(
            "lm_head.weight", self.target.head_VH if kept_D is None else self.target.head_VH[kept_D]
        )
        _check_tensors(tensors, own)
        for name in _THE_TARGETS:
            if name in own:
                tensors[name] = torch.zeros(()).expand(own[name].shape)
        used = {name: value for name, value in tensors.items() if name in own}
        model.load_state_dict(used, strict=False, assign=True)
        return model.eval()

    def _check_target(self) -> None:
        """Hold its sizes against the target's. Raises OptionRefused (`drafter`)."""
        vocab, hidden = self.target.embedding_VH.shape
        layer = self.config.get("transformer_layer_config", {})
        sizes = {
            "hidden size": (self.config.get("target_hidden_size") or layer.get("hidden_size"), hidden),
            "vocabulary": (layer.get("vocab_size"), vocab),
        }
        fc = self._tensors.get("fc.weight")
        if fc is not None:
            sizes["width of fc.weight"] = (fc.shape[-1], len(self.declared.layers) * hidden)
        for what, (own, expected) in sizes.items():
            if own != expected:
                raise refused(
                    f"the drafter is of another target: its {what} is {own}, expected {expected}",
                    "name a dataset of the drafter's own target, or the drafter of this one",
                )
        outside = [k for k in self.declared.layers if not 0 <= k <= self.target.num_layers]
        if outside:
            raise refused(
                f"config.json names the layers {outside}; the target has {self.target.num_layers}",
                f'put vLLM\'s ids into "{self.key}"',
            )


def _class_of(form: str) -> Any:  # noqa: ANN401 - speculators' own
    from speculators.models.eagle3 import Eagle3DraftModel
    from speculators.models.mtp import MTPDraftModel
    from speculators.models.peagle import PEagleDraftModel

    return {"eagle3": Eagle3DraftModel, "peagle": PEagleDraftModel, "mtp": MTPDraftModel}[form]


def read_config(folder: Path) -> dict[str, Any]:
    """Return the drafter's config.json. Raises OptionRefused (`drafter`)."""
    path = folder / "config.json"
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise refused(f"{path} has {path.stat().st_size} bytes", "name a drafter's folder")
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise refused(f"{path} cannot be read: {error}", "name a drafter's folder") from error
    if not isinstance(config, dict):
        raise refused(f"{path} holds no object", "name a drafter's folder")
    return config


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of the checkpoint. Raises OptionRefused (`drafter`)."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise refused(f"{folder} holds no safetensors file", "convert it: pickled weights are never read")
    tensors: dict[str, torch.Tensor] = {}
    try:
        for file in files:
            tensors |= {name: value for name, value in load_file(file).items() if name not in _THE_TARGETS}
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise refused(
            f"{folder}: the weights cannot be read: {error}", "write the checkpoint anew"
        ) from error
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor.float()).all():
            raise refused(f"{folder}: {name} holds NaN or infinity", "train again from an earlier checkpoint")
    return tensors


def _check_tensors(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    missing = sorted(expected.keys() - tensors.keys() - _MAY_BE_MISSING)
    extra = sorted(tensors.keys() - expected.keys() - _MAY_BE_MISSING)
    wrong = [
        f"{name} is {list(tensors[name].shape)}, expected {list(tensor.shape)}"
        for name, tensor in expected.items()
        if name in tensors and tensors[name].shape != tensor.shape
    ]
    for what, names in (
        ("lacks tensors", missing),
        ("holds tensors that its form has not", extra),
        ("has tensors of another shape", wrong),
    ):
        if names:
            listed = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise refused(
                f"the checkpoint {what}: {listed}", "compare its config.json with the one of its training"
            )


def _kept(tensors: dict[str, torch.Tensor], draft_size: int, size: int) -> torch.Tensor | None:
    """Return the target's ids of a draft vocabulary, null if it is the whole. Raises OptionRefused."""
    if draft_size == size:
        return None
    if "d2t" not in tensors:
        raise refused(
            f"the checkpoint lacks d2t, and drafts from {draft_size} of {size} tokens",
            "add the vocabulary map",
        )
    kept_D = (tensors["d2t"] + torch.arange(len(tensors["d2t"]))).clamp(0, size - 1)
    if "t2d" not in tensors:
        tensors["t2d"] = torch.zeros(size, dtype=torch.bool).index_fill_(0, kept_D, True)
    return kept_D


def _converted(
    folder: Path, config: dict[str, Any], target: TargetWeights
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return config and tensors of an EAGLE-3 checkpoint in its authors' form, by speculators' converter."""
    names = config.get("architectures") or []
    if not any("Eagle3" in str(name) for name in names):
        raise refused(
            f"{folder}: the form is not known: no speculators_model_type, architectures {names}",
            "convert it with 'speculators convert'",
        )
    _tensors(folder)
    from speculators.convert.eagle.eagle3_converter import Eagle3Converter

    inner = config.get("eagle_config") or {}
    with tempfile.TemporaryDirectory() as held:
        plain, out = Path(held, "plain"), Path(held, "out")
        plain.mkdir()
        # Weights in any other format stay outside, where the converter does not see them.
        for file in (folder / "config.json", *folder.glob("*.safetensors")):
            (plain / file.name).symlink_to(file.resolve())
        try:
            Eagle3Converter().convert(
                plain,
                out,
                str(target.folder),
                validate=False,
                norm_before_residual=bool(config.get("norm_before_residual", False)),
                eagle_aux_hidden_state_layer_ids=config.get(_LAYERS_KEY) or inner.get(_LAYERS_KEY),
            )
        except (ValueError, TypeError, KeyError, RuntimeError, OSError, NotImplementedError) as error:
            raise refused(
                f"{folder}: speculators cannot convert it: {error}", "mend its config.json"
            ) from error
        return read_config(out), _tensors(out)


def _drafted(config: dict[str, Any]) -> int:
    """Return how many tokens it is asked for. Raises OptionRefused (`drafter`)."""
    try:
        methods = config["speculators_config"]["proposal_methods"]
        drafted = int(methods[0]["speculative_tokens"]) if methods else _DRAFTED
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise refused(f"config.json: speculators_config cannot be read: {error!r}", "mend it") from error
    if not 1 <= drafted <= 64:
        raise refused(f"config.json: speculative_tokens is {drafted}, expected 1 to 64", "mend it")
    return drafted


def _put(raw: dict[str, Any], name: str, value: Any) -> None:  # noqa: ANN401 - a value of a config
    """Put a value where a config has it; a rope's base may lie in either of two places."""
    *outer, last = name.split(".")
    for key in outer:
        raw = raw[key]
    if last == "rope_theta" and raw.get("rope_parameters"):
        raw["rope_parameters"][last] = value
    else:
        raw[last] = value


def refused(detail: str, cure: str) -> OptionRefused:
    """Return the error of a drafter that cannot be diagnosed."""
    return OptionRefused(detail, field="drafter", cure=cure)
