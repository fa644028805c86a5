"""Bills: exact sums, what it would have cost without the tiers, price profiles that say where they come from."""

from decimal import Decimal
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from components.common.cost.prices import PriceProfile, Usage, bill, bill_of_all

ROOT = Path(__file__).parents[3]
PRICES = PriceProfile(
    name="x", source="test", estimate=False, gpu_second=Decimal("0.003"), blob_read_10k=Decimal("0.005"),
    blob_write_10k=Decimal("0.065"), blob_list_10k=Decimal("0.065"), blob_gb_month=Decimal("0.0184"), network_gb=Decimal("0.01"),
)  # fmt: skip
whole = st.integers(0, 10**12)
seconds = st.decimals(0, 10**6, places=6)
usages = st.builds(Usage, whole, whole, whole, seconds, seconds, whole, whole, whole, whole, whole, seconds, seconds)


def test_a_bill_by_hand() -> None:
    """32k tokens of an 8B model, 256 chunks loaded from Blob instead of 1.26 s of prefill."""
    usage = Usage(
        32_768, 32_640, 100, Decimal("0.01"), Decimal("0.6"), blob_reads=256, blob_read_bytes=4_831_838_208,
        avoided_gpu_s=Decimal("1.25"),
    )  # fmt: skip
    got = bill(usage, PRICES)
    amounts = {line.what: line.amount for line in got.lines}
    assert amounts == {
        "prefill": Decimal("0.00003"), "decode": Decimal("0.0018"), "blob reads": Decimal("0.000128"),
        "blob network": Decimal("0.04831838208"),
    }  # fmt: skip
    assert got.total == Decimal("0.05027638208")
    assert got.without_tiers == Decimal("0.00558")
    assert got.saved < 0, "at one cent a GB the network costs more than the GPU: the bill says so"


@given(st.lists(usages, max_size=8))
def test_the_sum_of_bills_is_the_bill_of_the_sum(many: list[Usage]) -> None:
    total = bill_of_all(many, PRICES)
    assert total.total == pytest.approx(sum((bill(u, PRICES).total for u in many), Decimal(0)))
    assert sum((line.amount for line in total.lines), Decimal(0)) == total.total


@given(usages)
def test_without_tiers_is_all_the_gpu_time_and_nothing_else(usage: Usage) -> None:
    got = bill(usage, PRICES)
    gpu = usage.prefill_gpu_s + usage.decode_gpu_s + usage.avoided_gpu_s
    assert got.without_tiers == gpu * PRICES.gpu_second
    assert got.saved == got.without_tiers - got.total
    assert all(line.amount >= 0 for line in got.lines)


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "prices").glob("*.yaml")), ids=lambda p: p.stem)
def test_profiles_are_valid_and_say_their_source(path: Path) -> None:
    profile = PriceProfile.parse(yaml.safe_load(path.read_text()), where=str(path))
    assert profile.name == path.stem and profile.source
    assert profile.estimate == ("estimate" in profile.source)
    assert bill(Usage(), profile).as_json()["estimate"] == profile.estimate


def test_storage_is_a_month_of_730_hours() -> None:
    got = bill(Usage(stored_byte_hours=Decimal(10**9 * 730)), PRICES)
    assert got.total == Decimal("0.0184")
