"""A worker's place among the tensor-parallel ranks of its node, as vLLM's parallel state tells it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed
from vllm.distributed import parallel_state

from components.common.loading import ranks
from components.common.loading.ranks import Ranks, from_vllm

Places = Callable[[list[str]], list[Ranks | None]]


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Places:
    """`places(nodes)`: what each rank of one group is told; rank i runs on the machine `nodes[i]`.

    One thread a rank. Only what vLLM and torch say is made here: the group, and what its ranks gather.
    """
    here = threading.local()
    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: here.group)
    monkeypatch.setattr(ranks, "sweep_dead", lambda: None)

    def run(nodes: list[str]) -> list[Ranks | None]:
        met, said = threading.Barrier(len(nodes), timeout=30), [("", "")] * len(nodes)
        shared = object()

        def all_gather_object(found: list[Any], mine: tuple[str, str], group: object) -> None:
            assert len(found) == len(nodes) > 1
            assert group is shared, "the CPU group: nothing of this may go to a GPU"
            place, name = mine
            rank = here.group.rank_in_group
            said[rank] = (f"{place} {nodes[rank]}", name)
            met.wait()
            own = f"{place} {nodes[rank]}"  # what this process calls its machine, is `place` to it
            found[:] = [(place if p == own else p, n) for p, n in said]

        monkeypatch.setattr(torch.distributed, "all_gather_object", all_gather_object)

        def rank(i: int) -> Ranks | None:
            here.group = SimpleNamespace(world_size=len(nodes), rank_in_group=i, cpu_group=shared)
            return from_vllm()

        with ThreadPoolExecutor(len(nodes)) as pool:
            return list(pool.map(rank, range(len(nodes))))

    return run


def test_without_parallel_state_there_are_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_state, "_TP", None)
    with pytest.raises(AssertionError):  # vLLM's own answer: another kind of error would end the load
        parallel_state.get_tp_group()
    assert from_vllm() is None


def test_one_rank_is_alone(places: Places) -> None:
    assert places(["a"]) == [None], "and need not gather anything"


def test_ranks_of_one_node_share_a_session(places: Places) -> None:
    found = places(["a"] * 4)
    assert [(r.rank, r.size, r.directory) for r in found if r] == [(i, 4, "/dev/shm") for i in range(4)]
    sessions = {r.session for r in found if r}
    assert len(sessions) == 1
    name = f"dynamo-blob-{sessions.pop()}-{'0' * 32}"
    matched = ranks._NAME.fullmatch(name)
    assert matched and int(matched[1]) == os.getpid(), "begins with a process id: what a killed rank left can be told"
    assert {r.session for r in places(["a"] * 4) if r}.isdisjoint({r.session for r in found if r}), "each load its own"


def test_each_node_of_a_group_counts_for_itself(places: Places) -> None:
    found = places(["a", "b", "a", "b", "b"])
    assert [(r.rank, r.size) for r in found if r] == [(0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    of_a, of_b = {found[i].session for i in (0, 2)}, {found[i].session for i in (1, 3, 4)}  # type: ignore[union-attr]
    assert len(of_a) == len(of_b) == 1 and of_a != of_b


def test_a_rank_that_has_its_node_for_itself_reads_alone(places: Places) -> None:
    found = places(["a", "a", "b"])
    assert [r and (r.rank, r.size) for r in found] == [(0, 2), (1, 2), None]
