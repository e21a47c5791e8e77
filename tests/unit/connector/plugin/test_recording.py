"""The recording decoder, before decoders that loop over their layers as the engine's do."""

from typing import Any

import pytest
import torch
from torch import nn

from connector.plugin.recording import RecordingDecoder

HIDDEN_SIZE, NUM_LAYERS = 8, 3


class TwoStreams(nn.Module):
    """A layer whose norm adds to the residual in place, as fused ones do."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: Any) -> Any:
        if residual is None:
            residual = hidden_states
        else:
            residual += hidden_states
        attended = self.proj(residual) + positions[:, None]
        residual += attended
        return self.proj(residual), residual


class OneStream(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states + self.proj(hidden_states) + positions[:, None]


class Decoder(nn.Module):
    """Scales its embeddings before the first layer, and norms after the last."""

    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, HIDDEN_SIZE)
        self.layers = nn.ModuleList([layer() for _ in range(NUM_LAYERS)])
        self.scale = 3.0
        self.two = layer is TwoStreams

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden / hidden.norm(dim=-1, keepdim=True)

    def forward(
        self, input_ids: Any, positions: torch.Tensor, intermediate_tensors: Any, inputs_embeds: Any = None
    ) -> torch.Tensor:
        hidden = self.embed(input_ids) * self.scale if inputs_embeds is None else inputs_embeds
        residual = None
        for layer in self.layers:
            if self.two:
                hidden, residual = layer(positions, hidden, residual)
            else:
                hidden = layer(positions, hidden)
        return self.norm(hidden if residual is None else hidden + residual)


class Recording(RecordingDecoder, Decoder):
    engine_forward = staticmethod(Decoder.forward)
    sums = True


IDS, POSITIONS = torch.tensor([3, 1, 4, 1]), torch.arange(4)


@pytest.fixture(params=[OneStream, TwoStreams])
def decoder(request) -> Recording:
    torch.manual_seed(0)
    with torch.no_grad():
        return Recording(request.param).eval()


def streams(decoder: Decoder) -> list[torch.Tensor]:
    """Return the residual stream before each layer and after the last, computed by hand."""
    stream = decoder.embed(IDS) * decoder.scale
    found = [stream]
    for layer in decoder.layers:
        if isinstance(layer, TwoStreams):
            attended = stream + layer.proj(stream) + POSITIONS[:, None]
            stream = attended + layer.proj(attended)
        else:
            stream = stream + layer.proj(stream) + POSITIONS[:, None]
        found.append(stream)
    return found


@torch.no_grad()
def test_every_state_is_the_stream_at_its_layer(decoder):
    decoder._set_aux_hidden_state_layers(tuple(range(NUM_LAYERS + 1)))
    out, states = decoder(IDS, POSITIONS)
    torch.testing.assert_close(states, streams(decoder))
    torch.testing.assert_close(out, decoder.norm(states[-1]))


@torch.no_grad()
def test_only_the_states_that_were_asked_for_are_returned(decoder):
    decoder._set_aux_hidden_state_layers((1, NUM_LAYERS))
    _, states = decoder(IDS, POSITIONS)
    expected = streams(decoder)
    torch.testing.assert_close(states, [expected[1], expected[NUM_LAYERS]])


@torch.no_grad()
def test_without_a_question_the_engines_forward_answers_alone(decoder):
    out = decoder(IDS, POSITIONS)
    torch.testing.assert_close(out, decoder.norm(streams(decoder)[-1]))


@torch.no_grad()
def test_embeddings_that_are_given_are_state_zero(decoder):
    decoder._set_aux_hidden_state_layers((0,))
    embeds = torch.randn(4, HIDDEN_SIZE)
    _, states = decoder(None, POSITIONS, None, embeds.clone())
    torch.testing.assert_close(states, [embeds])


@torch.no_grad()
def test_a_compiler_sees_one_whole_graph(decoder):
    decoder._set_aux_hidden_state_layers((0, 2, NUM_LAYERS))
    eager = decoder(IDS, POSITIONS)
    torch.compiler.reset()
    compiled = torch.compile(decoder.forward, fullgraph=True, backend="eager")(IDS, POSITIONS, None)
    torch.testing.assert_close(compiled, eager)


def test_a_layer_that_is_called_in_another_way_is_refused():
    class Swapped(nn.Module):
        def forward(self, hidden_states: Any, positions: Any) -> Any:
            return hidden_states

    with pytest.raises(TypeError, match="Swapped takes"):
        Recording(Swapped)._set_aux_hidden_state_layers((1,))
