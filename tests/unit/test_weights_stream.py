"""The streaming reader: every byte verified once, in order, in bounded memory."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path

import pytest
import torch

from bench.standin import StandIn
from components.common.errors import DynamoBlobError
from components.common.loading.plan import plan_file
from components.common.loading.report import Report
from components.common.loading.session import open_session
from tests.faults import stores
from tests.faults.releases import (
    FileEntry,
    MiB,
    TensorEntry,
    bytes_of,
    digests,
    make_release,
    random_model,
    tensors_of,
    weights_config,
)

store = stores.store


def load(config, keep: bool = True):  # type: ignore[no-untyped-def]
    report = Report(config.report)
    out: dict[str, torch.Tensor] = {}
    found: dict[str, str] = {}
    order: list[str] = []
    with open_session(config, None, report) as session:
        for name, tensor in session.tensors():
            order.append(name)
            if keep:
                out[name] = tensor
            else:
                found.update(digests({name: tensor}))
    return (digests(out) if keep else found), order, report.as_json()


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("range_bytes", [MiB, 64 * 1024 + 1, 4096])
def test_all_tensors_in_file_order_with_right_bytes(
    tmp_path: Path, store: StandIn, keep: bool, range_bytes: int
) -> None:
    shards = [
        tensors_of(1, [5, 0, 300_000, 1, 70_000, 2_000_000, 17]),
        tensors_of(2, [900_000] * 3),
        tensors_of(3, [1]),
    ]
    random_model(tmp_path / "model", shards)
    manifest = make_release(tmp_path / "store", tmp_path / "model", range_bytes=range_bytes)
    found, order, report = load(
        weights_config(store.url, tmp_path / "w", manifest, budget_bytes=5 * MiB, range_in_flight=6), keep
    )
    assert found == digests({k: v for s in shards for k, v in s.items()})
    assert order == [t.name for t in manifest.tensors]
    weights = sum(f.size for f in manifest.files if f.path.endswith(".safetensors"))
    assert report["bytes_by_source"] == {"blob": weights}
    blobs = {f"weights/{f.blob}": f.size for f in manifest.files if f.path.endswith(".safetensors")}
    assert {k: v for k, v in store.served.items() if "objects" in k} == blobs, "each byte leaves the store once"
    assert report["peak_buffer_bytes"] <= 5 * MiB


def test_memory_stays_bounded_when_the_consumer_takes_and_drops(tmp_path: Path, store: StandIn) -> None:
    random_model(tmp_path / "model", [tensors_of(s, [MiB] * 20) for s in range(3)])
    manifest = make_release(tmp_path / "store", tmp_path / "model", range_bytes=MiB)
    _, _, report = load(weights_config(store.url, tmp_path / "w", manifest, budget_bytes=12 * MiB), keep=False)
    assert report["peak_buffer_bytes"] <= 12 * MiB
    assert report["buffers_mapped"] <= 5, "buffers are reused"


def test_a_kept_tensor_keeps_its_buffer(tmp_path: Path, store: StandIn) -> None:
    """Case 1: a view into a reused buffer is a silently corrupt weight."""
    shards = [tensors_of(s, [MiB] * 20) for s in range(3)]
    random_model(tmp_path / "model", shards)
    manifest = make_release(tmp_path / "store", tmp_path / "model", range_bytes=MiB)
    kept: dict[str, torch.Tensor] = {}
    config = weights_config(store.url, tmp_path / "w", manifest, budget_bytes=12 * MiB)
    with open_session(config, None, Report()) as session:
        for i, (name, tensor) in enumerate(session.tensors()):
            if i % 7 == 0:
                kept[name] = tensor[5:1000]  # a view of a view
    gc.collect()
    wanted = {k: v[5:1000] for s in shards for k, v in s.items()}
    assert {k: bytes_of(v) for k, v in kept.items()} == {k: bytes_of(wanted[k]) for k in kept}


def test_every_dtype_and_tied_weights(tmp_path: Path, store: StandIn) -> None:
    x = torch.randn(64, 33)
    tied = {
        "f32": x, "f16": x.half(), "bf16": x.bfloat16(), "f8": x.to(torch.float8_e4m3fn), "f8b": x.to(torch.float8_e5m2),
        "i8": (x * 10).to(torch.int8), "u8": torch.arange(7, dtype=torch.uint8), "bool": x > 0, "i64": torch.arange(9), "scalar": torch.tensor(3.5),
        "f64": x.double(), "i32": torch.arange(5, dtype=torch.int32), "empty": torch.empty(0, 4), "i16": torch.arange(5, dtype=torch.int16),
    }  # fmt: skip
    random_model(tmp_path / "model", [tied, {"embed": x, "lm_head": x.clone()}])
    manifest = make_release(tmp_path / "store", tmp_path / "model", range_bytes=4096)
    with open_session(weights_config(store.url, tmp_path / "w", manifest), None, Report()) as session:
        found = dict(session.tensors())
    assert set(found) == {*tied, "embed", "lm_head"}
    for name, t in {**tied, "embed": x, "lm_head": x}.items():
        assert found[name].dtype == t.dtype and found[name].shape == t.shape
        assert bytes_of(found[name]) == bytes_of(t), name


def test_case_05_tensor_larger_than_the_budget_is_refused_before_the_first_byte(tmp_path: Path, store: StandIn) -> None:
    random_model(tmp_path / "model", [tensors_of(1, [3 * MiB])])
    manifest = make_release(tmp_path / "store", tmp_path / "model", range_bytes=MiB)
    with pytest.raises(DynamoBlobError) as e:
        load(weights_config(store.url, tmp_path / "w", manifest, budget_bytes=4 * MiB))
    assert e.value.code == "WEIGHTS-BUDGET"
    assert str(5 * MiB) in str(e.value) and str(4 * MiB) in str(e.value)
    assert not any("objects" in k for k in store.served)


def test_flipped_bit_is_named_with_both_digests_and_its_tensor_never_arrives(tmp_path: Path, store: StandIn) -> None:
    shards = [tensors_of(s, [300_000] * 4) for s in (1, 2)]
    random_model(tmp_path / "model", shards)
    manifest = make_release(tmp_path / "store", tmp_path / "model", range_bytes=100_000)
    last = [f for f in manifest.files if f.path.endswith(".safetensors")][-1]
    path = tmp_path / "store/weights" / last.blob
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.unlink()
    path.write_bytes(data)
    seen: list[str] = []
    config = weights_config(store.url, tmp_path / "w", manifest)
    with pytest.raises(DynamoBlobError) as e, open_session(config, None, Report()) as session:
        for name, _ in session.tensors():
            seen.append(name)
    assert e.value.code == "WEIGHTS-DIGEST-MISMATCH"
    assert e.value.data["expected"] == last.ranges[-1] and e.value.data["found"] not in last.ranges
    assert last.path in str(e.value) and f"range {len(last.ranges) - 1}" in str(e.value)
    assert "t2.003" not in seen


@pytest.mark.parametrize("header", [17, 3 * MiB + 5])
def test_of_two_segments_the_one_with_the_larger_part_receives_a_range(header: int) -> None:
    """A header shifts every border: with the first as home, all but 17 bytes of a range in eight were copied."""
    tensors = [TensorEntry(name=f"t{i}", file="m.safetensors", dtype="U8", shape=(32 * MiB,), begin=header + i * 32 * MiB, end=header + (i + 1) * 32 * MiB) for i in range(32)]  # fmt: skip
    size = tensors[-1].end
    ranges = tuple(str(i) for i in range(-(-size // (8 * MiB))))
    file = FileEntry(path="m.safetensors", size=size, blake3="0" * 64, sha256="0" * 64, blob="b", ranges=ranges)
    segments, jobs = plan_file(file, tensors, 8 * MiB, 64 * MiB)
    copied = sum(min(j.end, s.end) - max(j.begin, s.begin) for j in jobs for s in j.others)
    assert copied <= 4 * MiB * len(segments)
    for a, b in itertools.pairwise(segments):
        assert a.capacity + b.capacity <= 4 * 64 * MiB, "the first may wait for the second's memory"
    tight, jobs = plan_file(file, tensors, 8 * MiB, 16 * MiB)  # one large tensor each: they may not fit together
    assert all(j.home is tight[0] or j.home.begin <= j.begin for j in jobs)
