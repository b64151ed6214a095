"""PyTorch's own tools on our allocator tell and do what their users know. Needs a GPU and ``--allocator pages``."""

from __future__ import annotations

import gc
import tempfile
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torch_tiers as tiers
from tests.programs import deterministic_kernels
from tests.scenarios import batch, main, moving, perceptron, train
from torch_tiers import paging
from torch_tiers.allocator.sizes import GiB, MiB

TRIES = 8  # where other processes use the device, too, what it has left changes at any time


def allocated_and_reserved_are_counted(device: torch.device) -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    tensor = torch.empty(32 * MiB, dtype=torch.uint8, device=device)
    assert torch.cuda.memory_allocated() - before == 32 * MiB
    assert torch.cuda.memory_reserved() >= torch.cuda.memory_allocated()
    del tensor
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() == before + 32 * MiB
    assert "Allocated memory" in torch.cuda.memory_summary()
    stats = torch.cuda.memory_stats()
    assert stats["allocation.large_pool.peak"] > 0
    torch.cuda.empty_cache()


def idle_memory_goes_back_when_asked(device: torch.device) -> None:
    gained = []
    for _ in range(TRIES):
        del_me = torch.empty(256 * MiB, dtype=torch.uint8, device=device)
        del del_me
        free, _ = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_reserved()
        torch.cuda.empty_cache()
        after, _ = torch.cuda.mem_get_info()
        assert reserved - torch.cuda.memory_reserved() >= 200 * MiB
        gained.append(after - free)
    assert max(gained) >= 200 * MiB, gained


def hbm_ends_and_dram_goes_on(device: torch.device) -> None:
    # 1 GiB of HBM (PAGES_HBM): twice that is there, and reads as it was written.
    parts = [torch.full((64 * MiB,), i, dtype=torch.uint8, device=device) for i in range(32)]
    free, total = torch.cuda.mem_get_info()
    assert all(bool((part == i).all()) for i, part in enumerate(parts))
    assert torch.cuda.memory_allocated() >= 2 * GiB
    print(f"  {torch.cuda.memory_reserved() / GiB:.2f} GiB reserved; {(total - free) / GiB:.2f} GiB of HBM in use")
    del parts
    torch.cuda.empty_cache()


def dram_that_the_arena_has_idle_is_there_when_hbm_ends(device: torch.device) -> None:
    with moving(dram="4GiB") as session:
        train(perceptron(device), device, steps=2)
        arena = session._dram
        assert arena is not None
        blocks = [block for _ in range(16) if (block := arena.allocate(240 * MiB)) is not None]
        while blocks:
            arena.free(blocks.pop())
        idle = arena.grown
        parts = [torch.full((64 * MiB,), i, dtype=torch.uint8, device=device) for i in range(32)]
        assert all(bool((part == i).all()) for i, part in enumerate(parts))
        print(f"  of {idle / GiB:.2f} GiB in the arena {arena.grown / GiB:.2f} GiB are left")
        assert arena.grown < idle
        del parts
        torch.cuda.empty_cache()


