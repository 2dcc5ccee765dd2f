"""What the machine can do, in numbers that the other results are read by."""

import torch

from benchmarks.timing import device_seconds, host_seconds, on_gpu, record, synchronise
from funcspec.kernels._triton import jit, tl

CHAINS = (1, 10, 100)
LABELS = {
    "copy_gb_per_s": "device copy, bytes read and written, GB/s",
    "torch_op_host_us": "torch operation on one element, host time, us",
    "item_us": ".item() round trip, us",
    "empty_us": "torch.empty(), host time, us",
    "triton_launch_host_us": "eager launch of a Triton kernel, host time, us",
    **{f"graph_{count}_us": f"graph of {count} tiny dependent Triton kernels, us" for count in CHAINS},
    "graph_node_us": "one more kernel in a graph, us",
    **{f"graph_{count}_launch_host_us": f"launch of a graph of {count}, host time, us" for count in CHAINS},
}
GPU_ONLY = tuple(name for name in LABELS if "graph" in name or "triton" in name)


@jit
def count_kernel(counter_ptr):
    """The smallest kernel that depends on the one before: counts its own launches."""
    tl.store(counter_ptr, tl.load(counter_ptr) + 1)


def copy_bandwidth(device: str, copy_bytes: int) -> float:
    """GB/s of a copy within the device, bytes read and bytes written counted."""
    source = torch.ones(copy_bytes, dtype=torch.uint8, device=device)
    copied = torch.empty_like(source)
    return 2 * copy_bytes / device_seconds(lambda: copied.copy_(source), device, batch=5 if on_gpu(device) else 1) / 1e9


def calibrate(device: str, copy_bytes: int | None = None) -> dict[str, float]:
    """Measure what `LABELS` names; on a CPU without `GPU_ONLY`.

    Args:
        device: "cuda" or "cpu".
        copy_bytes: size of the copied buffer; None is 1 GiB on a GPU and 256 MiB on a CPU.
    """
    copy_bytes = copy_bytes or (2**30 if on_gpu(device) else 2**28)
    number = torch.zeros(1, device=device)
    found = {
        "copy_gb_per_s": copy_bandwidth(device, copy_bytes),
        "torch_op_host_us": host_seconds(lambda: number.add_(1), device) * 1e6,
        "item_us": host_seconds(number.item, device) * 1e6,
        "empty_us": host_seconds(lambda: torch.empty(1024, device=device), device) * 1e6,
    }
    return found | _calibrate_kernels(device) if on_gpu(device) else found


def _calibrate_kernels(device: str) -> dict[str, float]:
    """Triton launches, eager and in graphs."""
    counter = torch.zeros(1, dtype=torch.int32, device=device)

    def launch() -> None:
        count_kernel[(1,)](counter, num_warps=1)

    def chain(count: int) -> None:
        for _ in range(count):
            launch()

    found = {"triton_launch_host_us": host_seconds(launch, device) * 1e6}
    for count in CHAINS:
        graph = record(lambda count=count: chain(count))
        counter.zero_()
        graph()
        synchronise(device)
        if int(counter) != count:
            raise RuntimeError(f"a graph of {count} kernels counted to {int(counter)}")
        found[f"graph_{count}_us"] = device_seconds(graph, device) * 1e6
        found[f"graph_{count}_launch_host_us"] = host_seconds(graph, device) * 1e6
    few, many = CHAINS[-2:]
    found["graph_node_us"] = (found[f"graph_{many}_us"] - found[f"graph_{few}_us"]) / (many - few)
    return found


def print_calibration(found: dict[str, float]) -> None:
    """One aligned line for each number."""
    for name, label in LABELS.items():
        if name in found:
            print(f"{label:55} {found[name]:10.2f}")
    if any(name not in found for name in GPU_ONLY):
        print("left out, as they need a GPU: launches of Triton kernels, eager and in graphs")
