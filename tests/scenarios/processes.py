"""Other processes: DataLoader workers by fork and by spawn, forks of the program's own, DDP and FSDP2."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import torch_tiers as tiers
from tests.programs import deterministic_kernels
from tests.scenarios import (
    REMADE,
    assert_same,
    batch,
    bits,
    gradients,
    main,
    moved,
    moving,
    perceptron,
    state_streamed,
    streamed,
    train,
)
from torch_tiers.allocator.sizes import MiB


class _Augmented(Dataset):
    """Uses modules in its workers, with gradients on, as people do without thinking."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.augment = nn.Sequential(nn.Linear(128, 128), nn.Tanh())

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> Tensor:
        return self.augment(batch(torch.device("cpu"), i)).detach()


def _train_from(start: str, device: torch.device, *, persistent: bool = False) -> list[Tensor]:
    loader = DataLoader(
        _Augmented(), batch_size=None, num_workers=1, multiprocessing_context=start, persistent_workers=persistent
    )
    model = perceptron(device)
    results = []
    for _ in range(2):
        for x in loader:
            loss = model(x.to(device)).square().mean()
            loss.backward()
            results += [loss.detach(), *gradients(model)]
    return results


def dataloader_workers_by_fork(device: torch.device) -> None:
    """The second epoch's workers are forked from a process in which everything of ours is running."""
    assert_same(lambda device: _train_from("fork", device), device)


def dataloader_workers_by_spawn(device: torch.device) -> None:
    assert_same(lambda device: _train_from("spawn", device, persistent=True), device)


def dataloader_workers_by_fork_with_a_file_open(device: torch.device) -> None:
    with tempfile.TemporaryDirectory() as directory:
        disk = {"dram": "4MiB", "nvme": "64MiB", "nvme_path": directory, "nvme_gds": "off"}
        stats = assert_same(lambda device: _train_from("fork", device), device, room=0, **disk)
        assert stats["moved"]["disk_read"] > 0
        assert os.listdir(directory) == []


def _in_a_fork(*, backward: bool) -> bytes:
    """Use a model on the CPU, as a fork cannot use CUDA; return a digest of the results."""
    read, write = os.pipe()
    if os.fork() == 0:
        torch.set_num_threads(1)  # OpenMP's own trap: its threads did not come along
        cpu = torch.device("cpu")
        results = train(perceptron(cpu), cpu) if backward else [perceptron(cpu)(batch(cpu, 0))]
        os.write(write, hashlib.sha256(b"".join(bits(results))).digest())
        os._exit(0)
    os.close(write)
    os.wait()
    with open(read, "rb") as pipe:
        return pipe.read()


def a_fork_of_the_program_s_own(device: torch.device) -> None:
    """The child computes without us; the parent trains on."""
    backward = device.type == "cpu"  # with CUDA autograd has threads, and refuses to go on in a fork
    plain = _in_a_fork(backward=backward)
    assert plain
    with moving(room=0) as session:
        model = perceptron(device)
        train(model, device)
        assert _in_a_fork(backward=backward) == plain
        before = moved(session)["h2d"]
        train(model, device)
        assert moved(session)["h2d"] > before


def _spawn(rank_of: Callable[..., None], *arguments: object, join: bool = True) -> Any:
    """Start two ranks, forked off a process that has imported what takes longest, and nothing of ours."""
    mp.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor"])
    return mp.start_processes(rank_of, arguments, nprocs=2, join=join, start_method="forkserver")


