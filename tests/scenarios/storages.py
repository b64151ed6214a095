"""What a saved tensor lies on: addresses that come back, storages saved many times, views of every kind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.scenarios import REMADE, assert_same, batch, gradients, main, moved, moving, perceptron, train
from torch_tiers.allocator.sizes import KiB, MiB

View = Callable[[Tensor], Tensor]


def keeps_storages_apart_that_share_an_address(device: torch.device) -> None:
    """Each chunk's storage is freed before the next is made, so that all have one address."""
    addresses: list[int] = []

    def program(device: torch.device) -> list[Tensor]:
        model = perceptron(device, depth=1)
        weight = torch.ones((), device=device, requires_grad=True)
        for i in range(6):
            x = model(batch(device, i)).detach() + i
            addresses.append(x.data_ptr())
            (x * weight).sum().backward()
            del x
        return [weight.grad]

    assert_same(program, device, moves=False)
    print(f"  {len(addresses)} storages at {len(set(addresses))} addresses")
    assert len(set(addresses)) < len(addresses)


def keeps_storages_apart_that_share_an_address_within_an_iteration(device: torch.device) -> None:
    """What moved is released at once, so its address comes back while its bytes are away."""
    addresses: list[int] = []

    def program(device: torch.device) -> list[Tensor]:
        model = perceptron(device, depth=1)
        loss = torch.zeros((), device=device)
        for i in range(8):
            h = (model(batch(device, i)) + i).repeat(4, 1)
            addresses.append(h.data_ptr())
            loss = loss + h.square().mean()
            del h
        loss.backward()
        return [loss.detach(), *gradients(model)]

    assert_same(program, device, room=0)
    print(f"  {len(addresses)} storages at {len(set(addresses))} addresses")
    assert len(set(addresses)) < len(addresses)


