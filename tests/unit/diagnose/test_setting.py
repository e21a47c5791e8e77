"""The changes that are tried: each differs from what is declared, and none is tried twice."""

from service.diagnose.setting import LAYERS_KEY, Setting, changes

CONFIG = {
    "norm_before_residual": True,
    "transformer_layer_config": {
        "rope_parameters": {"rope_theta": 10_000.0},
        "rms_norm_eps": 1e-6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
}


def tried(layers=(2, 4, 5), config=CONFIG):
    base = Setting(layers)
    return base, list(changes(base, config, 8))


def test_every_change_is_another_setting():
    base, found = tried()
    settings = [change.of(base) for change in found]
    assert base not in settings
    assert len(set(settings)) == len(settings)
    assert len({change.name for change in found}) == len(found)


def test_a_named_cause_says_what_puts_it_right():
    _, found = tried()
    assert all(change.cure for change in found if not change.probe)


def test_layers_move_one_at_a_time_and_together_and_stay_inside():
    _, found = tried((0, 4, 8))
    layers = {change.to["layers"] for change in found if "layers" in change.to}
    assert {(1, 4, 8), (0, 3, 8), (0, 5, 8), (0, 4, 7), (8, 4, 0), (4, 4, 4)} <= layers
    assert all(0 <= k <= 8 for ids in layers for k in ids)


def test_a_flag_of_the_config_is_turned_and_shown_as_its_line():
    _, found = tried()
    assert '"norm_before_residual": false' in [change.cure for change in found]


def test_a_config_that_says_nothing_has_nothing_changed():
    _, found = tried(config={})
    assert not [change for change in found if change.to.get("config")]


def test_layers_are_put_right_by_a_line_of_the_config_only_where_it_names_them():
    for config, line in (({LAYERS_KEY: None}, True), ({}, False)):
        _, found = tried(config=config)
        cures = [change.cure for change in found if "layers" in change.to]
        assert cures and all((LAYERS_KEY in cure) == line for cure in cures)