def an_evaluation_that_hbm_has_no_room_for_leaves_nothing_in_dram(device: torch.device) -> None:
    with moving(dram="4GiB") as session:
        model = perceptron(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(12):
            model(batch(device, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in (6, 9):
                with torch.no_grad():
                    parts = [torch.full((64 * MiB,), i, dtype=torch.uint8, device=device) for i in range(32)]
                    assert session.stats()["pages"]["dram"] > 0
                    assert all(bool((part == i).all()) for i, part in enumerate(parts))
                    del parts
        assert session.stats()["pages"]["dram"] == 0


def out_of_memory_means_that_every_tier_is_full(device: torch.device) -> None:
    with pytest.raises(torch.OutOfMemoryError, match=r"every tier is full.*hbm: .* dram: .*TIERS_DRAM"):
        torch.empty(64 * GiB, dtype=torch.uint8, device=device)
    assert torch.cuda.memory_stats()["num_ooms"] >= 1
    torch.ones(1000, device=device).sum().item()  # and the program goes on
    torch.cuda.empty_cache()


def a_later_session_may_have_less(device: torch.device) -> None:
    pages = paging.installed()
    assert pages is not None
    before = pages.limit(device)
    with tiers.session(allocator="pages", hbm="512MiB", dram="4GiB") as session:
        train(perceptron(device), device, steps=4)
        assert session.stats()["budget"]["hbm"] == 512 * MiB
        assert pages.limit(device) <= 512 * MiB
    assert pages.limit(device) == before


def memory_used_on_another_stream_is_kept_until_that_is_done(device: torch.device) -> None:
    side = torch.cuda.Stream()
    for i in range(1000):
        tensor = torch.full((MiB,), i % 100, dtype=torch.uint8, device=device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            if i % 100 == 0:
                torch.cuda._sleep(1_000_000)
            total = tensor.sum()
        tensor.record_stream(side)
        del tensor
        other = torch.full((MiB,), 255, dtype=torch.uint8, device=device)  # would take its place
        torch.cuda.current_stream().wait_stream(side)
        assert int(total) == (i % 100) * MiB
        del other
    assert torch.cuda.memory_reserved() < GiB


def a_captured_graph_replays(device: torch.device) -> None:
    model = perceptron(device)
    static = batch(device, 0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        model(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = model(static)
    # What is asked for between replays must not be the graph's memory.
    others = [torch.randn(2048, 128, device=device) for _ in range(20)]
    copies = [other.clone() for other in others]
    for i in range(3):
        static.copy_(batch(device, i))
        graph.replay()
        with torch.no_grad():
            assert torch.allclose(out, model(batch(device, i)), atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(others, copies, strict=True))
    del graph, out


def a_graph_is_captured_while_another_thread_frees_and_allocates(device: torch.device) -> None:
    """In the default mode of captures, in which CUDA has other threads ask for next to nothing."""
    stop, failures = threading.Event(), list[BaseException]()

    def work() -> None:
        streams = torch.cuda.Stream(), torch.cuda.Stream()
        try:
            while not stop.is_set():
                for stream in streams:
                    with torch.cuda.stream(stream):
                        block = torch.ones(MiB, device=device)
                        block.record_stream(streams[0])
                        del block
        except BaseException as failure:
            failures.append(failure)

    x = torch.ones(1024, device=device)
    x * 2  # whose kernel is there by now
    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(20):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = x * 2
            graph.replay()
            assert float(y.sum()) == 2048
    finally:
        stop.set()
        thread.join()
    assert not failures, failures


def training_in_a_captured_graph_replays(device: torch.device) -> None:
    model = perceptron(device)
    graphed = torch.cuda.make_graphed_callables(model, (batch(device, 0).requires_grad_(),))
    losses = []
    optimizer = torch.optim.SGD(graphed.parameters(), lr=0.1)
    for i in range(4):
        optimizer.zero_grad(set_to_none=True)
        loss = graphed(batch(device, i)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < losses[0]


def compiled_with_cuda_graphs_trains(device: torch.device) -> None:
    def losses(compiled: bool) -> list[float]:
        model: nn.Module = perceptron(device)
        run = torch.compile(model, mode="reduce-overhead") if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = []
        for i in range(8):
            optimizer.zero_grad(set_to_none=True)
            loss = run(batch(device, i)).square().mean()
            loss.backward()
            optimizer.step()
            seen.append(float(loss.detach()))
        return seen

    assert losses(True) == pytest.approx(losses(False), rel=1e-4)


def a_snapshot_shows_what_was_allocated(device: torch.device) -> None:
    torch.cuda.memory._record_memory_history(max_entries=1000)
    tensor = torch.empty(8 * MiB, dtype=torch.uint8, device=device)
    snapshot = torch.cuda.memory._snapshot()
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    mine = [block for block in blocks if block["address"] == tensor.data_ptr()]
    assert mine, "the block is not in the snapshot"
    assert mine[0]["state"] == "active_allocated"
    assert mine[0]["size"] == 8 * MiB
    assert any(entry["action"] == "alloc" and entry["size"] == 8 * MiB for entry in snapshot["device_traces"][0])
    assert any(frame["filename"].endswith("pages.py") for frame in mine[0]["frames"])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "snapshot.pickle"
        torch.cuda.memory._dump_snapshot(str(path))
        assert path.stat().st_size > 0
    torch.cuda.memory._record_memory_history(enabled=None)


def a_memory_pool_keeps_to_itself(device: torch.device) -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        inside = torch.ones(4 * MiB, dtype=torch.uint8, device=device)
    outside = torch.ones(4 * MiB, dtype=torch.uint8, device=device)
    places = {segment["address"] for segment in pool.snapshot()}
    assert places
    assert not any(a <= outside.data_ptr() < a + 2 * MiB for a in places)
    del inside, pool
    gc.collect()


def a_fraction_of_the_device_is_a_limit(device: torch.device) -> None:
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(256 * MiB / total)
    tensor = torch.empty(512 * MiB, dtype=torch.uint8, device=device)  # the rest lies in DRAM
    free, _ = torch.cuda.mem_get_info()
    del tensor
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.cuda.get_per_process_memory_fraction() == 1.0
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] - free < 300 * MiB


def threads_allocate_and_free_at_once(device: torch.device) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            held: list[Tensor] = []
            for i in range(300):
                held.append(torch.full((1 + (seed * 7919 + i * 104729) % 100_000,), seed, device=device))
                if len(held) > 10:
                    tensor = held.pop(0)
                    assert bool((tensor == seed).all())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def _losses(device: torch.device, *, sharded: bool) -> list[float]:
    """Two steps, and the loss after them."""
    model = perceptron(device)
    if sharded:
        mesh = init_device_mesh(device.type, (1,))
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    losses = []
    for i in range(2):
        optimizer.zero_grad(set_to_none=True)
        loss = model(batch(device, i)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        losses.append(float(model(batch(device, 2)).square().mean()))
    return losses


def _lose_elsewhere(rank: int, path: str, device: str) -> None:
    """In a process of its own, whose allocator is PyTorch's."""
    with deterministic_kernels():
        losses = _losses(torch.device(device), sharded=False)
    assert torch.cuda.get_allocator_backend() != "tiers"
    torch.save(losses, path)


def fully_sharded_training_is_what_it_is_with_neither(device: torch.device) -> None:
    """FSDP2 gathers and gives back parameters on streams of its own; a group of one process has all of that."""
    backend = "nccl" if dist.is_nccl_available() else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "losses"
        mp.spawn(_lose_elsewhere, (str(path), str(device)), nprocs=1)
        dist.init_process_group(backend, init_method=f"file://{folder}/group", rank=0, world_size=1)
        try:
            with deterministic_kernels():
                losses = _losses(device, sharded=True)
        finally:
            dist.destroy_process_group()
        print(f"  over {backend}: {losses}")
        assert losses == torch.load(path)


if __name__ == "__main__":
    main("pages")
