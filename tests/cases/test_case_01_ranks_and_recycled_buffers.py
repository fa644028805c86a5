"""Case 1: two ranks, recycled buffers, small memory: every tensor right *after* placement, and the store read once."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from bench.standin import StandIn
from components.common.errors import DynamoBlobError
from components.common.loading.ranks import Ranks
from components.common.loading.report import Report
from components.common.loading.session import open_session
from tests.faults import stores
from tests.faults.proxy import FaultProxy, Rule
from tests.faults.releases import MiB, bytes_of, digests, make_release, random_model, tensors_of, weights_config

store = stores.store

SHARDS = [tensors_of(s, [800_000, 17, 1_200_000, 300_000]) for s in range(4)]
EVERYTHING = {k: v for s in SHARDS for k, v in s.items()}


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_read_together_once_and_place_right_bytes(tmp_path: Path, store: StandIn, size: int) -> None:
    random_model(tmp_path / "model", SHARDS)
    manifest = make_release(tmp_path / "store", tmp_path / "model", range_bytes=MiB // 8)

    def rank(r: int) -> tuple[dict[str, str], dict[str, int]]:
        report = Report()
        config = weights_config(store.url, tmp_path / str(r), manifest, budget_bytes=6 * MiB)
        placed: dict[str, torch.Tensor] = {}
        ranks = Ranks(r, size, f"case01-{os.getpid()}-{size}", str(tmp_path))
        with open_session(config, None, report, ranks=ranks) as session:
            for name, tensor in session.tensors():  # each rank keeps its slice, as a tensor-parallel engine does
                n = len(tensor) // size
                placed[name] = tensor[r * n : (r + 1) * n].clone()
        return {k: digests({k: v})[k] for k, v in placed.items()}, report.as_json()["bytes_by_source"]

    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(rank, range(size)))
    for r, (found, _) in enumerate(results):
        wanted = {k: v[r * (len(v) // size) : (r + 1) * (len(v) // size)] for k, v in EVERYTHING.items()}
        assert found == digests(wanted)
    files = {f"weights/{f.blob}": f.size for f in manifest.files if f.path.endswith(".safetensors")}
    assert {k: store.served[k] for k in files} == files, "each byte left the store once, not once per rank"
    assert all(
        by["blob"] > 0 and by["rank"] > 0 and by["blob"] + by["rank"] == sum(files.values()) for _, by in results
    )
    assert not list(tmp_path.glob("dynamo-blob-*"))


def test_one_rank_fails_all_ranks_stop(tmp_path: Path, store: StandIn) -> None:
    random_model(tmp_path / "model", SHARDS)
    manifest = make_release(tmp_path / "store", tmp_path / "model", range_bytes=MiB // 8)
    with FaultProxy("127.0.0.1", store.port) as proxy:
        proxy.rules = [Rule("flip", r"objects", after=9)]
        session_id = f"case01f-{os.getpid()}"

        def rank(r: int) -> str:
            url = proxy.url("standin") if r == 1 else store.url
            try:
                with open_session(
                    weights_config(url, tmp_path / str(r), manifest),
                    None,
                    Report(),
                    ranks=Ranks(r, 2, session_id, str(tmp_path)),
                ) as session:
                    list(session.tensors())
            except DynamoBlobError as e:
                return e.code
            return "loaded"

        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(rank, range(2))) == ["WEIGHTS-RANK-FAILED", "WEIGHTS-DIGEST-MISMATCH"]
    assert not list(tmp_path.glob("dynamo-blob-*"))


def test_a_recycled_buffer_never_changes_a_tensor_that_is_still_held(tmp_path: Path, store: StandIn) -> None:
    random_model(tmp_path / "model", SHARDS)
    manifest = make_release(tmp_path / "store", tmp_path / "model", range_bytes=MiB // 8)
    config = weights_config(store.url, tmp_path / "w", manifest, budget_bytes=6 * MiB)
    held: list[tuple[str, torch.Tensor]] = []
    with open_session(config, None, Report()) as session:
        for i, item in enumerate(session.tensors()):
            held.append((item[0], item[1][:1000]))
            if i % 3:
                held.pop(0)  # some are dropped, so that buffers do go round
    assert held and all(bytes_of(t) == bytes_of(EVERYTHING[k][:1000]) for k, t in held)
