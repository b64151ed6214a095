"""PCIe traffic of the GPUs, from NVML."""

from __future__ import annotations

import time
from typing import Any

from torch_tiers.monitor.sensors import Clock, Reading

_KIB = 1024  # NVML tells KiB per second


class Pcie:
    """Bytes into and out of all GPUs, the program's own copies included.

    NVML watches a GPU for 20 milliseconds in each direction; newer ones also count bytes, but that count may wrap.
    """

    name = "pcie"

    def __init__(self, nvml: Any = None, clock: Clock = time.monotonic) -> None:
        self._nvml = nvml
        self._clock = clock
        self._gpus: list[Any] = []

    def why_not(self) -> str | None:  # noqa: D102
        try:
            if self._nvml is None:
                import pynvml

                self._nvml = pynvml
            self._nvml.nvmlInit()
            count = self._nvml.nvmlDeviceGetCount()
            self._gpus = [self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        except ImportError:
            return "pip install nvidia-ml-py"
        except Exception as error:  # NVML's own classes, which are made when it is loaded
            return str(error)
        return None if self._gpus else "no GPU"

    def read(self) -> Reading | None:  # noqa: D102
        nvml = self._nvml
        received, sent = (
            _KIB * sum(nvml.nvmlDeviceGetPcieThroughput(gpu, way) for gpu in self._gpus)
            for way in (nvml.NVML_PCIE_UTIL_RX_BYTES, nvml.NVML_PCIE_UTIL_TX_BYTES)
        )
        return Reading(self._clock(), {"rx": float(received), "tx": float(sent)})
