"""The process that reads NVML and prints the result in one line; started by `gpus`.

It may hang in the driver or be killed by it. It does not judge: each reading is a value or the
reason why there is none. It imports as little as possible, because modules in a zipapp are compiled
at each start.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any, Callable, Dict, List, Optional, Sequence

from relaunch.agent.node import bindings

Json = Dict[str, Any]
LIBRARY = "libnvidia-ml.so.1"
INVENTORY = ("name", "memory", "processes", "remapped", "retired_pending", "recovery_action")
"""Readings for a look at a node: which GPUs there are, who uses them, and what alone condemns one.
All others are for examinations, and take dozens of calls into the driver."""


def main(arguments: Sequence[str]) -> int:
    """Read NVML and print one line.

    Args:
        arguments: `inventory`, to read only that, or another word; then the node's state folder.
    """
    answer = _read_gpus(
        INVENTORY if arguments[:1] == ["inventory"] else None,
        arguments[1] if len(arguments) > 1 else None,
    )
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    return 0


def _read_gpus(names: Optional[Sequence[str]], state: Optional[str]) -> Json:
    try:
        ctypes.CDLL(LIBRARY)
    except OSError as error:
        missing = "cannot open shared object file" in str(error)
        return {
            "unreadable": f"{LIBRARY} is not on this node"
            if missing
            else f"{LIBRARY} cannot be loaded: {error}"
        }
    return NvmlReader(bindings.load(state), names).read_all()


Reading = Callable[[Any], Any]


class NvmlReader:
    def __init__(self, nvml: Any, names: Optional[Sequence[str]] = None) -> None:
        """Make the readings in `names`; None: all."""
        self.nvml = nvml
        prefix = "NVML_ERROR_"
        self.error_names: Dict[int, str] = {
            getattr(nvml, name): name[len(prefix) :]
            for name in dir(nvml)
            if name.startswith(prefix)
        }
        readings: Dict[str, Reading] = {
            "name": lambda gpu: _decode(nvml.nvmlDeviceGetName(gpu)),
            "memory": self._read_memory,
            "processes": self._list_processes,
            "ecc": self._read_ecc,
            "remapped": self._read_remapped_rows,
            "retired_pending": lambda gpu: bool(nvml.nvmlDeviceGetRetiredPagesPendingStatus(gpu)),
            "recovery_action": lambda gpu: self._read_fields(
                gpu, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
            )[0],
            "throttle": lambda gpu: self._call_first_available(
                "nvmlDeviceGetCurrentClocksEventReasons",
                "nvmlDeviceGetCurrentClocksThrottleReasons",
                gpu,
            ),
            "nvlink_errors": self._read_nvlink_errors,
            "nvlink_inactive": self._list_inactive_links,
            "temperature": lambda gpu: self._call_first_available(
                "nvmlDeviceGetTemperature",
                "nvmlDeviceGetTemperatureV",
                gpu,
                nvml.NVML_TEMPERATURE_GPU,
            ),
            "pcie_replays": nvml.nvmlDeviceGetPcieReplayCounter,
        }
        self.readings = {
            name: ask for name, ask in readings.items() if names is None or name in names
        }

    def read_all(self) -> Json:
        try:
            self.nvml.nvmlInit()
            count = self.nvml.nvmlDeviceGetCount()
        except self.nvml.NVMLError as error:
            return {"unreadable": f"NVML: {self._name_error(error)}"}
        return {
            "driver": self._read_version(self.nvml.nvmlSystemGetDriverVersion),
            "nvml": self._read_version(self.nvml.nvmlSystemGetNVMLVersion),
            "gpus": [self._read_gpu(index) for index in range(count)],
        }

    def _name_error(self, error: Any) -> str:
        return self.error_names.get(error.value, f"ERROR_{error.value}")

    def _read_version(self, ask: Callable[[], Any]) -> Any:
        try:
            return _decode(ask())
        except self.nvml.NVMLError as error:
            return {"unreadable": self._name_error(error)}

    def _read_gpu(self, index: int) -> Json:
        bus_id = None
        try:
            gpu = self.nvml.nvmlDeviceGetHandleByIndex(index)
            bus_id = _decode(self.nvml.nvmlDeviceGetPciInfo(gpu).busId)
            readings: Json = {
                "index": index,
                "uuid": _decode(self.nvml.nvmlDeviceGetUUID(gpu)),
                "bus_id": bus_id,
            }
            for name, ask in self.readings.items():
                try:
                    readings[name] = ask(gpu)
                except self.nvml.NVMLError as error:
                    if error.value == self.nvml.NVML_ERROR_GPU_IS_LOST:
                        raise
                    readings[name] = {"unreadable": self._name_error(error)}
        except self.nvml.NVMLError as error:
            return {"index": index, "lost": self._name_error(error), "bus_id": bus_id}
        return readings

    def _call_first_available(self, name: str, other: str, *arguments: Any) -> int:
        """Call `name`, or `other` if the library lacks it (newer and older libraries differ)."""
        try:
            return int(getattr(self.nvml, name)(*arguments))
        except self.nvml.NVMLError as error:
            if error.value != self.nvml.NVML_ERROR_FUNCTION_NOT_FOUND:
                raise
        return int(getattr(self.nvml, other)(*arguments))

    def _read_memory(self, gpu: Any) -> Json:
        memory = self.nvml.nvmlDeviceGetMemoryInfo(gpu)
        return {"total": memory.total, "used": memory.used}

    def _list_processes(self, gpu: Any) -> List[Json]:
        """Return the compute processes of a GPU.

        Graphics processes are left out: a display server blocks nothing except a reset, which
        reports it.
        """
        listed = list(self.nvml.nvmlDeviceGetComputeRunningProcesses(gpu))
        try:
            listed += self.nvml.nvmlDeviceGetMPSComputeRunningProcesses(gpu)
        except self.nvml.NVMLError as error:
            if error.value not in (
                self.nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
                self.nvml.NVML_ERROR_NOT_SUPPORTED,
            ):
                raise
        used = {each.pid: each.usedGpuMemory for each in listed}
        return [{"pid": pid, "used": used[pid]} for pid in sorted(used)]

    def _read_ecc(self, gpu: Any) -> Json:
        total, kind = (
            self.nvml.nvmlDeviceGetTotalEccErrors,
            self.nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
        )
        return {
            "volatile_uncorrected": total(gpu, kind, self.nvml.NVML_VOLATILE_ECC),
            "aggregate_uncorrected": total(gpu, kind, self.nvml.NVML_AGGREGATE_ECC),
        }

    def _read_remapped_rows(self, gpu: Any) -> Json:
        correctable, uncorrectable, pending, failed = self.nvml.nvmlDeviceGetRemappedRows(gpu)
        return {
            "correctable": correctable,
            "uncorrectable": uncorrectable,
            "pending": bool(pending),
            "failed": bool(failed),
        }

    def _read_nvlink_errors(self, gpu: Any) -> Json:
        nvml = self.nvml
        fields = [
            nvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
            nvml.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL,
            nvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL,
            nvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL,
        ]
        flit, data, replay, recovery = self._read_fields(gpu, fields)
        return {"crc": flit + data, "replay": replay, "recovery": recovery}

    def _list_inactive_links(self, gpu: Any) -> List[int]:
        inactive = []
        for link in range(self.nvml.NVML_NVLINK_MAX_LINKS):
            try:
                if not self.nvml.nvmlDeviceGetNvLinkState(gpu, link):
                    inactive.append(link)
            except self.nvml.NVMLError as error:
                past_the_last = (
                    self.nvml.NVML_ERROR_INVALID_ARGUMENT,
                    self.nvml.NVML_ERROR_NOT_SUPPORTED,
                )
                if link == 0 or error.value not in past_the_last:
                    raise
                break
        return inactive

    def _read_fields(self, gpu: Any, fields: Sequence[int]) -> List[int]:
        values = []
        for each in self.nvml.nvmlDeviceGetFieldValues(gpu, fields):
            if each.nvmlReturn != self.nvml.NVML_SUCCESS:
                raise self.nvml.NVMLError(each.nvmlReturn)
            values.append(int(getattr(each.value, _MEMBERS[each.valueType])))
        return values


_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Members of nvmlValue_t, indexed by nvmlValueType_t."""


def _decode(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
