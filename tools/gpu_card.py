"""Prints the card, its memory and the versions that meet there, after a product on it.

Without a GPU it does the same on the processor. A part that fails to start stops it.
"""

import importlib.metadata
import importlib.util
import json
import platform
import time

import torch

PARTS = ("torch", "transformers", "trl", "peft", "vllm", "unsloth")


def main() -> None:
    card = torch.cuda.is_available()
    report = {
        "card": torch.cuda.get_device_name(0) if card else platform.processor() or "a CPU",
        "gigabytes": round(torch.cuda.mem_get_info()[1] / 1e9, 1) if card else None,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }
    for part in PARTS:
        if importlib.util.find_spec(part) is not None:
            report[part] = importlib.metadata.version(part)
    x = torch.rand(2048, 2048, device="cuda" if card else "cpu")
    started = time.perf_counter()
    total = float((x @ x).sum())
    report["seconds of a product"] = round(time.perf_counter() - started, 3)
    torch.testing.assert_close(total, float(x.sum(0) @ x.sum(1)), rtol=1e-2, atol=0.0)
    print(json.dumps(report))
    if card and "vllm" in report:
        import vllm  # noqa: F401  starts its own CUDA extensions


if __name__ == "__main__":
    main()
