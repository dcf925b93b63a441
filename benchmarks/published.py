"""What it takes to plan a step of a published model: one command each, on shapes alone.

    python -m benchmarks.published

Prints the table of `docs/measured/planner.md` and writes `results/published.csv`. Seconds
are processor time of the whole command, imports included: the least of three runs, since others on the
machine only add to it.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys

from benchmarks.common.records import Record, save

# As in the table: the step, and the command's words for it.
STEPS = {
    "Llama-3-8B, 8192 tokens": "llama-3-8b --seq 8192 --peak 80GB",
    "Llama-3-70B, 8192 tokens, 64 shards, AdamW": (
        "llama-3-70b --seq 8192 --peak 80GB --shards 64 --optimizer adamw"
    ),
    "Mixtral-8x7B, 4096 tokens, 8 shards, AdamW": (
        "mixtral-8x7b --seq 4096 --peak 80GB --shards 8 --optimizer adamw"
    ),
    "ViT-H, 256 images": "vit-h-14 --batch 256 --peak 40GB",
    "Whisper large v3, 16 x 30 s": "whisper-large-v3 --batch 16 --peak 40GB",
    "DeepSeek-V3 on a rank of 32 with experts, 4096 tokens, 8 shards, AdamW": (
        "deepseek-v3-ep32 --seq 4096 --peak 80GB --shards 8 --optimizer adamw"
    ),
    "SDXL's U-Net, 16 images of 1024 x 1024, AdamW": "sdxl-unet --batch 16 --peak 80GB --optimizer adamw",
}


def measured(step: str) -> list[Record]:
    """Plans one of the steps in a process of its own, and says what that took."""
    words = STEPS[step].split()
    command = [sys.executable, "-m", "remat", "plan", f"hf:{words[0]}", "--params", "meta", *words[1:]]
    # Python's bytecode is cached, as it is for users.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    taken = []
    for _ in range(3):
        before = _processor()
        done = subprocess.run(
            [*command, "--device", "h100", "--json"], env=env, capture_output=True, text=True, check=True
        )
        taken.append(_processor() - before)
    found = json.loads(done.stdout)
    values = {
        "planning": ("s", min(taken)),
        "planner's memory": ("GiB", found["memory"] / 2**30),
        "peak without remat": ("GiB", found["plain_bytes"] / 2**30),
        "peak": ("GiB", found["peak_bytes"] / 2**30),
    }
    return [Record("published", step, "plan", metric, *value) for metric, value in values.items()]


def _processor() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def row(step: str, values: dict[str, float]) -> str:
    """A row of the table in the docs."""
    seconds, memory, plain, peak = values.values()
    return f"| {step} | {plain:.1f} GiB | {peak:.1f} GiB | {seconds:.1f} | {memory:.2f} GiB |"


def main() -> None:
    records: list[Record] = []
    for step in STEPS:
        found = measured(step)
        print(row(step, {record.metric: record.value or 0.0 for record in found}), flush=True)
        records += found
    print(save("published", records))


if __name__ == "__main__":
    main()
