"""Loads a drafter's checkpoint into speculators' own model class: only safetensors, none of its code.

Legend: T tokens, F fed features, K drafted tokens, R places, D draft vocabulary, V vocabulary, H hidden size.
"""

import json
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.nn.functional import pad

from service.diagnose.setting import LAYERS_KEY, Setting
from service.diagnose.target import TargetWeights
from service.errors import OptionRefused
from service.report.wording import short

FORMS = {"eagle3": "EAGLE-3", "peagle": "P-EAGLE", "mtp": "MTP"}
_THE_TARGETS = ("verifier_norm.weight", "verifier_lm_head.weight")
"""Only used in training."""
_DRAFTED, _MOST_DRAFTED = 3, 64
"""Drafted tokens: the default, as in the serving guides, if the config has none; and the maximum."""
_MODELS = 32
"""How many built models are cached; they share tensors."""
_MAX_CONFIG_BYTES = 2**20
_MAX_ERROR_CHARS = 600


class Drafter:
    """A drafter of the kind `form`, fed the setting `declared`, that drafts `steps` tokens.

    `map_D` maps draft ids to target ids. `config` is its config.json with defaults filled in.
    """

    def __init__(self, folder: Path, target: TargetWeights) -> None:
        """Read and check the drafter. Raises OptionRefused (`drafter`), naming what is wrong."""
        self.target = target
        raw, self._tensors = _read(folder)
        if "speculators_model_type" not in raw:
            raw = _of_its_authors(raw, target)
        self.form = str(raw["speculators_model_type"])
        if self.form not in FORMS:
            raise _refused(f"drafters of the form {self.form!r} are not known", f"known: {', '.join(FORMS)}")
        if not isinstance(raw.get("transformer_layer_config"), dict):
            raise _refused("config.json has no transformer_layer_config")
        self.map_D = self._map()
        config = _parsed(raw)
        self.steps = config.speculators_config.proposal_methods[0].speculative_tokens
        if not 1 <= self.steps <= _MOST_DRAFTED:
            raise _refused(f"config.json: speculative_tokens is {self.steps}, expected 1 to {_MOST_DRAFTED}")
        self.exact = self.form != "mtp"
        """Whether its training pass matches serving; MTP's later steps attend to their own states."""
        if self.exact:
            layers = getattr(config, LAYERS_KEY) or (2, target.num_layers // 2, target.num_layers - 3)
            self.declared = Setting(tuple(layers))
        else:
            self.declared = Setting((target.num_layers,), normed=True)
        self._check_target(config)
        self.config = config.to_dict()
        self._built = lru_cache(_MODELS)(self._build)
        self._built((), "own")

    @property
    def is_untouched(self) -> bool:
        """Whether it was never trained: the weights of all its norms are still one, as initialized."""
        norms = [value for name, value in self._tensors.items() if name.endswith("norm.weight")]
        return bool(norms) and all(bool((weight_H == 1).all()) for weight_H in norms)

    def logits(
        self, ids_T: torch.Tensor, states_TF: torch.Tensor, places_R: torch.Tensor, setting: Setting
    ) -> torch.Tensor:
        """Return the logits [K, R, D] of one training forward pass, in float32."""
        model = self._built(setting.config, setting.weights)
        seen: list[torch.Tensor] = []
        hook = model.lm_head.register_forward_hook(lambda _module, _inputs, output: seen.append(output[0]))
        positions = torch.arange(len(ids_T) + self.steps + 1)[None] + setting.positions_by
        fed = {
            "input_ids": ids_T[None, 1:],
            "hidden_states": states_TF[None, :-1],
            "document_ids": torch.zeros((1, len(ids_T) - 1), dtype=torch.long),
        }
        try:
            with torch.inference_mode():
                if self.form == "eagle3":
                    model(**fed, position_ids=positions[:, 1 : len(ids_T)], ttt_steps=self.steps)
                elif self.form == "mtp":
                    # Its steps drop the last rows, so padding is appended, which does not affect ours.
                    behind = self.steps + 1
                    states_TF = pad(states_TF, (0, 0, 0, behind))
                    model(pad(ids_T, (0, behind))[None], states_TF[None], position_ids=positions)
                else:
                    seen = self._peagle(model, fed, seen)
                return torch.stack([logits_TD[places_R] for logits_TD in seen]).float()
        finally:
            hook.remove()

    def _peagle(
        self,
        model: Any,  # noqa: ANN401 - speculators' own
        fed: dict[str, torch.Tensor],
        seen: list[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Return the logits [T, D] of each step: P-EAGLE computes all at once, in its own order."""
        from speculators.losses import resolve_loss_config
        from speculators.models.peagle.data import generate_cod_sample_indices

        mask = torch.ones(fed["input_ids"].shape)
        every = {"loss_mask": mask, "num_depths": self.steps, "down_sample_ratio_min": float(mask.numel())}
        last = torch.zeros((*mask.shape, model.hidden_size))
        loss = resolve_loss_config("kl_div", "eager")
        model(**fed, **every, verifier_last_hidden_states=last, loss_config=loss)
        anchors, depths = generate_cod_sample_indices(mask.numel(), **every)
        inside = anchors >= 0
        logits_KTD = torch.zeros((self.steps, mask.numel(), seen[0].shape[-1]))
        logits_KTD[depths[inside], anchors[inside]] = seen[0][inside].float()
        return list(logits_KTD)

    def targets(self, map_name: str) -> torch.Tensor:
        """Return the target id of each draft id [D], by the checkpoint's map or the variant `map_name`."""
        plain_D = torch.arange(len(self.map_D))
        by_name = {
            "own": self.map_D,
            "absolute": self.map_D - plain_D,
            "none": plain_D,
            "next": self.map_D + 1,
            "previous": self.map_D - 1,
        }
        return by_name[map_name].clamp(0, self.target.vocab_size - 1)

    def _build(self, changed: tuple[tuple[str, Any], ...], weights: str) -> Any:  # noqa: ANN401 - speculators' own
        """Return the model with changed config values, or with some weights of the target."""
        from speculators import SpeculatorModel

        raw = deepcopy(self.config)
        for name, value in changed:
            *outer, last = name.split(".")
            part = raw
            for key in outer:
                part = part[key]
            part[last] = value
        config = _parsed(raw)
        config.transformer_layer_config._attn_implementation = "sdpa"
        try:
            model = SpeculatorModel.registered_model_class_from_config(config)(config)
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            raise _refused(f"speculators cannot make this {FORMS[self.form]} drafter: {error}") from error
        own, head_VH = model.state_dict(), self.target.head.weight_VH
        embedding_VH, head_DH = self.target.embedding_VH, head_VH[self.map_D]
        tensors = {name: torch.zeros(()).expand(own[name].shape) for name in _THE_TARGETS if name in own}
        tensors |= {"embed_tokens.weight": embedding_VH, "lm_head.weight": head_DH} | self._tensors
        if weights == "head":
            tensors["lm_head.weight"] = head_DH
        elif weights != "own":
            tensors["embed_tokens.weight"] = head_VH if weights == "tied" else embedding_VH
        for name in ("d2t", "t2d"):  # not used by the forward pass
            tensors.pop(name, None)
            tensors |= {name: own[name]} if name in own else {}
        try:
            model.load_state_dict(tensors, assign=True)
        except RuntimeError as error:  # its message names missing, unexpected or mismatched tensors
            cure = "compare its config.json with the one of its training"
            raise _refused(" ".join(str(error).split()), cure) from error
        return model.eval()

    def _check_target(self, config: Any) -> None:  # noqa: ANN401 - speculators' own
        """Check its sizes and layers against the target's. Raises OptionRefused."""
        layer, (vocab, hidden) = config.transformer_layer_config, self.target.embedding_VH.shape
        for what, own, expected in (
            ("hidden size", getattr(config, "target_hidden_size", None) or layer.hidden_size, hidden),
            ("vocabulary", layer.vocab_size, vocab),
        ):
            if own != expected:
                raise _refused(
                    f"the drafter is of another target: its {what} is {own}, expected {expected}",
                    "name a dataset of the drafter's own target, or the drafter of this one",
                )
        if not all(0 <= k <= self.target.num_layers for k in self.declared.layers):
            raise _refused(
                f"config.json names the layers {list(self.declared.layers)}, the target has "
                f"{self.target.num_layers}",
                f'put vLLM\'s ids into "{LAYERS_KEY}"',
            )

    def _map(self) -> torch.Tensor:
        """Return the target id of each draft id [D]. Raises OptionRefused."""
        size = self.target.vocab_size
        d2t = self._tensors.get("d2t", torch.zeros(size, dtype=torch.long))
        drafted = len(self._tensors.get("lm_head.weight", d2t))
        if len(d2t) != drafted:
            raise _refused(f"the checkpoint has no d2t of {drafted} tokens, the rows of its lm_head.weight")
        map_D = d2t.long() + torch.arange(len(d2t))
        if int(map_D.min()) < 0 or int(map_D.max()) >= size:
            raise _refused(f"d2t points outside the target's vocabulary of {size}", "d2t holds offsets")
        t2d = self._tensors.get("t2d")
        if t2d is not None and not torch.equal(t2d.bool().nonzero().flatten(), map_D):
            raise _refused("d2t and t2d map other tokens", "write both anew from the counts of its training")
        return map_D


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return config.json and all tensors, with floats as float32. Raises OptionRefused."""
    path, tensors = folder / "config.json", dict[str, torch.Tensor]()
    try:
        with path.open(encoding="utf-8") as file:
            config = json.loads(file.read(_MAX_CONFIG_BYTES))
        for path in sorted(folder.glob("*.safetensors")):
            tensors |= load_file(path)
    except (OSError, ValueError, KeyError, RecursionError, SafetensorError) as error:
        raise _refused(f"{path} cannot be read: {error}", "name a folder with a whole drafter") from error
    if not isinstance(config, dict):
        raise _refused(f"{folder}: config.json holds no object")
    if not tensors:
        raise _refused(f"{folder} holds no safetensors file", "convert it: pickled weights are never read")
    tensors = {
        name.replace("midlayer.", "layers.0."): value.float() if value.is_floating_point() else value
        for name, value in tensors.items()
        if name not in _THE_TARGETS
    }
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise _refused(f"{name} holds NaN or infinity", "train again from an earlier checkpoint")
    return config, tensors


def _of_its_authors(config: dict[str, Any], target: TargetWeights) -> dict[str, Any]:
    """Convert the config of an EAGLE-3 checkpoint in its authors' format to speculators' format."""
    names = config.get("architectures") or []
    if not any("Eagle3" in str(name) for name in names):
        raise _refused(
            f"the form is not known: no speculators_model_type, architectures {names}",
            "convert it with 'speculators convert'",
        )
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "target_hidden_size")
    layers = config.get(LAYERS_KEY) or (config.get("eagle_config") or {}).get(LAYERS_KEY)
    return {name: config[name] for name in flags if name in config} | {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config.get("draft_vocab_size") or target.vocab_size,
        LAYERS_KEY: layers,
        "transformer_layer_config": config | {"model_type": "llama"},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": _DRAFTED}],
            "verifier": {"name_or_path": str(target.folder), "architectures": []},
        },
    }


def _parsed(raw: dict[str, Any]) -> Any:  # noqa: ANN401 - speculators' own
    """Return a config as speculators' class, with defaults filled in. Raises OptionRefused."""
    from speculators import SpeculatorModelConfig

    try:
        return SpeculatorModelConfig.from_dict(raw)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _refused(f"config.json: {error}") from error


def _refused(detail: str, cure: str = "fix its config.json") -> OptionRefused:
    return OptionRefused(short(detail, _MAX_ERROR_CHARS), field="drafter", cure=cure)