class _Attention(nn.Module):
    """Saves its input three times over, and q, k, v, which are views of one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(128, 128) for _ in range(3))
        self.qkv = nn.Linear(128, 3 * 128)

    def forward(self, x: Tensor) -> Tensor:
        x = self.query(x) * self.key(x) + self.value(x)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return (q * k * v).sum()


def moves_a_storage_that_is_saved_many_times_once(device: torch.device) -> None:
    torch.manual_seed(0)
    model = _Attention().to(device)
    x_bytes = batch(device, 0, rows=4096).nbytes
    # x; query and key for their product; the new x; q, k, v on one storage; q * k
    unique = (1 + 2 + 1 + 3 + 1) * x_bytes
    with moving(room=0) as session:
        for i in range(5):
            before = moved(session)
            model(batch(device, i, rows=4096)).backward()
            gone = {lane: moved(session)[lane] - before[lane] for lane in ("d2h", "h2d")}
            print(f"  iteration {i}: {gone}, unique saved bytes {unique}")
            most = 2 * unique if i == 1 else unique  # where replays are tried, on copies of their own of what is away
            assert gone["d2h"] == unique <= gone["h2d"] <= most


VIEWS: dict[str, View] = {
    "expanded": lambda x: x[:, :1].expand(-1, 64),
    "a row expanded": lambda x: x[0].expand(512, -1),
    "with an offset": lambda x: x[100:900, 7:100],
    "0-d": lambda x: x[513, 77],
    "one element": lambda x: x[513:514, 77:78],
    "transposed": lambda x: x.t(),
    "every third": lambda x: x[::3, ::5],
    "permuted": lambda x: x.view(16, 128, 128).permute(2, 0, 1),
    "channels last": lambda x: x.view(8, 16, 16, 128).contiguous(memory_format=torch.channels_last),
    "overlapping windows": lambda x: x.reshape(-1).unfold(0, 1024, 256),
    "diagonal": lambda x: x.diagonal(),
    "empty": lambda x: x[:0],
    "bfloat16": lambda x: x.bfloat16(),
    "float16, odd offset": lambda x: x.half()[1:, 3:],
    "float64": lambda x: x.double(),
    "complex": lambda x: torch.complex(x, -x),
    "conjugated": lambda x: torch.complex(x, -x).conj(),
    "imaginary part of a conjugate": lambda x: torch.complex(x, -x).conj().imag,
    "real part": lambda x: torch.view_as_real(torch.complex(x, -x)),
}


def gives_views_of_every_kind_back(device: torch.device) -> None:
    for name, view in VIEWS.items():
        print(f"  {name}")

        def program(device: torch.device, view: View = view) -> list[Tensor]:
            def loss_of(model: nn.Module, x: Tensor) -> Tensor:
                h = view(model(x))
                return (h * h).abs().sum() / 1e6

            return train(perceptron(device, depth=3), device, loss_of=loss_of)

        assert_same(program, device, room=0)


class _Carry(torch.autograd.Function):
    """The identity; saves `extra` and adds its sum to the gradient."""

    @staticmethod
    def forward(ctx, x, extra):
        ctx.save_for_backward(extra)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        (extra,) = ctx.saved_tensors
        return grad + extra.float().mean(), None


def gives_dtypes_of_every_kind_back(device: torch.device) -> None:
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int16,
        torch.int64,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ):
        print(f"  {dtype}")

        def program(device: torch.device, dtype: torch.dtype = dtype) -> list[Tensor]:
            def loss_of(model: nn.Module, x: Tensor) -> Tensor:
                extra = (x.repeat(4, 1) * 3).to(dtype)[5:, 1:]  # 1 MiB even at a byte an element
                return _Carry.apply(model(x), extra).square().mean()

            return train(perceptron(device, depth=2), device, loss_of=loss_of)

        assert_same(program, device, room=0)


def moves_only_the_bytes_of_a_small_view(device: torch.device) -> None:
    huge = torch.arange(8 * MiB, dtype=torch.float32, device=device)  # 32 MiB
    weight = torch.ones((), device=device, requires_grad=True)
    model = perceptron(device, depth=1)
    with moving(room=0) as session:
        model(batch(device, 0)).sum().backward()  # arms, and ends up in an iteration of its own
        before = moved(session)["d2h"]
        pieces = [huge[start : start + 300 * KiB] for start in (5, 2 * MiB + 1)]
        loss = sum((piece * weight).double().sum() for piece in pieces)
        loss.backward()
        gone = moved(session)["d2h"] - before
        print(f"  {gone} bytes moved of {huge.nbytes}")
        assert 2 * 1200 * KiB <= gone <= 2 * 1200 * KiB + 4 * KiB
    assert weight.grad == sum(piece.double().sum() for piece in pieces).float()


def tells_siblings_apart_that_have_version_counters_of_their_own(device: torch.device) -> None:
    """`unsafe_chunk` returns tensors on one storage, each with its own counter: equal versions, other contents."""

    def program(device: torch.device) -> list[Tensor]:
        def loss_of(model: nn.Module, x: Tensor) -> Tensor:
            left, right = model(x).repeat(4, 1).unsafe_chunk(2)
            right.mul_(2)
            loss = right.square().mean()  # saves `right` at version 1
            left.mul_(3)
            return loss + left.square().mean()  # and `left`, too

        return train(perceptron(device, depth=1), device, loss_of=loss_of)

    for room in (0, 16 * MiB):
        assert_same(program, device, room=room, moves=room == 0)


def gives_back_what_shares_a_storage_with_what_stays_alive(device: torch.device) -> None:
    """The program itself holds the storage into backward, and reads it there."""

    def program(device: torch.device) -> list[Tensor]:
        def loss_of(model: nn.Module, x: Tensor) -> Tensor:
            h = model(x).repeat(4, 1)
            held.append(h)
            return (h * h[:, :1]).mean() + h.detach().sum() * 0

        held: list[Tensor] = []
        return [*train(perceptron(device, depth=2), device, loss_of=loss_of), *held]

    assert_same(program, device)


def what_a_kernel_fills_after_it_was_saved_moves_once_it_is_filled(device: torch.device) -> None:
    """RReLU's noise: PyTorch saves it, and only then has the kernel write it. A hook that copies gets garbage."""

    class Leaky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(128, 128)

        def forward(self, x: Tensor) -> Tensor:
            return x + F.rrelu(self.layer(x), training=True)

    def program(device: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        return train(nn.Sequential(*(Leaky() for _ in range(4))).to(device), device, steps=8)

    for room in (0, MiB, 3 * MiB):
        assert_same(program, device, room=room)
        assert_same(program, device, room=room, share=0.5)


def parts_with_counters_of_their_own_are_not_taken_for_the_whole(device: torch.device) -> None:
    """One is saved, and then another written in place: no version tells that the storage is as it was no more."""

    class Gates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(128, 3 * 128)

        def forward(self, x: Tensor) -> Tensor:
            first, second, third = self.layer(x).unsafe_chunk(3, 1)
            reset, update, new = first.sigmoid_(), second.sigmoid_(), third.mul_(first)
            return x + (new * update).exp().sin() * reset

    class Cell(nn.GRUCell):
        def forward(self, x: Tensor, h: Tensor | None = None) -> Tensor:
            for _ in range(3):
                h = super().forward(x, h) * 1.0
            assert h is not None
            return h

    class Layer(nn.GRU):
        def forward(self, x: Tensor, h: Any = None) -> Any:
            return super().forward(x.view(-1, 64, 128))[0].reshape(x.shape)

    def program(make: Callable[[], nn.Module], device: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        return train(nn.Sequential(make(), make()).to(device), device, steps=6)

    class Halves(nn.Module):
        """Of the first half a view is saved, which shares its version with the whole; the second half's is another."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(128, 128)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            exp, rows = y.exp(), y.shape[0] // 2
            first, scale = y[:rows].sin(), (exp * 2).sigmoid()
            second = y.unsafe_chunk(2)[1].sigmoid_()
            return torch.cat([first, second]).tanh() * scale

    for make in (Gates, Halves, partial(Cell, 128, 128), partial(Layer, 128, 128)):
        assert_same(partial(program, make), device, moves=False, **REMADE)
        assert_same(partial(program, make), device, moves=False, policy="superneurons", room=MiB)


class _Fill(torch.autograd.Function):
    """Writes a column past the version counter, as torchdiffeq does: no column that was saved changes by that."""

    @staticmethod
    def forward(ctx: Any, scratch: Tensor, value: Tensor, column: int) -> Tensor:  # type: ignore[override]
        ctx.column = column
        scratch.data[..., column] = value
        return scratch

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        return grad, grad[..., ctx.column], None


def a_buffer_may_be_filled_by_data_between_saves_of_its_columns(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        model = perceptron(device, depth=2)
        weights = torch.linspace(0.1, 0.4, 4).to(device).requires_grad_()
        results = []
        for i in range(6):
            model.zero_grad()
            y = model(batch(device, i))
            scratch = _Fill.apply(torch.zeros(*y.shape, 4, device=device), y, 0)
            for k in range(1, 4):
                y = y + model((scratch[..., :k] * weights[:k]).sum(-1))
                scratch = _Fill.apply(scratch, y, k)
            loss = (scratch * weights).sum(-1).square().mean()
            loss.backward()
            results += [loss.detach(), *gradients(model)]
        return [*results, weights.grad]

    for arguments in ({"room": 0}, {"share": 1 / 2}, {"recompute": True}, REMADE):
        assert_same(program, device, moves=arguments is not REMADE, **arguments)


if __name__ == "__main__":
    main("storages")