@contextmanager
def _group(start: Path, rank: int) -> Iterator[None]:
    """A process group of two ranks. What has a model of DDP has to be over before it ends.

    A reducer that is the last to hold the group waits for gloo's threads, with the interpreter, which these may need to
    release what the program had around it: plain PyTorch hangs there in one of some thirty runs.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{start}", rank=rank, world_size=2)
    yield
    dist.destroy_process_group()


def _train_rank(rank: int, directory: str, device: str, with_tiers: bool) -> None:
    with _group(Path(directory) / str(with_tiers), rank):
        results = _trained_by_ddp(rank, torch.device(device), with_tiers=with_tiers)
        torch.save(results, Path(directory) / f"{with_tiers}-{rank}")


def _trained_by_ddp(rank: int, on: torch.device, *, with_tiers: bool) -> list[Tensor]:
    model = DistributedDataParallel(perceptron(on, depth=6), bucket_cap_mb=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def steps() -> list[Tensor]:
        results = []
        for i in range(4):
            optimizer.zero_grad()
            with model.no_sync():
                model(batch(on, 10 * i + rank)).square().mean().backward()
            loss = model(batch(on, 10 * i + rank + 2)).square().mean()
            loss.backward()
            optimizer.step()
            results += [loss.detach(), *gradients(model)]
        return results

    with deterministic_kernels():
        if with_tiers:
            with moving(room=MiB) as session:
                results = steps()
                assert moved(session)["h2d"] > 0
            return results
        return steps()


def ddp_over_gloo(device: torch.device) -> None:
    with tempfile.TemporaryDirectory() as directory:
        for with_tiers in (False, True):
            print("  with tiers" if with_tiers else "  plain")  # which of them hung, if one does
            _spawn(_train_rank, directory, str(device), with_tiers)
        for rank in range(2):
            plain, ours = (bits(torch.load(Path(directory) / f"{how}-{rank}")) for how in (False, True))
            print(f"  rank {rank}: {len(plain)} results")
            assert plain == ours


def _train_streamed(rank: int, directory: str, device: str, how: str, with_tiers: bool) -> None:
    name = f"{how}-{with_tiers}"
    with _group(Path(directory) / name, rank):
        results = _trained_with_streaming(rank, torch.device(device), how, with_tiers=with_tiers)
        torch.save(results, Path(directory) / f"{name}-{rank}")


def _trained_with_streaming(rank: int, where: torch.device, how: str, *, with_tiers: bool) -> list[Tensor]:
    model: nn.Module = perceptron(where, depth=6)
    if how == "ddp":
        model = DistributedDataParallel(model, bucket_cap_mb=0.1)
    else:
        mesh = init_device_mesh("cpu", (2,))
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    # `foreach` takes no plain tensors together with DTensors.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=how == "fsdp2" or None)

    def steps() -> list[Tensor]:
        results = []
        for i in range(5):
            optimizer.zero_grad()
            for part in range(2):
                loss = model(batch(where, 10 * i + 2 * part + rank)).square().mean()
                loss.backward()
                results.append(loss.detach())
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            results.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
            optimizer.step()
        state = [value for of in optimizer.state.values() for value in of.values()]
        for tensor in (*model.parameters(), *state):
            results.append(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
        return [result.detach().clone() for result in results]

    with deterministic_kernels(), ExitStack() as stack:
        if with_tiers:
            stack.enter_context(streamed())
            stack.enter_context(state_streamed())
            session = stack.enter_context(tiers.session(allocator="torch", policy="keep", dram="64MiB"))
        results = steps()
        if with_tiers:
            counts = moved(session)
            weights, state = counts.get("weights", 0), counts.get("state_read", 0)
            print(f"  rank {rank} of {how}: {weights} bytes of weights and {state} of state streamed", flush=True)
            assert how != "ddp" or weights > 0
            assert state == counts["state_write"] > 0
    return results


def weights_and_state_are_streamed_under_ddp_and_fsdp2_with_clipping(device: torch.device) -> None:
    """Weights that FSDP2 gathers come and go anyway, and are not streamed."""
    with tempfile.TemporaryDirectory() as directory:
        for how, where in (("ddp", device), ("fsdp2", "cpu")):  # gloo has no reduce-scatter for GPUs
            for with_tiers in (False, True):
                _spawn(_train_streamed, directory, str(where), how, with_tiers)
            for rank in range(2):
                plain, ours = (bits(torch.load(Path(directory) / f"{how}-{with_}-{rank}")) for with_ in (False, True))
                print(f"  {how} rank {rank}: {len(plain)} results")
                assert plain == ours


def _end_groups(rank: int, directory: str, device: str, within: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/groups", rank=rank, world_size=2)
    model = perceptron(torch.device(device), depth=2)

    def end_one(session: AbstractContextManager[Any]) -> None:
        group = dist.new_group([0, 1])
        model_of_group = DistributedDataParallel(model, process_group=group)  # the last that holds it
        with session:
            model_of_group(batch(torch.device(device), rank)).sum().backward()
            dist.barrier(group)
        dist.destroy_process_group(group)

    with moving(room=MiB) if within else nullcontext():
        for _ in range(10):
            end_one(nullcontext() if within else moving(room=MiB))
    dist.destroy_process_group()


def process_groups_that_end_with_ddp(device: torch.device) -> None:
    """Threads of gloo let go of our hooks, for which they need the interpreter: who waits for them must not have it."""
    _end_them(device, within=True)


def process_groups_that_end_after_the_session(device: torch.device) -> None:
    """Threads of gloo may have its hooks still."""
    _end_them(device, within=False)


def _end_them(device: torch.device, *, within: bool) -> None:
    with tempfile.TemporaryDirectory() as directory:
        ranks = _spawn(_end_groups, directory, str(device), within, join=False)
        deadline = time.monotonic() + 120
        while not ranks.join(timeout=5):
            if time.monotonic() > deadline:
                for process in ranks.processes:
                    process.kill()
                raise AssertionError("the ranks hang")


class _Frozen(nn.Linear):
    """Saves its weight as no parameter: FSDP frees that memory after forward, and fills it again for backward."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.detach())


