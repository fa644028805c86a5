"""KV of another model, dtype or layout is refused by decode; both values are named."""

import pytest

from components.common.engine.config import WorkerConfig
from components.common.engine.handover import accept, agreed, identity, offer
from components.common.errors import DynamoBlobError

PULL = {"do_remote_prefill": True, "remote_engine_id": "p-1"}


def config(**engine):
    return WorkerConfig.parse(
        {
            "name": "decode-0", "role": "decode", "served_model": "m", "namespace": "n", "component": "backend",
            "run_dir": "run", "engine": engine,
            "weights": {
                "release": {"model": "m"}, "root": "root",
                "account": {"url": "http://127.0.0.1:1/a", "credential": {"kind": "entra"}},
            },
        }
    )  # fmt: skip


def result(kv, mine):
    return {"disaggregated_params": offer(kv, mine)}


def test_equal_identities_hand_over():
    mine = identity(config(), "aa", "0.31.0")
    assert accept(result(PULL, mine), mine) == PULL


@pytest.mark.parametrize(
    ("theirs", "field"),
    [
        (identity(config(), "bb", "0.31.0"), "weights"),
        (identity(config(), "aa", "0.30.0"), "engine"),
        (identity(config(dtype="float32"), "aa", "0.31.0"), "dtype"),
        (identity(config(block_size=64), "aa", "0.31.0"), "block_size"),
        (identity(config(tensor_parallel_size=2), "aa", "0.31.0"), "tensor_parallel_size"),
        ({}, "weights"),
    ],
)
def test_unequal_identities_are_refused_and_both_are_named(theirs, field):
    mine = identity(config(), "aa", "0.31.0")
    with pytest.raises(DynamoBlobError) as e:
        accept(result(PULL, theirs), mine)
    assert e.value.code == "KV-HANDOVER-REFUSED"
    assert f"{field}: prefill {theirs.get(field)!r}, decode {mine[field]!r}" in e.value.why


@pytest.mark.parametrize(
    "given", [None, {}, {"disaggregated_params": None}, {"disaggregated_params": {"kv_transfer_params": None}}]
)
def test_without_an_offer_there_is_nothing_to_pull(given):
    assert accept(given, identity(config(), "aa", "0.31.0")) is None


Q1, Q2, R1, S1, S2 = f"~q{'1' * 16}", f"~q{'2' * 16}", f"~r{'1' * 16}", f"~s{'1' * 16}", f"~s{'2' * 16}"


@pytest.mark.parametrize(
    ("theirs", "mine", "kept"),
    [
        ("", "", ""), (Q1, Q1, Q1),
        (Q1, "", Q1), (Q1 + Q2, Q1, Q1 + Q2), (R1 + Q1, "", R1 + Q1),  # prefill knows more: decode goes its way
        (S1, Q1, Q1), (S1, S2, S2), (Q1, S1, S1), ("", S1, S1),  # computed since one of them was cut off
        (None, "", ""), ("nonsense", "", ""), (["~q"], "", ""),
        ("", Q1, None), (Q1, Q1 + Q2, None), (Q2, Q1, None), (Q1, R1, None), (None, Q1, None), (Q1 + "x", Q1, None),
    ],
)  # fmt: skip
def test_kv_of_a_prefill_worker_that_did_not_know_of_a_quarantine_is_refused(theirs, mine, kept):
    given = {"disaggregated_params": {**offer(PULL, {}), "suffix": theirs}}
    if kept is None:
        with pytest.raises(DynamoBlobError) as e:
            agreed(given, mine)
        assert e.value.code == "KV-HANDOVER-REFUSED" and repr(mine) in e.value.where
    else:
        assert agreed(given, mine) == kept
