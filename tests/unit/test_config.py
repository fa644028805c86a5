"""A component's plan file is read strictly: unknown keys, wrong types and missing files are named, with the way out."""

import json

import pytest

from components.common.engine.config import EngineArgs, WorkerConfig
from components.common.errors import DynamoBlobError
from router.config import RouterConfig

GOOD = {"name": "router-0", "namespace": "n", "block_size": 128, "listen": "unix:/run/r.sock"}


def test_a_good_file_is_read(tmp_path):
    path = tmp_path / "router.json"
    path.write_text(json.dumps(GOOD))
    assert RouterConfig.read(path).block_size == 128


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"blok_size": 1}, "unknown key 'blok_size' (did you mean 'block_size'?)"),
        ({"block_size": "many"}, ", found 'many'"),
        ({"block_size": 0}, "block_size: "),
        ({"zzz": 1}, "valid here: "),
    ],
)
def test_what_is_wrong_is_named(change, says):
    with pytest.raises(DynamoBlobError) as e:
        RouterConfig.parse({**GOOD, **change}, where="router.json")
    assert e.value.code == "CONFIG-INVALID" and says in e.value.why and e.value.where == "router.json"


def test_a_nested_unknown_key_gets_the_nearest_name_of_its_own_level():
    with pytest.raises(DynamoBlobError) as e:
        WorkerConfig.parse({"engine": {"max_model_length": 5}})
    assert "unknown key 'engine.max_model_length' (did you mean 'max_model_len'?)" in e.value.why


@pytest.mark.parametrize("content", ["", "{", "[1,"])
def test_an_unreadable_file_is_one_clear_error(tmp_path, content):
    path = tmp_path / "x.json"
    path.write_text(content)
    for p in (path, tmp_path / "absent.json"):
        with pytest.raises(DynamoBlobError) as e:
            RouterConfig.read(p)
        assert e.value.code == "CONFIG-UNREADABLE" and str(p) in e.value.where


def test_configs_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        EngineArgs().block_size = 64


def test_every_field_says_what_it_is():
    import components.frontend.config as f
    import components.weights.config as w

    for model in (WorkerConfig, EngineArgs, RouterConfig, f.GatewayConfig, w.WeightServiceConfig):
        bare = [
            n
            for n, x in model.model_fields.items()
            if not x.description and n not in ("role", "engine", "weights", "kv")
        ]
        assert bare == [], model


def test_errors_survive_a_process_border():
    import pickle

    error = DynamoBlobError("A-B", "what", where="w", why="y", do="d", found=1)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.data) == (str(error), {"found": 1})
