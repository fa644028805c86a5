"""The bill of one request as arithmetic: quantities times prices, and what the same request costs without the tiers.

Decimal throughout: sums of bills equal the bill of the sums to the last digit. No rounding here; who prints, rounds.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from typing import Any, NamedTuple

from pydantic import Field

from components.common.config import Config

_GB = Decimal(10) ** 9
_HOURS_A_MONTH = Decimal(730)


class PriceProfile(Config):
    """What things cost. configs/prices/*.yaml. Amounts per unit, in `currency`."""

    name: str
    source: str = Field(description="where the numbers come from")
    estimate: bool = Field(description="true = not from a contract or an invoice; every bill repeats it")
    currency: str = Field("USD", description="ISO 4217")
    gpu_second: Decimal = Field(ge=0, description="one GPU for one second")
    blob_read_10k: Decimal = Field(ge=0, description="10,000 read operations (one per chunk loaded)")
    blob_write_10k: Decimal = Field(ge=0, description="10,000 write operations (one per chunk stored)")
    blob_list_10k: Decimal = Field(Decimal(0), ge=0, description="10,000 list operations (catalogue, purge)")
    blob_gb_month: Decimal = Field(ge=0, description="10^9 bytes stored for a month of 730 hours")
    network_gb: Decimal = Field(Decimal(0), ge=0, description="10^9 bytes between worker and store, each way")


class Usage(NamedTuple):
    """Quantities of one request, or of many added up."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were not computed, whatever tier they came from."""
    output_tokens: int = 0
    prefill_gpu_s: Decimal = Decimal(0)
    decode_gpu_s: Decimal = Decimal(0)
    blob_reads: int = 0
    blob_read_bytes: int = 0
    blob_writes: int = 0
    blob_write_bytes: int = 0
    blob_lists: int = 0
    stored_byte_hours: Decimal = Decimal(0)
    avoided_gpu_s: Decimal = Decimal(0)
    """Prefill seconds that the tiers (DRAM, Blob; not HBM) saved."""

    def __add__(self, other: object) -> Usage:
        if not isinstance(other, Usage):
            return NotImplemented
        return Usage(*(mine + more for mine, more in zip(self, other, strict=True)))  # type: ignore[operator]


class Line(NamedTuple):
    """One line of a bill."""

    what: str
    quantity: Decimal
    unit: str
    amount: Decimal


class Bill(NamedTuple):
    """`lines` add up to `total`. `without_tiers`: the same request with HBM only. `saved` may be negative."""

    currency: str
    lines: tuple[Line, ...]
    total: Decimal
    without_tiers: Decimal
    estimate: bool

    @property
    def saved(self) -> Decimal:
        return self.without_tiers - self.total

    def as_json(self) -> dict[str, Any]:
        """Amounts and quantities as strings, exact."""
        return {
            "currency": self.currency, "total": str(self.total), "without_tiers": str(self.without_tiers),
            "saved": str(self.saved), "estimate": self.estimate,
            "lines": [{"what": w, "quantity": str(q), "unit": u, "amount": str(a)} for w, q, u, a in self.lines],
        }  # fmt: skip


def bill(usage: Usage, prices: PriceProfile) -> Bill:
    """The bill of `usage`. Lines with nothing in them are left out."""
    moved = Decimal(usage.blob_read_bytes + usage.blob_write_bytes) / _GB
    stored = usage.stored_byte_hours / _GB / _HOURS_A_MONTH
    every = (
        Line("prefill", usage.prefill_gpu_s, "GPU s", usage.prefill_gpu_s * prices.gpu_second),
        Line("decode", usage.decode_gpu_s, "GPU s", usage.decode_gpu_s * prices.gpu_second),
        Line("blob reads", Decimal(usage.blob_reads), "operations", usage.blob_reads * prices.blob_read_10k / 10_000),
        Line(
            "blob writes", Decimal(usage.blob_writes), "operations", usage.blob_writes * prices.blob_write_10k / 10_000
        ),
        Line("blob lists", Decimal(usage.blob_lists), "operations", usage.blob_lists * prices.blob_list_10k / 10_000),
        Line("blob network", moved, "GB", moved * prices.network_gb),
        Line("blob storage", stored, "GB months", stored * prices.blob_gb_month),
    )
    lines = tuple(line for line in every if line.quantity)
    gpu_s = usage.prefill_gpu_s + usage.avoided_gpu_s + usage.decode_gpu_s
    return Bill(
        prices.currency,
        lines,
        sum((line.amount for line in lines), Decimal(0)),
        gpu_s * prices.gpu_second,
        prices.estimate,
    )


def bill_of_all(usages: Iterable[Usage], prices: PriceProfile) -> Bill:
    """One bill for many requests; equals the sum of theirs."""
    return bill(sum(usages, Usage()), prices)
