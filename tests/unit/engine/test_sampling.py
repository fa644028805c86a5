"""A client's options reach vLLM as it meant them, bounded by the context."""

import pytest

from components.common.engine.sampling import sampling_params
from components.common.errors import DynamoBlobError


def params(request, defaults=None, room=100, extra=None):
    return sampling_params(request, defaults or {}, room, extra)


def test_the_models_defaults_hold_until_the_client_says_otherwise():
    assert params({}, {"temperature": 0.2}).temperature == 0.2
    assert params({"sampling_options": {"temperature": 0.9}}, {"temperature": 0.2}).temperature == 0.9
    assert params({"sampling_options": {"temperature": None}}, {"temperature": 0.2}).temperature == 0.2


@pytest.mark.parametrize(("asked", "room", "got"), [(None, 7, 7), (5, 7, 5), (50, 7, 7), (5, 0, 1)])
def test_max_tokens_never_leaves_the_context(asked, room, got):
    assert params({"stop_conditions": {"max_tokens": asked}}, room=room).max_tokens == got


def test_min_tokens_never_exceeds_max_tokens():
    p = params({"stop_conditions": {"max_tokens": 3, "min_tokens": 10}})
    assert (p.min_tokens, p.max_tokens) == (3, 3)


def test_seed_n_and_penalties_are_passed_on():
    options = {"seed": 7, "n": 2, "temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": -0.5, "top_p": 0.9}
    p = params({"sampling_options": options})
    assert (p.seed, p.n, p.presence_penalty, p.frequency_penalty, p.top_p) == (7, 2, 0.5, -0.5, 0.9)


def test_visible_and_hidden_stop_tokens_both_stop():
    p = params({"stop_conditions": {"stop_token_ids": [5], "stop_token_ids_hidden": [2, 5]}})
    assert p.stop_token_ids == [2, 5]


def test_stop_strings_stay_with_the_frontend_which_detokenises():
    p = params({"stop_conditions": {"stop": ["END"]}})
    assert not p.stop and p.detokenize is False


@pytest.mark.parametrize(
    ("given", "got"), [(None, None), (3, 3), ("2", 2), (0, 0), (True, None), ("x", None), (-1, None)]
)
def test_logprobs_are_non_negative_ints_or_absent(given, got):
    assert params({"output_options": {"logprobs": given}}).logprobs == got


def test_connectors_get_their_parameters():
    assert params({}, extra={"kv_transfer_params": {"a": 1}}).extra_args == {"kv_transfer_params": {"a": 1}}


@pytest.mark.parametrize("options", [{"temperature": -1.0}, {"top_p": 0.0}, {"n": 0}, {"top_p": "much"}])
def test_impossible_options_are_the_clients_error(options):
    with pytest.raises(DynamoBlobError) as e:
        params({"sampling_options": options})
    assert e.value.code == "ENGINE-SAMPLING-INVALID" and e.value.why
