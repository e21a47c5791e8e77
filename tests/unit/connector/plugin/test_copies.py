"""The embeddings that an engine's own class returns stay what they were, whatever its kernels overwrite."""

import inspect

import torch
from vllm.model_executor.models.interfaces import EagleModelMixin

from connector.plugin.copies import copy_unsummed_states


class InPlace(EagleModelMixin):
    """A loop over layers as vLLM's own, whose norms add to the residual in place, as they do on a GPU."""

    def forward(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        states = self._maybe_add_hidden_state([], 0, hidden, None)
        residual = None
        for layer in (1, 2):
            residual = hidden if residual is None else residual.add_(hidden)
            residual.add_(layer)
            hidden = residual * layer
            self._maybe_add_hidden_state(states, layer, hidden, residual)
        return states


def test_embeddings_are_not_what_later_layers_make_of_them(monkeypatch):
    vllms_own = inspect.unwrap(EagleModelMixin._maybe_add_hidden_state)
    monkeypatch.setattr(EagleModelMixin, "_maybe_add_hidden_state", vllms_own)
    model, embeddings = InPlace(), torch.arange(12.0).view(3, 4)
    model._set_aux_hidden_state_layers((0, 1, 2))
    assert not torch.equal(model.forward(embeddings.clone())[0], embeddings), "vLLM copies them by itself now"
    for _ in range(2):
        copy_unsummed_states()
    first, *others = model.forward(embeddings.clone())
    assert torch.equal(first, embeddings)
    assert torch.equal(others[0], 2 * (embeddings + 1))
    model._set_aux_hidden_state_layers((2,))
    assert len(model.forward(embeddings.clone())) == 1
