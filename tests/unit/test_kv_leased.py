"""Offers of KV are stamped, and refused past half of their lease (case 30)."""

from __future__ import annotations

import pytest

from components.common.kv.leased import stamp, too_late

OFFER = {"do_remote_prefill": True, "remote_request_id": "r"}


@pytest.mark.parametrize("age,late", [(0.0, False), (14.9, False), (15.1, True), (600.0, True), (-600.0, True)])
def test_age(age: float, late: bool) -> None:
    assert too_late(stamp(OFFER, 30.0, 1000.0), 1000.0 + age) is late


def test_an_offer_without_a_stamp_cannot_be_trusted() -> None:
    assert too_late(OFFER, 1.0)


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": True}, {"do_remote_prefill": False}])
def test_requests_without_an_offer_are_left_alone(params: dict | None) -> None:
    assert not too_late(params, 1.0)
    assert stamp(params, 30.0, 1.0) == params