class _Sharded(nn.Module):
    """Blocks whose parameters are gathered for each forward and backward, with what could be recomputed in between."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128), _Frozen(128, 128))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def _sharded(rank: int, kind: str, start: str) -> tuple[_Sharded, torch.device]:
    """Join the other rank, and shard a model over both; the device of this rank."""
    if kind == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # where there is a GPU, tensors of the CPU do not move
        device = torch.device("cpu")
    else:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    backend = {"cpu": "gloo", "cuda": "nccl"}[kind]
    dist.init_process_group(backend, init_method=f"file://{start}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = _Sharded().to(device)
    mesh = init_device_mesh(kind, (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, device


def _train_shards(rank: int, directory: str, kind: str, how: str) -> None:
    """Train plainly, or with tiers by an allocator."""
    if how == "pages":  # before CUDA is initialised, and then for good
        with tiers.session(allocator="pages", hbm="2GiB", dram="1GiB"):
            torch.cuda.init()
    model, device = _sharded(rank, kind, f"{directory}/start-{kind}-{how}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

    def steps() -> list[Tensor]:
        results = []
        for i in range(5):
            optimizer.zero_grad()
            loss = model(batch(device, 10 * i + rank)).square().mean()
            loss.backward()
            optimizer.step()
            shards = [p.grad.to_local().clone() for p in model.parameters() if isinstance(p.grad, DTensor)]
            results += [loss.detach(), *shards]
        return results

    with deterministic_kernels():
        results = steps() if how == "plain" else _steps_with_tiers(rank, steps)
    torch.save(results, Path(directory) / f"{kind}-{how}-{rank}")
    dist.destroy_process_group()


def _steps_with_tiers(rank: int, steps: Callable[[], list[Tensor]]) -> list[Tensor]:
    """What can be recomputed is, and all else moves."""
    with moving(room=MiB, recompute=True, dram="1GiB") as session:
        results = steps()
        assert moved(session)["h2d"] > 0
        saver = session.runtime.saver()
        assert saver is not None
        plans = [plan for mover in saver.movers.armed for plan in mover.learner.plans]
        again = {key.rpartition(":")[0] for plan in plans for key in plan.recompute}
        print(f"  rank {rank} recomputes what {sorted(again)} saved")
        assert any(".blocks.1." in path for path in again), "nothing of a sharded block is recomputed"
    return results


def _step_in_between(rank: int, directory: str) -> None:
    """Between forward and backward: the second gather has other weights, and plain PyTorch says nothing."""
    model, device = _sharded(rank, "cpu", f"{directory}/start")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with moving(**REMADE):
        for i in range(6):
            model(batch(device, i)).square().mean().backward()
        loss = model(batch(device, 9)).square().mean()
        optimizer.step()
        try:
            loss.backward()
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error) and "TIERS_POLICY" in str(error), error
        else:
            raise AssertionError("gradients are of other activations than forward's")
    dist.destroy_process_group()


def parameters_that_fsdp_gathers_anew_may_not_have_changed(device: torch.device) -> None:
    """What was dropped would be made from other weights. On the CPU, whatever the device."""
    with tempfile.TemporaryDirectory() as directory:
        _spawn(_step_in_between, directory)


def fsdp2(device: torch.device) -> None:
    """Parameters' memory comes and goes, and what is recomputed is while it is there. By NCCL where two GPUs are."""
    _train_sharded("cpu", ("plain", "torch"))
    if device.type == "cuda" and torch.cuda.device_count() >= 2:
        _train_sharded("cuda", ("plain", "torch", "pages"))


def _train_sharded(kind: str, ways: tuple[str, ...]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        for how in ways:
            print(f"  on the {kind}, {how}")  # which of them hung, if one does
            _spawn(_train_shards, directory, kind, how)
        for rank in range(2):
            plain, *others = (bits(torch.load(f"{directory}/{kind}-{how}-{rank}")) for how in ways)
            print(f"  rank {rank}: {len(plain)} results")
            assert all(plain == ours for ours in others)


if __name__ == "__main__":
    main("processes")
