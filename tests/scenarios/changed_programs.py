"""Programs that change once their replays were verified, so that these hold no more: results stay the same."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.scenarios import REMADE, assert_same, batch, gradients, main
from tests.scenarios.parts import AT, WIDTH, Part, assert_same_later


class Normalised(Part):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def between(self, x: Tensor) -> Tensor:
        return F.gelu(self.norm(x))


def an_epsilon_is_the_module_s_in_every_step(device: torch.device) -> None:
    class Later(Normalised):
        def later(self) -> None:
            self.norm.eps = 1e-2

    assert_same_later(Later, device, **REMADE)


def a_normalisation_in_place_of_another_has_an_epsilon_of_its_own(device: torch.device) -> None:
    class Later(Normalised):
        def later(self) -> None:
            other = nn.LayerNorm(WIDTH, eps=1e-3).to(self.norm.weight.device)
            other.load_state_dict(self.norm.state_dict())
            self.norm = other

    assert_same_later(Later, device, **REMADE)


def two_models_of_one_class_have_epsilons_of_their_own(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        results = []
        for epsilon in (1e-5, 1e-2):
            torch.manual_seed(0)
            model = nn.Sequential(*(Normalised() for _ in range(3))).to(device)
            for part in model:
                part.norm.eps = epsilon
            for i in range(6):
                model.zero_grad()
                model(batch(device, i, rows=256, width=WIDTH)).square().mean().backward()
                results += gradients(model)
        return results

    assert_same(program, device, moves=False, **REMADE)


def the_innermost_module_tells_an_epsilon(device: torch.device) -> None:
    class Around(nn.Module):
        """Hands out what the normalisation has made, and has an epsilon of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.norm, self.eps = nn.LayerNorm(WIDTH), 1e-5

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.norm(x)
            return made

    class Later(Part):
        def __init__(self) -> None:
            super().__init__()
            self.norm = Around()

        def between(self, x: Tensor) -> Tensor:
            return F.gelu(self.norm(x))

        def later(self) -> None:
            self.norm.eps = 1e-2

    assert_same_later(Later, device, **REMADE)


def a_bias_that_was_zero_is_not_left_out(device: torch.device) -> None:
    """It is frozen, which a node does not tell from none; a checkpoint is loaded later."""

    class Later(Part):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.GroupNorm(4, WIDTH)
            self.norm.bias.requires_grad_(False)

        def between(self, x: Tensor) -> Tensor:
            return F.gelu(self.norm(x))

        def later(self) -> None:
            with torch.no_grad():
                self.norm.bias.copy_(torch.linspace(-1, 1, WIDTH))

    assert_same_later(Later, device, **REMADE)


def replays_take_the_kernels_that_forward_took(device: torch.device) -> None:
    class Convolved(Part):
        def __init__(self) -> None:
            super().__init__()
            self.over = nn.Conv1d(1, 8, 5, padding=2)

        def between(self, x: Tensor) -> Tensor:
            return F.gelu(self.over(x[:, None])).mean(1)

    def forward(model: nn.Module, x: Tensor, i: int) -> Tensor:
        torch._C._set_mkldnn_enabled(i < AT)
        try:
            with torch.backends.cudnn.flags(enabled=i < AT):
                made: Tensor = model(x)
        finally:
            torch._C._set_mkldnn_enabled(True)
        return made

    assert_same_later(Convolved, device, forward=forward, **REMADE)


def settings_of_forward_alone_are_those_that_it_is_recomputed_with(device: torch.device) -> None:
    """And the program has its own again afterwards, a warning in place of an error included."""

    def program(device: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Normalised() for _ in range(3))).to(device)
        results = []
        for i in range(6):
            torch._C._set_mkldnn_enabled(False)
            with torch.backends.cudnn.flags(deterministic=True):
                loss = model(batch(device, i, rows=256, width=WIDTH)).square().mean()
            torch._C._set_mkldnn_enabled(True)
            before = torch.get_deterministic_debug_mode()
            torch.set_deterministic_debug_mode("warn")
            model.zero_grad()
            loss.backward()
            assert torch.get_deterministic_debug_mode() == 1
            torch.set_deterministic_debug_mode(before)
            results += gradients(model)
        return results

    assert_same(program, device, moves=False, **REMADE)


if __name__ == "__main__":
    main("changed_programs")
