"""Models: where they may be, what their configs say, and which revision they are."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import close_session
from safetensors.numpy import save_file

from schemas.request import ExtractRequest
from service.artifacts import hub_client
from service.errors import (
    HubUnavailable,
    IdentityChanged,
    OptionRefused,
    RequestError,
    UnknownModel,
)
from service.plan import model_folder
from service.plan.model_folder import ModelFolder, content_of, local_model, local_revision
from service.plan.target import Target, planned_target
from service.settings import Settings
from tests.support import templates
from tests.support.fake_hub import FakeHub
from tests.support.finished_job import an_identity
from tests.support.hub_state import Fault
from tests.support.tokenized import inspected


def a_request(model: str | Path, **options: Any) -> ExtractRequest:
    source = {"kind": "inline", "samples": [{"text": "x"}]}
    return ExtractRequest.model_validate({"model": str(model), "source": source} | options)


def with_config(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def inspect(root: Path, model: str | Path, **options: Any) -> Target:
    return inspected(a_request(model, **options), Settings(model_roots=(root,)))


def refusal(root: Path, model: str | Path, **options: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        inspect(root, model, **options)
    assert caught.value.cure
    return caught.value


PLAIN = {"num_hidden_layers": 8, "hidden_size": 64, "vocab_size": 100, "max_position_embeddings": 512}


def test_a_local_model_is_read_from_its_config(tmp_path: Path) -> None:
    folder = templates.write_target(tmp_path / "m", num_hidden_layers=10, max_position_embeddings=128)
    target = inspect(tmp_path, folder, layers=[3])
    shape = (target.num_layers, target.hidden_size, target.dtype, target.max_model_len)
    assert shape == (10, 64, "bfloat16", 128)
    assert (target.layer_ids, target.folder) == ((3, 10), folder)
    assert target.architectures == ("LlamaForCausalLM",)


def test_a_relative_model_path_begins_with_a_dot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_config(tmp_path / "m", PLAIN)
    monkeypatch.chdir(tmp_path)
    assert inspect(tmp_path, "./m").folder == tmp_path / "m"


LINEAR = {"rope_type": "linear"}
GEMMA3 = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 34}}
NEMOTRON_H = {
    "model_type": "nemotron_h",
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"] * 2,
    "hidden_size": 64,
    "vocab_size": 100,
    "time_step_limit": [0.0, {"__float__": "Infinity"}],
}
CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a type that nobody knows": (
        PLAIN | {"model_type": "never-heard-of"},
        {"num_layers": 8, "dtype": "float32"},
    ),
    "older names": (
        {"n_layer": 12, "n_embd": 32, "vocab_size": 50, "n_positions": 77, "torch_dtype": "float16"},
        {"num_layers": 12, "hidden_size": 32, "max_model_len": 77, "dtype": "float16"},
    ),
    "the text part of a multimodal config": (
        {
            "dtype": "bfloat16",
            "text_config": PLAIN,
            "vision_config": {"num_hidden_layers": 99},
            "hidden_size": 1,
        },
        {"num_layers": 8, "hidden_size": 64, "dtype": "bfloat16"},
    ),
    "defaults of its class": (
        GEMMA3,
        {"num_layers": 34, "hidden_size": 2304, "vocab_size": 262208, "max_model_len": 131072},
    ),
    "an infinity as transformers writes it": (NEMOTRON_H, {"num_layers": 8}),
}


@pytest.mark.parametrize(("config", "expected"), CONFIGS.values(), ids=CONFIGS)
def test_a_config_is_understood(tmp_path: Path, config: dict[str, Any], expected: dict[str, Any]) -> None:
    target = inspect(tmp_path, with_config(tmp_path / "m", config))
    assert {name: getattr(target, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 2048),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, 1024),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
            512,
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 512),
        ({"rope_parameters": {"full": LINEAR | {"factor": 2}, "other": {"rope_type": "default"}}}, 1024),
        ({"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 64}, 64),
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 64}}, 64),
        ({"rope_scaling": None}, 512),
        # Of Gemma 3 the length is the scaled one already.
        ({"model_type": "gemma3_text", "rope_parameters": {"full_attention": LINEAR | {"factor": 8.0}}}, 512),
        ({"model_max_length": 256}, 256),
    ],
)
def test_the_longest_sequence_is_the_one_that_the_engine_derives(
    tmp_path: Path, rope: dict[str, Any], expected: int
) -> None:
    assert inspect(tmp_path, with_config(tmp_path / "m", PLAIN | rope)).max_model_len == expected


def test_a_dtype_that_cannot_be_stored_is_refused_and_can_be_overridden(tmp_path: Path) -> None:
    folder = with_config(tmp_path / "m", PLAIN | {"dtype": "float8_e4m3fn"})
    error = refusal(tmp_path, folder)
    assert isinstance(error, OptionRefused) and error.field == "dtype"
    assert inspect(tmp_path, folder, dtype="float16").dtype == "float16"


@pytest.mark.parametrize(
    "config",
    [
        *("[]", "{", "{}"),
        json.dumps(PLAIN | {"num_hidden_layers": "8"}),
        json.dumps(PLAIN | {"vocab_size": 0}),
        json.dumps({"model_type": "llama", "hidden_size": "wide"}),
        *('{"a":' + opening * 100_000 + "1" + end * 100_000 + "}" for opening, end in ("[]", ('{"a":', "}"))),
        json.dumps(PLAIN) + " " * 2**24,
    ],
    ids=["list", "open", "empty", "text", "zero", "class", "deep lists", "deep objects", "long"],
)
def test_a_config_that_cannot_be_used_is_an_unknown_model(tmp_path: Path, config: str) -> None:
    folder = with_config(tmp_path / "m", {})
    (folder / "config.json").write_text(config)
    error = refusal(tmp_path, folder)
    assert isinstance(error, UnknownModel) and "config.json" in error.detail


HOSTILE: dict[str, tuple[str, Any]] = {
    "a number of 400 digits": ("max_position_embeddings", 10**400),
    "a negative length": ("max_position_embeddings", -5),
    "a length that is a text": ("n_positions", "long"),
    "a length that is a list": ("seq_length", [512]),
    "a length that is a flag": ("model_max_length", True),
    "an infinite length": ("seq_len", {"__float__": "Infinity"}),
    "a factor that is a text": ("rope_scaling", LINEAR | {"factor": "big"}),
    "a factor beyond floats": ("rope_scaling", LINEAR | {"factor": 1e308}),
    "a factor that is no number": ("rope_scaling", LINEAR | {"factor": {"__float__": "NaN"}}),
    "a negative factor": ("rope_parameters", {"full": LINEAR | {"factor": -2.0}}),
    "a float made of a list": ("vocab_size", {"__float__": []}),
    "a float made of a word": ("vocab_size", {"__float__": "many"}),
    "a type that is a list": ("model_type", ["llama"]),
    "architectures that are a number": ("architectures", 5),
    "a dtype that is a number": ("dtype", 16),
}


@pytest.mark.parametrize(("key", "value"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_config_is_refused_by_the_name_of_its_field(tmp_path: Path, key: str, value: Any) -> None:
    plain = {} if key == "model_type" else PLAIN
    error = refusal(tmp_path, with_config(tmp_path / "m", plain | {key: value}))
    assert (type(error), error.field) == (UnknownModel, "model")
    assert "many" in error.detail or key.partition("_")[0] in error.detail


@pytest.mark.parametrize("path", ["elsewhere", "root/link", "root/../elsewhere"])
def test_a_local_model_outside_the_roots_is_refused_with_the_setting_to_change(
    tmp_path: Path, path: str
) -> None:
    with_config(tmp_path / "elsewhere", PLAIN)
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path / "elsewhere")
    error = refusal(tmp_path / "root", tmp_path / path)
    assert isinstance(error, UnknownModel) and error.field == "model"
    assert "QUARRY_MODEL_ROOTS" in str(error.cure)


@pytest.mark.parametrize(
    "name",
    ["config.json", "tokenizer.json", "chat_template.jinja", "spiece", "additional_chat_templates/a.jinja"],
)
def test_no_link_in_a_models_folder_leads_out_of_it_but_to_weights(tmp_path: Path, name: str) -> None:
    folder = with_config(tmp_path / "m", PLAIN)
    secret = tmp_path / "secret"
    secret.write_text(json.dumps(PLAIN))
    (folder / "vocab.txt").write_text("")
    (folder / "vocab.json").symlink_to("vocab.txt")
    (folder / "model-1.bin").symlink_to(secret)
    assert inspect(tmp_path, folder).folder == folder
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    error = refusal(tmp_path, folder)
    assert (error.field, name in error.detail) == ("model", True)


def test_a_snapshot_of_the_hubs_cache_is_a_model_by_its_path(tmp_path: Path) -> None:
    """There every file is a link to a blob beside the snapshots; one that leads further is refused."""
    blob = with_config(tmp_path / "models--org--m" / "blobs", PLAIN) / "config.json"
    folder = tmp_path / "models--org--m" / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    (folder / "config.json").symlink_to("../../blobs/config.json")
    assert inspect(tmp_path, folder).hidden_size == 64
    blob.unlink()
    blob.symlink_to(with_config(tmp_path / "elsewhere", PLAIN) / "config.json")
    assert "config.json" in refusal(tmp_path, folder).detail


def test_a_folder_without_a_config_and_a_revision_of_a_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    assert "holds no config.json" in refusal(tmp_path, tmp_path / "m").detail
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "loop" in refusal(tmp_path, tmp_path / "loop").detail
    with_config(tmp_path / "m", PLAIN)
    assert refusal(tmp_path, tmp_path / "m", revision="main").field == "revision"


@pytest.mark.parametrize("model", ["a/b/c", "no spaces", "org/name--x", "org/..", "~/m", "org\\name", ""])
def test_what_is_neither_id_nor_path_is_refused_without_asking_anybody(tmp_path: Path, model: str) -> None:
    request = a_request("x").model_copy(update={"model": model})
    with pytest.raises(UnknownModel) as caught:
        inspected(request, Settings(hub_endpoint="http://127.0.0.1:1"))
    assert caught.value.field == "model" and "neither a model id of the Hub nor a path" in caught.value.detail


def weights(folder: Path, **tensors: Any) -> None:
    save_file({name: np.asarray(value) for name, value in tensors.items()}, folder / "model.safetensors")


def test_the_revision_of_a_folder_does_not_move_with_copies_and_touches(tmp_path: Path) -> None:
    first, second = (templates.write_target(tmp_path / name) for name in ("a", "b"))
    for folder in (first, second):
        weights(folder, w=[1.0, 2.0])
        (folder / "README.md").write_text(str(folder))
    os.utime(second / "model.safetensors", (1, 1))
    assert local_revision(first) == local_revision(second)


CHANGES: dict[str, Callable[[Path], object]] = {
    "config": lambda folder: templates.write_target(folder, num_hidden_layers=9),
    "template": lambda folder: (folder / "chat_template.jinja").write_text("other"),
    "vocabulary": lambda folder: (folder / "vocab.txt").write_text("other"),
    "tensor's name": lambda folder: weights(folder, v=[1.0, 2.0]),
    "tensor's shape": lambda folder: weights(folder, w=[[1.0, 2.0]]),
    "quantization": lambda folder: (folder / "hf_quant_config.json").write_text("{}"),
    "more weights": lambda folder: save_file({"w": np.ones(1)}, folder / "model-2.safetensors"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_revision_of_a_folder_changes_with_what_it_is_made_of(
    tmp_path: Path, change: Callable[[Path], object]
) -> None:
    folder = templates.write_target(tmp_path / "m")
    weights(folder, w=[1.0, 2.0])
    before = local_revision(folder)
    change(folder)
    assert local_revision(folder) != before


def test_a_model_of_too_many_files_of_weights_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = templates.write_target(tmp_path / "m")
    monkeypatch.setattr(model_folder, "MAX_WEIGHT_FILES", 2)
    for number in range(3):
        save_file({"w": np.ones(1)}, folder / f"model-{number}.safetensors")
    with pytest.raises(UnknownModel, match=r"has [34] files of weights"):
        local_model(str(folder), None, (tmp_path,), None)


@pytest.mark.parametrize("number", [0, 250_001, 499_999])
def test_a_model_with_one_other_value_is_another_one(tmp_path: Path, number: int) -> None:
    folder = templates.write_target(tmp_path / "m")
    values = np.arange(500_000.0)
    weights(folder, w=values)
    before = content_of(ModelFolder(folder))
    identity = an_identity(**asdict(before))
    settings = Settings(model_roots=(tmp_path,))
    assert planned_target(identity, str(folder), settings).folder == folder
    values[number] += 1e-3
    weights(folder, w=values)
    assert content_of(ModelFolder(folder)).revision == before.revision
    with pytest.raises(IdentityChanged):
        planned_target(identity, str(folder), settings)


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, (100).to_bytes(8, "little") + b"{}"])
def test_a_broken_weight_file_is_an_unknown_model(tmp_path: Path, content: bytes) -> None:
    folder = with_config(tmp_path / "m", PLAIN)
    (folder / "model.safetensors").write_bytes(content)
    assert isinstance(refusal(tmp_path, folder), UnknownModel)


def test_a_weight_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    folder = with_config(tmp_path / "m", PLAIN)
    (folder / "model.safetensors").symlink_to(tmp_path / "not copied")
    assert "model.safetensors cannot be read: No such file" in refusal(tmp_path, folder).detail


def test_a_pipe_among_the_weights_is_refused_and_nobody_waits_for_it(tmp_path: Path) -> None:
    """The planner looks at the model itself, without a child that could be killed."""
    folder = with_config(tmp_path / "m", PLAIN)
    os.mkfifo(folder / "model.safetensors")
    assert "model.safetensors is a pipe" in refusal(tmp_path, folder).detail


@pytest.fixture
def hub(hub: FakeHub, tmp_path: Path) -> FakeHub:
    files = {path.name: path.read_bytes() for path in templates.write_target(tmp_path / "hub").iterdir()}
    hub.add_repo("org/model", {**files, "model.safetensors": b"weights are not fetched"}, kind="model")
    return hub


def test_a_hub_model_is_its_commit_and_its_weights_stay_there(hub: FakeHub) -> None:
    target = inspected(a_request("org/model"), Settings(hub_endpoint=hub.url))
    assert target.located.commit == hub.repo("org/model", "model").head.oid == target.folder.name
    assert (target.folder / "tokenizer.json").is_file() and not list(target.folder.glob("*.safetensors"))


@pytest.mark.parametrize("endpoint", ["info", "tree"])
def test_a_hub_that_is_silent_is_given_up(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    monkeypatch.setattr(hub_client, "SILENCE_S", 0.2)
    close_session()
    hub.fail(endpoint, Fault(drop="stall", times=1000))
    with pytest.raises(HubUnavailable):
        inspected(a_request("org/model"), Settings(hub_endpoint=hub.url))
    close_session()


@pytest.mark.parametrize(
    ("model", "revision", "field"),
    [("org/none", None, "model"), ("org/model", "no-such", "revision"), ("org/adapter", None, "model")],
)
def test_a_hub_model_or_revision_that_is_not_there_is_named(
    hub: FakeHub, model: str, revision: str, field: str
) -> None:
    hub.add_repo("org/adapter", {"README.md": b"has no config.json"}, kind="model")
    with pytest.raises(UnknownModel) as caught:
        inspected(a_request(model, revision=revision), Settings(hub_endpoint=hub.url))
    assert caught.value.field == field and repr(model) in caught.value.detail


@pytest.mark.parametrize(("bound", "value"), [("MAX_SMALL_FILES", 2), ("MAX_SMALL_BYTES", 100)])
def test_files_that_are_too_many_or_too_large_are_not_fetched(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, bound: str, value: int
) -> None:
    monkeypatch.setattr(model_folder, bound, value)
    with pytest.raises(UnknownModel, match="bytes in sum") as refused:
        inspected(a_request("org/model"), Settings(hub_endpoint=hub.url))
    assert refused.value.field == "model"
    assert hub.calls["resolve"] == 0


def test_a_model_in_the_cache_is_planned_while_the_hub_is_away(hub: FakeHub) -> None:
    first = inspected(a_request("org/model"), Settings(hub_endpoint=hub.url))
    for endpoint in ("info", "resolve"):
        hub.fail(endpoint, Fault(status=503, times=100))
    assert inspected(a_request("org/model"), Settings(hub_endpoint=hub.url)) == first


def test_a_hub_that_is_down_is_not_an_unknown_model(hub: FakeHub) -> None:
    with pytest.raises(HubUnavailable):
        inspected(a_request("org/other"), Settings(hub_endpoint="http://127.0.0.1:1"))
