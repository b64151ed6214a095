"""Drops what autograd saves, and makes it again when it is wanted."""

from __future__ import annotations

import gc
import warnings
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.unit.migrator.tape.programs import PROGRAMS, Program
from tests.unit.migrator.tape.records import Form, has_the_bits_of, is_whole, snapshot, storage_of
from torch_tiers.migrator.tape.closure import Bound
from torch_tiers.migrator.tape.recorder import Recorder


class Kept:
    """Stands for all of a storage, of which it has a copy."""

    def __init__(self, whole: Tensor) -> None:
        self.value = snapshot(whole)

    def get(self) -> Tensor:
        return self.value


class Dropped:
    """Stands for all of a storage, which is made again each time that it is wanted."""

    def __init__(self, closure: Bound) -> None:
        self.closure = closure

    def get(self) -> Tensor:
        (made,) = self.closure.make([each.get() for each in self.closure.inputs])
        return made


@dataclass
class Dropping:
    """Keeps a closure in the place of every tensor that is saved, if all of its storage has one.

    Attributes
    ----------
    notes
        Whether closures may begin with what was saved before. If not they go back to what was there before the record.
    made
        Closures that stand for a tensor.
    refused
        How many tensors that were not there before the record had none; of those that closures may begin with, too.
    untrue
        Of closures that did not make what was there.
    """

    recorder: Recorder
    notes: bool
    made: list[Bound] = field(default_factory=list)
    refused: int = 0
    untrue: list[Bound] = field(default_factory=list)
    runs: int = 0
    _kept: list[Kept] = field(default_factory=list)

    def begin(self) -> None:
        """Record from now on."""
        with warnings.catch_warnings(action="ignore"):  # of modules that are outdated, and looked at
            tensors = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
        self._before = {storage_of(each) for each in tensors if each.layout is torch.strided}
        self.recorder.begin()
        self._packs = self.recorder.packs()

    def pack(self, tensor: Tensor) -> object:
        with self.recorder.untracked():
            whole = (tensor if tensor._base is None else tensor._base).detach()
            dropped = self._dropped(whole) if is_whole(whole) else None
            return tensor if dropped is None else (dropped, Form.of(tensor))

    def _dropped(self, whole: Tensor) -> Dropped | None:
        found, dropped = self._packs.find(whole, self.recorder.settings(), lambda storage: True), None
        if found is None:
            self.refused += storage_of(whole) not in self._before
        elif has_the_bits_of(Dropped(found).get(), whole):
            self.made.append(found)
            dropped = Dropped(found)
        else:
            self.untrue.append(found)
        if self.notes:
            if dropped is None:
                self._kept.append(Kept(whole))
            self._packs.note(whole, dropped or self._kept[-1], "")
        return dropped

    def unpack(self, packed: object) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        assert isinstance(packed, tuple)
        dropped, form = packed
        self.runs += 1
        with self.recorder.untracked():
            made: Tensor = form.on(dropped.get().untyped_storage())
        return made

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)


class Block(nn.Module):
    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.first, self.second = nn.LayerNorm(8), nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in self.qkv(self.first(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.second(x))


def transformer_with_dropout_under_autocast() -> Program:
    model = nn.Sequential(Block(dropout=0.2), Block(dropout=0.2))
    x = torch.randn(2, 5, 8)

    def forward() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x).float().square().sum()

    return forward, model


def checkpointed_blocks() -> Program:
    model = nn.ModuleList([Block(dropout=0.2), Block()])
    x = torch.randn(2, 5, 8)

    def forward() -> Tensor:
        y = x
        for block in model:
            y = checkpoint(block, y, use_reentrant=False)
        return y.square().sum()

    return forward, model


def randomized_relu_and_pooling() -> Program:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.RReLU(),
        nn.Conv2d(4, 4, 3, groups=4),
        nn.GroupNorm(2, 4),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(2),
        nn.Dropout2d(0.5),
    )
    x = torch.randn(2, 3, 8, 8)
    return lambda: model(x).square().sum(), model


def recurrent_by_hand() -> Program:
    model = nn.ModuleList([nn.GRUCell(4, 5), nn.LSTMCell(5, 5)])
    x = torch.randn(3, 2, 4)

    def forward() -> Tensor:
        h, state = torch.zeros(2, 5), (torch.zeros(2, 5), torch.zeros(2, 5))
        for each in x:
            h = model[0](each, h)
            state = model[1](h, state)
        return state[0].sum() + state[1].square().sum()

    return forward, model


def spectra() -> Program:
    model = nn.Linear(8, 8)
    x = torch.randn(4, 8)

    def forward() -> Tensor:
        y = torch.view_as_complex(model(x).view(4, 4, 2)).conj() * torch.polar(torch.ones(4), torch.arange(4.0))
        return (torch.view_as_real(y).square().sum(-1) * y.conj().imag).sum()

    return forward, model


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:  # type: ignore[override]
        gate = x.sigmoid()
        ctx.save_for_backward(x, gate)
        return x * gate

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:  # type: ignore[override]
        x, gate = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad * (gate + x * gate * (1 - gate))


def functions_of_its_own() -> Program:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8))
    x = torch.randn(3, 4)

    def forward() -> Tensor:
        y: Tensor = Swish.apply(model[0](x))  # type: ignore[no-untyped-call]
        y = y.index_put((torch.tensor([0, 2]),), y[1:] * 2)
        table = y.new_empty(3, 8).fill_(1)
        for row in range(3):
            table[row] = y[row] / (1 + row)
        return model[1](table).logsumexp(0).sum()

    return forward, model


BLOCKS = (
    *PROGRAMS,
    transformer_with_dropout_under_autocast,
    checkpointed_blocks,
    randomized_relu_and_pooling,
    recurrent_by_hand,
    spectra,
    functions_of_its_own,
)
